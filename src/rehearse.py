"""Dry run of a training on GPUs before a machine is rented: a few steps on a simulated CUDA driver.

    python src/rehearse.py <overrides of train.py> trainer.memory_limit_gib=16 [--capability=7.5]

Prints what fails with file and line, parameters without a gradient, lines that make the host wait for the device in
every step, and the peak memory with your batch. Exit code 0 only if nothing fails. Needs the package in nullgpu/, Linux
on x86-64 and cc; no GPU. --capability is the GPU's: 8.0 (the default) has bf16, 7.5 (T4) has fp16 only.
"""

import importlib
import json
import logging
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.commands.command_line import run_script
from lockstep.config.compose import whole_config
from lockstep.config.keys import is_left_out_of_trials
from lockstep.config.schema import key_of
from lockstep.runs.environment import environment
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, EXIT_USER_ERROR, UserError

log = logging.getLogger(__name__)

SRC = Path(__file__).resolve().parent
STEPS, FEW_IMAGES, MOST_RANKS, MEMORY_GIB = 3, 4, 4, 16.0
TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n((?:[ \t]+.*\n)+)(\S.*(?:\n(?!Traceback|error: )\S.*)?)")
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
NOT_YOURS = ("/site-packages/", "/dist-packages/", "/lib/python3", "/nullgpu/", "<frozen", "<string>",
             f"{SRC}/lockstep/", f"{SRC}/train.py", f"{SRC}/rehearse.py")  # fmt: skip
FIXED = {
    "trainer.max_epochs": 1, "trainer.max_steps": -1, "trainer.max_time": "null", "trainer.compile": False,
    "trainer.limit_val_batches": 1, "trainer.limit_test_batches": 1, "trainer.num_sanity_val_steps": 0,
    "trainer.check_val_every_n_epoch": 1, "trainer.val_check_interval": 1.0, "trainer.log_every_n_steps": 1000,
    "trainer.timeout_s": 60, "run_id": "dry-run", "logbook": "null", "s3.uri": "null",
    "+callbacks.dry_run._target_": "lockstep.callbacks.unused_parameters.UnusedParameters",
}  # fmt: skip
Line = tuple[str, str]  # ok, FAILED or nothing, and the text
Run = Callable[[list[str], Mapping[str, str], Path], int]  # starts train.py; returns its exit code


