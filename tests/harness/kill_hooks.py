"""kill -9 at an exact point of a run: planted in its processes, it counts the calls that this project's code makes in
each phase and kills a process at the n-th. Also writes down which images each step has trained on.

    run_door("train", …, before=functools.partial(plant, Plan(folder, start=1, phase="checkpoint", event=250, …)))
"""

import collections
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SRC = str(Path(__file__).resolve().parents[2] / "src")
PHASES = ("training", "validation", "checkpoint", "epoch end")


@dataclass
class Plan:
    """
    Args:
        folder: where the files `seen-…`, `counts-…` and `killed-…` go.
        start: number of this start of the run.
        phase, event: where; None: only count.
        rank: on which rank the calls are counted.
        target: who is killed: "rank 0", "rank 1", … or "supervisor".
        source: the folder whose code counts.
        here: the kill is done from this host; the target must be on it.
    """

    folder: str
    start: int
    phase: str | None = None
    event: int = 0
    rank: int = 0
    target: str = "rank 0"
    source: str = SRC


class Tap:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.rank = plan, int(os.environ.get("RANK", 0))
        self.phase: str | None = None
        self.counts = dict.fromkeys(PHASES, 0)
        self.taken: collections.deque = collections.deque()
        Path(plan.folder).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, line: Any) -> None:
        """One write call: a kill leaves it whole or not there."""
        handle = os.open(f"{self.plan.folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(handle, (json.dumps(line) + "\n").encode())
        os.close(handle)

    def on_call(self, frame: Any, event: str, _argument: Any) -> None:
        if self.phase is None or event not in ("call", "c_call"):
            return
        if not frame.f_code.co_filename.startswith(self.plan.source):
            return
        self.counts[self.phase] += 1
        if (self.phase, self.counts[self.phase], self.rank) == (self.plan.phase, self.plan.event, self.plan.rank):
            self.kill(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")

    def kill(self, where: str) -> None:
        number = int(self.plan.target.split()[1]) if self.plan.target != "supervisor" else None
        supervisor = int(os.environ["LOCKSTEP_SUPERVISOR"])
        if number is None:
            pid = supervisor
        elif number == self.rank:
            pid = os.getpid()
        else:
            own = [int(p) for p in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]
            local = number - (self.rank - int(os.environ["LOCAL_RANK"]))
            pid = sorted(own)[local]
        self.write(f"killed-{self.plan.start}.json", {**asdict(self.plan), "where": where, "pid": pid})
        os.kill(pid, signal.SIGKILL)


def plant(plan: Plan) -> None:
    """Before the ranks are started, in the process that they are forked from, or in each rank."""
    from callbacks import watch
    from callbacks.checkpoints import Checkpoints
    from callbacks.run_recorder import RunRecorder
    from callbacks.training_log import TrainingLog
    from classifier import ImageClassifier
    from data.batches import TrainBatches

    watch.GRACE_S, watch.SILENT_AFTER_S, watch.LEAVE_TOGETHER_S = 1.0, 2.0, 4.0  # what is measured is the restart
    tap: list[Tap] = []

    def mine() -> Tap:
        if not tap or tap[0].rank != int(os.environ.get("RANK", 0)):
            tap[:] = [Tap(plan)]
        return tap[0]

    def enters(phase: str):
        def enter(self: Any, *_: Any) -> None:
            trainer = getattr(self, "_trainer", None)
            if trainer is None or (trainer.state.fn == "fit" and not trainer.sanity_checking):
                mine().phase = phase

        return enter

    def begins(self: Any, trainer: Any, *_: Any) -> None:
        here = mine()
        here.write(f"begun-{plan.start}-rank{here.rank}.json", trainer.global_step)
        sys.setprofile(here.on_call)

    def steps(self: Any, trainer: Any, *_: Any) -> None:
        here = mine()
        positions = here.taken.popleft()
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            here.write(
                f"seen-{plan.start}-rank{here.rank}.jsonl", [trainer.current_epoch, trainer.global_step, positions]
            )

    def ends(self: Any, trainer: Any, *_: Any) -> None:
        sys.setprofile(None)
        mine().phase = None
        mine().write(f"counts-{plan.start}-rank{mine().rank}.json", mine().counts)

    _before(ImageClassifier, "training_step", enters("training"))
    _before(ImageClassifier, "on_validation_epoch_start", enters("validation"))
    _before(ImageClassifier, "on_validation_epoch_end", enters("epoch end"))
    _before(TrainingLog, "on_train_start", begins)
    _before(TrainingLog, "on_train_batch_end", steps)
    _before(RunRecorder, "on_fit_end", ends)

    saving = Checkpoints.save_last, Checkpoints._save

    def within(original: Any):
        def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
            before, mine().phase = mine().phase, "checkpoint"
            try:
                return original(self, *arguments, **options)
            finally:
                mine().phase = before

        return wrapped

    Checkpoints.save_last, Checkpoints._save = map(within, saving)
    selections = TrainBatches._selections

    def taking(self: Any, *arguments: Any) -> Any:
        mine().taken.clear()
        for selection in selections(self, *arguments):
            mine().taken.append([int(p) for p in selection.positions])
            yield selection

    TrainBatches._selections = taking


def _before(owner: Any, name: str, extra: Any) -> None:
    original = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        extra(self, *arguments)
        return original(self, *arguments, **options)

    setattr(owner, name, wrapped)
