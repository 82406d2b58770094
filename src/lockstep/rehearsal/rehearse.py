"""The rehearsal itself: three starts of train.py on null GPUs, and what came of them. Imports no torch."""

import logging
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config.compose import chosen_options, plain
from lockstep.rehearsal import report
from lockstep.rehearsal.report import Line
from lockstep.rehearsal.starts import (
    Run,
    Started,
    estimated_largest,
    in_a_process,
    settings,
    start,
    variables_of_null_gpus,
)
from lockstep.rehearsal.words import RUN_ID, STEPS, Rehearsal, rehearsal_of, without
from lockstep.runs import signals
from lockstep.runs.config import read_only
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, Interrupted

log = logging.getLogger(__name__)

DIVERGED = "became nan"


def rehearse(cfg: Any, mfu: float, gbit_s: float) -> int:
    """Rehearse what train.py would do with this config, and say what held.

    Args:
        cfg: composed, with Hydra's own node.
        mfu: assumed for the estimate of hours, 0 to 1.
        gbit_s: assumed on the way to a bucket.
    Returns:
        The exit code: 0 only if all held.
    Raises:
        UserError: train.py would refuse the config, it names no machine with GPUs, or there can be no null GPUs here.
    """
    rehearsal = rehearsal_of(read_only(plain(cfg)), chosen_options(cfg), list(cfg.hydra.overrides.task))
    variables = variables_of_null_gpus()
    hardware = rehearsal.config["hardware"]
    log.info(
        f"rehearsal on {rehearsal.devices} null GPUs that stand for {hardware['gpu']}, {hardware['gpu_memory_gib']:g} "
        f"GiB, of a {hardware['name']}; nothing was on a GPU, and no speed is seen"
    )
    for note in rehearsal.notes:
        log.info(f"        {note}")
    held = True
    try:
        signals.on_stop(signals.interrupt)
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            for line in lines(rehearsal, variables, Path(folder), mfu, gbit_s):
                log.info(str(line))
                held = held and line.held is not False
        if largest := estimated_largest(rehearsal.words) if held else None:
            log.info(str(Line(None, largest)))
    except Interrupted as stopped:
        log.error(f"stopped by {stopped}: the rehearsal's processes have ended, nothing of theirs is left.")
        return 128 + signal.Signals[str(stopped)]
    log.info("All held." if held else "NOT all held.")
    return EXIT_OK if held else EXIT_FAILED


def lines(
    rehearsal: Rehearsal, variables: dict[str, str], folder: Path, mfu: float, gbit_s: float, run: Run = in_a_process
) -> Iterable[Line]:
    """The report, line by line as it is found; ends at the first start that fails.

    Args:
        variables: of a process that sees null GPUs.
        run: starts train.py.
    """
    hardware, devices = rehearsal.config["hardware"], rehearsal.devices
    values = folder / "values"
    few = rehearsal.few
    words = rehearsal.command(str(values), few, few)
    computing = {**variables, **settings(hardware, devices, compute=True, folder=values)}
    first = start(rehearsal, [*without(words, {"test": 0}), "test=false"], values, computing, run)
    yield report.of_start(f"start, {STEPS} steps of {few} images a device, validation, checkpoint", first)
    yield from report.of_gradients(rehearsal, first)
    if first.fault:
        return
    yield from report.of_syncs(first)
    yield from report.of_kept(first)
    checkpoint = _last_checkpoint(values)
    if checkpoint is not None:
        tests = f"test={str(rehearsal.config['test']).lower()}"  # else the run goes on with its own test=false
        kept = without(words, {"trainer.max_epochs": 0, "run_id": 0, "test": 0})
        again = [*kept, "trainer.max_epochs=2", f"resume={RUN_ID}", tests]
        second = start(rehearsal, again, values, computing, run)
        yield report.of_start("resume, steps, validation, test", second)
        if second.fault:
            return
    else:
        yield Line(None, "no checkpoint: nothing to resume")
    whole = folder / "whole"
    words = rehearsal.command(str(whole), rehearsal.batch.per_device, rehearsal.config["data"].get("eval_batch_size"))
    leave = {"test": "false", "callbacks.checkpoints": "null"}  # what is saved has no values
    words = [*without(words, leave), *(f"{key}={value}" for key, value in leave.items())]
    empty = {**variables, **settings(hardware, devices, compute=False, folder=whole)}
    third = _without_divergence(start(rehearsal, words, whole, empty, run))
    yield report.of_start(f"{STEPS} steps and a validation of {rehearsal.batch.per_device} images a device", third)
    yield from report.of_memory(rehearsal, third)
    if checkpoint is not None:
        yield from report.of_checkpoint(checkpoint, gbit_s)
    yield from report.of_cost(rehearsal, first, mfu)


def _without_divergence(started: Started) -> Started:
    """Where nothing is computed a loss is what lay in the memory, and may be no number."""
    diverged = started.fault is not None and DIVERGED in started.fault.message
    return replace(started, fault=None) if diverged else started


def _last_checkpoint(folder: Path) -> int | None:
    """Bytes of the last checkpoint, a file or a folder of shards; None without one."""
    found = sorted((folder / "logs" / "train" / "runs" / RUN_ID / "checkpoints").glob("last-*.ckpt"))
    if not found:
        return None
    files = [path for path in found[-1].rglob("*") if path.is_file()] if found[-1].is_dir() else [found[-1]]
    return sum(path.stat().st_size for path in files)