def lines(config: Any, words: list[str], capability: str, folder: Path, run: Run) -> Iterator[Line]:
    """Run train.py twice: few images with computed results, then the whole batch for its memory.

    Raises:
        UserError: train.py refuses the options, the trainer uses no GPU, or the driver cannot be built here.
    """
    try:
        nullgpu = importlib.import_module("nullgpu")
    except ModuleNotFoundError:
        raise UserError("A dry run needs the simulated CUDA driver: pip install ./nullgpu") from None
    if missing := nullgpu.missing():
        raise UserError(f"No dry run here: {missing}.")
    trainer, data = config["trainer"], config["data"]
    if trainer["accelerator"] == "cpu":
        raise UserError("This trainer uses no GPU: pass trainer=gpu, ddp or fsdp.")
    if data.get("global_batch_size") == "max":
        raise UserError("data.global_batch_size=max: pass the number that find_batch_size.py --estimate prints.")
    nodes, devices = (
        trainer[key] if trainer[key] != "auto" else few for key, few in (("num_nodes", 1), ("devices", 2))
    )
    one_process, accumulate = trainer["launch"] == "one_process", trainer["accumulate_grad_batches"]
    world_size = 1 if one_process else devices * nodes
    ranks, memory_gib = min(world_size, MOST_RANKS), trainer["memory_limit_gib"] or MEMORY_GIB
    per_device = max(data.get("global_batch_size", 128) // (world_size * accumulate), 1)
    yield "", f"{per_device} images per device, {ranks} of {world_size} ranks on simulated GPUs of {memory_gib:g} GiB"

    def start(place: Path, images: int, compute: bool, **more: Any) -> int:
        changes = FIXED | {
            "data.global_batch_size": images * ranks * accumulate,
            "trainer.limit_train_batches": STEPS * accumulate,
            **({} if one_process else {"trainer.devices": ranks, "trainer.num_nodes": 1}),
            **({"model.pretrained": False} if "pretrained" in config["model"] else {}),
            "paths.log_dir": place, "+callbacks.dry_run.path": place / "unused.json", **more,
        }  # fmt: skip
        others = [word for word in words if not is_left_out_of_trials(key_of(word))]
        kept = [word for word in others if key_of(word) not in changes]
        place.mkdir()
        number = max(devices, ranks)
        simulated = nullgpu.environment(number, memory_gib, compute, capability, syncs=place, nccl_timeout_s=20)
        simulated["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a rank waits for a collective at the line that calls it
        overrides = [*kept, *(f"{key}={value}" for key, value in changes.items())]
        return run(overrides, {**environment(), **simulated}, place / "output")

    few, whole = folder / "few", folder / "whole"
    batches = {"data.eval_batch_size": FEW_IMAGES} if "eval_batch_size" in data else {}
    code = start(few, min(FEW_IMAGES, per_device), True, **batches)
    unused = _json(few / "unused.json")
    word = "" if (trainer["strategy"] or {}).get("find_unused_parameters") else "FAILED"
    yield from ((word, f"no gradient for {name}: {where}") for name, where in unused.items())
    if not (code and unused):  # otherwise DDP has refused them
        yield _outcome(f"{STEPS} steps, a validation, a checkpoint and a test with few images", code, few)
    if code:
        return
    counts: Counter[str] = Counter()  # of each line that synchronises, the largest of a rank
    for path in few.glob("steps-rank*.json"):
        counts |= Counter(_json(path))
    for line, count in counts.items():
        if count >= STEPS:
            word = "" if line.startswith("GradScaler") else "FAILED"  # torch's own check for overflow in fp16
            yield word, f"the host waits for the device {count // STEPS} times a step: {line}"
    code = start(whole, per_device, False, **{"test": "false", "callbacks.checkpoints": "null"})
    if "became nan" not in (whole / "output").read_text():  # nothing is computed: losses are random memory
        yield _outcome(f"{STEPS} steps and a validation with {per_device} images per device", code, whole)
    if peak := _json(whole / "train/runs/dry-run/run.json").get("peak_memory_gib"):
        yield "", f"peak memory of a rank: {peak:.2f} GiB, and about 0.6 for CUDA, of {memory_gib:g} GiB"


def _outcome(what: str, code: int, place: Path) -> Line:
    """Return ok, or the first fault of a run in the user's code; raise UserError if train.py refused the options."""
    output = (place / "output").read_text()
    last = output.strip().rpartition("\n")[2]
    if code == EXIT_OK:
        return "ok", what
    if code == EXIT_USER_ERROR:
        raise UserError(last.removeprefix("error: "))
    faults = []
    for path in (place / "output", *sorted(place.glob("train/runs/*/rank*.*"))):
        text, rank = path.read_text(), path.stem.removeprefix("rank").replace("output", "0")
        driver = dict.fromkeys(re.findall("nullgpu: .*(?:differ|collective).*", text))
        for frames, message in TRACEBACK.findall(text):
            words = " ".join([*message.split(), *driver])[:400]
            faults.append((_yours(FRAME.findall(frames)), f"rank {rank} · {words}"))
    where, fault = next((each for each in faults if each[0]), faults[0] if faults else ("", last))
    stacks = (_yours(reversed(FRAME.findall(path.read_text()))) for path in sorted(place.glob("stack-rank*.txt")))
    waits = "".join(f"; a rank was at {line}" for line in stacks if line)
    return "FAILED", f"{what}: {where or 'not in your code'} · {fault}{waits}"


def _yours(frames: Iterable[tuple[str, str]]) -> str:
    """Return file:line of the last frame that is neither of a library nor of Lockstep; empty if there is none."""
    yours = [(name, line) for name, line in frames if not any(part in name for part in NOT_YOURS)]
    return f"{yours[-1][0].removeprefix(f'{SRC.parent}/')}:{yours[-1][1]}" if yours else ""


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def main(argv: list[str]) -> int:
    capability = next((word.partition("=")[2] for word in argv if word.startswith("--capability=")), "8.0")

    def dry_run(cfg: Any) -> int:
        from lockstep.batch_size.search import run_train

        failed = False
        with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
            config = whole_config(cfg)
            for word, text in lines(config, config["overrides"], capability, Path(folder), run_train):
                log.info(f"{word:7} {text}")
                failed |= word == "FAILED"
        log.info("Something FAILED." if failed else "Nothing failed. Nothing ran on a GPU, and no speed was measured.")
        return EXIT_FAILED if failed else EXIT_OK

    return run_script("train", [word for word in argv if not word.startswith("--cap")], dry_run, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
