"""Find the largest batch that trains: start train.py for two steps per batch and read the memory from its record.

The runs use all devices of this node. A training on several nodes takes the same batch per device: FSDP over more
devices needs less memory on each, and DDP needs the same.
"""

import json
import logging
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.keys import is_left_out_of_trials
from lockstep.config.schema import key_of
from lockstep.launch.plan import RunPlan
from lockstep.runs import signals
from lockstep.runs.environment import environment
from lockstep.runs.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from lockstep.runs.provenance import REPOSITORY

log = logging.getLogger(__name__)

START, MAX_RUNS = 8, 8  # images per device of the first run
USABLE = 0.95  # of what the process can have of a device: the training that follows leaves other gaps
CLOSE = 0.95  # of a batch that failed is tried; nearer to what is aimed at than this is not worth another run
GIB = 2**30
TRAIN = REPOSITORY / "src" / "train.py"
OUT_OF_MEMORY = ("out of memory", "alloc_failed", "status_not_initialized", "unable to find an engine",
                 "can't allocate memory", "sigkill")  # fmt: skip
LAUNCHER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "NODE_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_",
            "LOCKSTEP_")  # fmt: skip


def search(plan: RunPlan) -> dict[str, Any]:
    """Run train.py with several batches; return the fields of `largest_batch` in the record."""
    parts = plan.cluster.world_size * plan.batch.accumulate
    mixes = any(plan.config["augmentation"].get(key, 0) for key in ("mixup_alpha", "cutmix_alpha"))  # pairs of images
    unit = math.lcm(2 if mixes else 1, plan.trainer.get("micro_batches") or 1)
    limit = bound = math.inf
    tried: dict[int, float | None] = {}
    batch: int | None = START
    while batch is not None:
        record = _train_two_steps(plan, batch)
        tried[batch] = peak = record["peak_memory_gib"]
        if peak:
            limit = plan.trainer["memory_limit_gib"] or USABLE * record["usable_memory_gib"]
            bound = record["num_train"] // parts
        log.info(f"{batch} images per device: " + (f"{peak:.3g} of {limit:.3g} GiB" if peak else "out of memory"))
        batch = next_batch(tried, limit, bound, unit)
    largest = fitting(tried, limit)
    return {
        "per_device": largest, "global": largest * parts, "probes": len(tried), "peak_memory_gib": tried[largest],
        "limit_gib": round(limit, 4), "bounded_by": "data set" if largest == bound else "memory",
    }  # fmt: skip


def next_batch(tried: Mapping[int, float | None], limit: float, bound: float, unit: int = 1) -> int | None:
    """Return the batch per device to try next, by a line through the last two peaks; None if the search is over.

    Args:
        tried: peak memory by batch; None where it ran out of memory.
        bound: the number of training images per device.
        unit: every batch is a multiple of it.
    """
    within = sorted((batch, peak) for batch, peak in tried.items() if peak and peak <= limit)
    over = sorted((batch, peak) for batch, peak in tried.items() if not peak or peak > limit)
    fit = within[-1][0] if within else 0
    failed = over[0][0] if over else bound + 1
    line = [*within[-2:], *((batch, peak) for batch, peak in over[:1] if peak)][-2:]
    aim: float = 8 * fit if fit else failed / 4
    if fit and len(line) == 2:
        (small, low), (large, high) = line
        aim = min(small + (limit - low) * (large - small) / max(high - low, 1e-9), 8 * fit)
    if aim >= failed:  # a first prediction is a little too high at most
        aim = bound if not over else max(0.9 * failed if len(within) > 1 == len(over) else 0, math.sqrt(fit * failed))
    aim = min(aim, CLOSE * failed) if over else aim
    aim = int(max(aim, unit) // unit * unit)
    return aim if fit < CLOSE * aim and aim not in tried and len(tried) < MAX_RUNS else None


def fitting(tried: Mapping[int, float | None], limit: float) -> int:
    """Return the largest batch within the limit; raise UserError if none is."""
    if largest := max((batch for batch, peak in tried.items() if peak and peak <= limit), default=0):
        return largest
    raise UserError(
        f"Not even {min(tried)} images per device fit into {limit:.3g} GiB. Use a smaller model, trainer=fsdp over "
        "more devices, or trainer.activation_checkpointing=true."
    )


def _train_two_steps(plan: RunPlan, batch: int) -> dict[str, Any]:
    """Return the record of a run of two steps and one validation batch; its peak is None if memory ran out."""
    devices, accumulate = plan.cluster.devices, plan.batch.accumulate
    one_process = plan.trainer["launch"] == "one_process"
    with tempfile.TemporaryDirectory(prefix="lockstep-batch-") as name:
        folder = Path(name)
        overrides = [
            *(word for word in plan.config["overrides"] if not is_left_out_of_trials(key_of(word))),
            f"data.global_batch_size={batch * devices * accumulate}", f"trainer.accumulate_grad_batches={accumulate}",
            *([] if one_process else [f"trainer.devices={devices}", "trainer.num_nodes=1"]),
            *(["model.pretrained=false"] if "pretrained" in plan.config["model"] else []),
            "trainer.max_steps=2", f"trainer.limit_train_batches={2 * accumulate}", "trainer.limit_val_batches=1",
            "test=false", "logbook=null", "s3.uri=null", "++callbacks.checkpoints=null", "run_id=probe",
            "++callbacks.hardware={_target_: lockstep.callbacks.hardware_stats.HardwareStats}",  # tells the peak
            f"paths.log_dir={folder}",
        ]  # fmt: skip
        code = run_train(overrides, environment(), folder / "output")
        path = folder / "train/runs/probe/run.json"
        record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        lines = (folder / "output").read_text().splitlines()
    if code == EXIT_OK:
        return record
    said = "\n".join([*lines[-30:], str(record.get("error"))])
    if any(sign in said.lower() for sign in OUT_OF_MEMORY):
        return {**record, "peak_memory_gib": None}
    if code == EXIT_USER_ERROR:
        raise UserError(lines[-1].removeprefix("error: "))
    raise RuntimeError(f"train.py with {batch} images per device ended with exit code {code}:\n{said}")


def run_train(overrides: list[str], environ: Mapping[str, str], output: Path) -> int:
    """Run train.py without a launcher's variables, until it or this process ends; return its exit code."""
    own = {name: value for name, value in environ.items() if not name.startswith(LAUNCHER)}
    before = signals.on_stop(signals.note)  # while it starts: a child that nobody knows would go on
    with output.open("w") as file:
        child = subprocess.Popen([sys.executable, str(TRAIN), *overrides], env=own, stdout=file, stderr=file)
    try:
        signals.on_stop(signals.interrupt)
        signals.check()
        return child.wait()
    finally:
        child.terminate()
        child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
