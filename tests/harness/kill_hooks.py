"""kill -9 at an exact point of a run: planted in its processes, it counts the calls that this project's code makes in
each phase and kills a process at the n-th. Also writes down which images each step has trained on.

    run_door("train", …, before=functools.partial(plant, Plan(folder, start=1, phase="checkpoint", event=250, …)))
"""

import collections
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SRC = str(Path(__file__).resolve().parents[2] / "src")
PHASES = ("training", "validation", "checkpoint", "epoch end")
ALL_PHASES = ("start", "sanity check", *PHASES, "test", "upload")
WRITING = "background write"  # of an asynchronous checkpoint, in the thread that writes it


@dataclass
class Plan:
    """
    Args:
        folder: where the files `seen-…`, `counts-…` and `killed-…` go.
        start: number of this start of the run.
        phase, event: where; None: only count.
        rank: on which rank the calls are counted.
        target: who is killed: "rank 0", "rank 1", …, "supervisor" or "self"; on the host of `rank`.
        source: the folder whose code counts.
        number: the signal.
    """

    folder: str
    start: int
    phase: str | None = None
    event: int = 0
    rank: int = 0
    target: str = "rank 0"
    source: str = SRC
    number: int = signal.SIGKILL


class Tap:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.rank = plan, int(os.environ.get("RANK", 0))
        self.phase: str | None = None
        self.counts = dict.fromkeys((*ALL_PHASES, WRITING), 0)
        self.taken: collections.deque = collections.deque()
        self.step: list[int] = []  # positions of the step that is under way
        Path(plan.folder).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, line: Any) -> None:
        """One write call: a kill leaves it whole or not there."""
        handle = os.open(f"{self.plan.folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(handle, (json.dumps(line) + "\n").encode())
        os.close(handle)

    def on_call(self, frame: Any, event: str, _argument: Any) -> None:
        if self.phase is not None:
            self.count(self.phase, frame, event)

    def on_write(self, frame: Any, event: str, _argument: Any) -> None:
        self.count(WRITING, frame, event)

    def count(self, phase: str, frame: Any, event: str) -> None:
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(self.plan.source):
            return
        self.counts[phase] += 1
        if (phase, self.counts[phase], self.rank) == (self.plan.phase, self.plan.event, self.plan.rank):
            self.kill(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")

    def kill(self, where: str) -> None:
        number = int(self.plan.target.split()[1]) if self.plan.target.startswith("rank") else None
        supervisor = int(os.environ.get("LOCKSTEP_SUPERVISOR", 0))
        if self.plan.target == "self" or number == self.rank:
            pid = os.getpid()
        elif number is None:
            pid = supervisor
        else:
            own = [int(p) for p in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]
            local = number - (self.rank - int(os.environ["LOCAL_RANK"]))
            pid = sorted(own)[local]
        self.write(f"killed-{self.plan.start}.json", {**asdict(self.plan), "where": where, "pid": pid})
        os.kill(pid, self.plan.number)


def plant(plan: Plan) -> None:
    """Before the ranks are started, in the process that they are forked from, or in each rank."""
    from classifier import ImageClassifier
    from lockstep.callbacks import heartbeat as watch
    from lockstep.callbacks.background_writes import _Write
    from lockstep.callbacks.checkpoints import Checkpoints
    from lockstep.callbacks.run_recorder import RunRecorder
    from lockstep.callbacks.s3_upload import S3Upload
    from lockstep.callbacks.training_log import TrainingLog
    from lockstep.data.batches import TrainBatches
    from lockstep.training import build

    watch.GRACE_S, watch.SILENT_AFTER_S, watch.LEAVE_TOGETHER_S = 1.0, 2.0, 4.0  # what is measured is the restart
    tap: list[Tap] = []

    def mine() -> Tap:
        if not tap or tap[0].rank != int(os.environ.get("RANK", 0)):
            tap[:] = [Tap(plan)]
        return tap[0]

    def enters(phase: str, sanity: str | None = None):
        def enter(self: Any, *_: Any) -> None:
            trainer = self._trainer
            if trainer.state.fn == "fit":
                mine().phase = sanity if trainer.sanity_checking else phase
            elif trainer.state.fn == "test":
                mine().phase = "test"

        return enter

    def starts(*_: Any) -> None:
        mine().phase = "start"
        sys.setprofile(mine().on_call)

    def begins(self: Any, trainer: Any, *_: Any) -> None:
        here = mine()
        here.phase, here.step = None, []
        here.write(f"begun-{plan.start}-rank{here.rank}.json", trainer.global_step)

    def steps(self: Any, trainer: Any, *_: Any) -> None:
        here = mine()
        here.step += here.taken.popleft()
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            line, here.step = [trainer.current_epoch, trainer.global_step, here.step], []
            here.write(f"seen-{plan.start}-rank{here.rank}.jsonl", line)

    def ends(*_: Any) -> None:
        here = mine()
        here.phase = None
        Path(here.plan.folder, f"counts-{plan.start}-rank{here.rank}.json").write_text(json.dumps(here.counts))

    _before(ImageClassifier, "training_step", enters("training"))
    _before(ImageClassifier, "on_validation_epoch_start", enters("validation", "sanity check"))
    _before(ImageClassifier, "on_validation_epoch_end", enters("epoch end", "sanity check"))
    _before(ImageClassifier, "on_test_epoch_start", enters("test"))
    _before(build, "build_run", starts)
    if plan.phase == "test":  # the ranks agree once a second: a test of a tenth of one has nothing left to stop
        _before(ImageClassifier, "test_step", lambda *_: time.sleep(0.3))

    def uploads(*_: Any) -> None:
        """The n-th checkpoint is being sent: `event` milliseconds later."""
        here = mine()
        if (plan.phase, plan.rank) == ("upload", here.rank) and not here.counts["upload"]:
            here.counts["upload"] = 1
            threading.Timer(plan.event / 1000, here.kill, ["upload"]).start()

    _before(_Write, "_run", lambda _: sys.setprofile(mine().on_write))  # of this thread alone
    _before(S3Upload, "on_checkpoint_complete", uploads)
    _before(TrainingLog, "on_train_start", begins)
    _before(TrainingLog, "on_train_batch_end", steps)
    _before(RunRecorder, "on_fit_end", ends)
    _before(ImageClassifier, "on_test_epoch_end", ends)

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

    def wrapped(*arguments: Any, **options: Any) -> Any:
        extra(*arguments)
        return original(*arguments, **options)

    setattr(owner, name, wrapped)
