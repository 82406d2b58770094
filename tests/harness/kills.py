"""Kill a run at random moments, start it again by resume=auto, compare its weights with an
undisturbed run's.
"""

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.checkpoints.files import newest_whole
from lockstep.checkpoints.load import read_checkpoint
from lockstep.records.folder import RunFolder
from runs import FinishedScript, start_script

DDP = ["experiment=quickstart", "trainer=ddp_sim"]
FSDP = ["experiment=quickstart", "trainer=fsdp_sim"]
TINY = ["trainer.max_epochs=6", "data.global_batch_size=128", "trainer.num_threads=1", "test=false",
        "trainer.log_every_n_steps=4", "callbacks.checkpoints.every_minutes=0", "trainer.timeout_s=30",
        "data.eval_batch_size=16", "~callbacks.hardware"]  # fmt: skip


def weights(folder: RunFolder, kind: str = "last") -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint of a kind."""
    path = newest_whole(folder.checkpoints, kind=kind)
    assert path is not None, list(folder.checkpoints.iterdir())
    return read_checkpoint(path)["state_dict"]


def final_state(folder: RunFolder) -> dict[str, Any]:
    """Return the weights, optimizer and schedule of the last checkpoint."""
    path = newest_whole(folder.checkpoints, kind="last")
    assert path is not None, list(folder.checkpoints.iterdir())
    content = read_checkpoint(path)
    return {
        key: content[key]
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """List the places where two trees of tensors and plain values are not bit-equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys or length"]
        return [found for key in a for found in differences(a[key], b[key], f"{path}/{key}")]
    return [] if a == b else [f"{path}: {a!r} {b!r}"]


def list_processes(parent: int) -> list[psutil.Process]:
    """Return the process and its descendants, without multiprocessing's resource tracker."""
    try:
        process = psutil.Process(parent)
        children = process.children(recursive=True)
        return [process, *(child for child in children if "tracker" not in str(child.cmdline()))]
    except psutil.Error:
        return []


def run_with_signals(
    command: Sequence[str],
    logs: Path,
    chance: random.Random,
    signals: Sequence[signal.Signals],
    times: int,
    within_s: float,
    environment: dict[str, str] | None = None,
) -> tuple[FinishedScript, int]:
    """Run `train` with signals at random moments until it has ended by itself.

    Args:
        command: overrides, with run_id.
        signals: one of them is drawn each time. SIGKILL goes to a random process of the run,
            SIGTERM to the one that was started.
        times: signals to send, at most.
        within_s: seconds after a start within which the signal comes.

    Returns:
        The last start and how many signals were sent to a process that was alive.

    Raises:
        AssertionError: a process is left after a start, or the exit code is not the signal's.
    """
    sent = 0
    for _ in range(times):
        number = chance.choice(signals)
        started = start_script("train", *command, "resume=auto", logs=logs, environment=environment)
        time.sleep(chance.uniform(0, within_s))
        alive = list_processes(started.process.pid)
        if started.process.is_alive() and alive:
            victim = chance.choice(alive) if number == signal.SIGKILL else alive[0]
            victim.send_signal(number)
            sent += 1
        done = started.done()
        _, left = psutil.wait_procs(
            alive, timeout=10
        )  # ranks notice within seconds that their parent has gone
        left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"processes {left} are left:\n{done.output}"
        if (
            number == signal.SIGTERM and done.output
        ):  # else the process had not come to its handlers
            assert done.code in (0, 75) or "has finished" in done.output, done.output
        if done.code == 0:
            return done, sent
    return start_script(
        "train", *command, "resume=auto", logs=logs, environment=environment
    ).done(), sent
