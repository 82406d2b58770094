"""Faults that a test plants in a script's process, and so in the ranks forked from it: run_script(…,
before=fault).
"""

import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


def _call_before(owner: Any, name: str, extra: Any) -> None:
    original = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        extra(self, *arguments)
        return original(self, *arguments, **options)

    setattr(owner, name, wrapped)


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def signal_at_step(
    step: int, number: int = signal.SIGTERM, rank: int = 0, hook: str = "on_train_batch_end"
) -> None:
    """This rank sends itself a signal when `step` optimizer steps are done, or at that call of
    another hook.
    """
    from lockstep.callbacks import interruption
    from lockstep.callbacks.interruption import Interruption

    seen = [0]
    interruption.VOTE_INTERVAL_S = 0.02  # an epoch of a test is over in less than a second

    def fault(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        seen[0] += 1
        position = trainer.global_step if hook == "on_train_batch_end" else seen[0]
        if _rank() == rank and position == step and trainer.state.fn != "validate":
            os.kill(os.getpid(), number)

    _call_before(Interruption, hook, fault)


# Where a rank has the creation of a process group before it, in the order of a start.
BEFORE_A_GROUP = {
    "join": "lockstep.runs.join:prepare_process",
    "mesh": "lockstep.strategies.fsdp:FSDP.setup_environment",
    "checkpoints": "lockstep.callbacks.checkpoints:Checkpoints.setup",
    "votes": "lockstep.callbacks.interruption:Interruption.setup",
}


def stop_before_group(place: str, flag: Path, *, whole: bool) -> None:
    """Rank 1 is asked to stop when the other ranks are a second ahead of it.

    Args:
        place: a key of BEFORE_A_GROUP.
        flag: a file that begins to exist when it happens.
        whole: the agent gets the signal, and hands it to all ranks; else rank 1 alone.
    """
    module, _, path = BEFORE_A_GROUP[place].partition(":")
    *classes, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for class_name in classes:
        owner = getattr(owner, class_name)

    def fault(*_: Any) -> None:
        if _rank() == 1:
            time.sleep(1.0)
            flag.touch()
            os.kill(os.getppid() if whole else os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    _call_before(owner, name, fault)


def fail_at_step(step: int) -> None:
    """This process raises an error when `step` optimizer steps are done."""
    from lockstep.callbacks.interruption import Interruption

    def fault(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.global_step == step:
            raise ValueError("this step is unhappy")

    _call_before(Interruption, "on_train_batch_end", fault)


def stop_while_preparing(rank: int, number: int = signal.SIGSTOP) -> None:
    """This rank gets a signal before it reads its images; others notice within seconds."""
    from data.digits import DigitsDataModule
    from lockstep.ranks import heartbeat

    heartbeat.INTERVAL_S = 0.2
    heartbeat.LOST_AFTER_S = 2.0

    def fault(self: Any) -> None:
        if _rank() == rank:
            os.kill(os.getpid(), number)

    _call_before(DigitsDataModule, "prepare", fault)


def freeze_during_save(rank: int, place: str, flag: Path) -> None:
    """This rank freezes while the others wait for a checkpoint; others notice within seconds.

    Args:
        place: "write": the ranks wait for the thread of rank 0 that writes the file; "hook": each
            rank is in the module's on_save_checkpoint.
        flag: a file that begins to exist when it happens.
    """
    from lockstep.callbacks.checkpoints import Checkpoints
    from lockstep.checkpoints.writer import CheckpointWriter
    from lockstep.ranks import heartbeat
    from lockstep.training.task import Task

    heartbeat.INTERVAL_S = 0.2
    heartbeat.LOST_AFTER_S = 2.0

    def freeze(*_: Any) -> None:
        if _rank() == rank:
            flag.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    if place == "hook":
        _call_before(Task, "on_save_checkpoint", freeze)
    elif rank == 0:
        # The thread itself may start before Lightning's barrier, where a frozen rank is not noticed.
        _call_before(CheckpointWriter, "finish", lambda writer: writer.job and freeze())
    else:
        _call_before(Checkpoints, "finish_together", freeze)


# Files of the code that writes metrics.csv, run.json, best.json and last.json.
WRITERS = ("metrics_csv.py", "record.py", "files.py", "pointers.py")


def kill_at_line(line: int | None, count_file: Path) -> None:
    """Kill this process at a line of WRITERS, on any thread.

    Args:
        line: how many lines run before; None: only count them, into `count_file`, at each thousand
            and at the end of the training.
        count_file: gets the number of lines.
    """
    lines = [0]

    def at_line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            if lines[0] == line:
                os.kill(os.getpid(), signal.SIGKILL)
            lines[0] += 1
            if line is None and lines[0] % 1000 == 0:
                count_file.write_text(str(lines[0]))
        return at_line

    def at_call(frame: Any, event: str, _: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        is_writer = path.name in WRITERS and "lockstep" in path.parts
        return at_line if is_writer else None

    threading.settrace(at_call)
    sys.settrace(at_call)


class Harmed(Callback):
    """One rank of a training comes to harm.

    Args:
        how: the name of a function below.
        flag: a file that begins to exist when it happens; the simulated driver's faults wait for
            one.
        hook: where it happens, at the third batch of rank 1.
    """

    def __init__(self, how: str, flag: str, hook: str = "on_train_batch_start") -> None:
        self.how, self.flag, self.calls = how, Path(flag), 0
        setattr(self, hook, self._harm)

    def _harm(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.calls += 1
        if self.calls == 3 and trainer.global_rank == 1:
            self.flag.write_text(str(time.monotonic()))
            globals()[self.how](pl_module)


def dies(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_: Any) -> None:
    time.sleep(1000)


def fails(_: Any) -> None:
    raise ValueError("rank one is unhappy")


def runs_out_of_memory(module: Any) -> None:
    torch.empty(2**50, dtype=torch.uint8, device=module.device)


def goes_on(_: Any) -> None:
    """The simulated driver does the harm from now on."""
