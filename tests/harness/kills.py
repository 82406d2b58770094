"""kill -9 of ranks and supervisor at random points of a run that is started again by resume=auto until it ends.

The run that was never killed says what must come out: the same images in every step, the same weights to the last bit.
"""

import functools
import json
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from campaign import Clock, Row, Task, piece, spread
from kill_hooks import PHASES, WRITING, Plan, plant
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import read_json
from lockstep.storage.checkpoint_files import complete, fault_of
from runs import Done, run_door

EPOCHS = 6
KILLS_PER_RUN = 8
DDP = ["experiment=quickstart", "trainer=ddp_sim"]
FSDP = ["experiment=quickstart", "trainer=fsdp_sim", "trainer.sharded_checkpoint=true"]
TINY = [f"trainer.max_epochs={EPOCHS}", "data.global_batch_size=128", "trainer.num_threads=1", "test=false",
        "trainer.log_every_n_steps=4", "callbacks.checkpoints.every_minutes=0", "trainer.timeout_s=30",
        "data.eval_batch_size=16", "~callbacks.hardware"]  # fmt: skip


def seen_in(folder: Path, what: str = "seen") -> dict[int, dict[int, list]]:
    """{start: {rank: lines [epoch, step, positions]}}."""
    found: dict[int, dict[int, list]] = {}
    for path in folder.glob(f"{what}-*.jsonl"):
        start, rank = path.stem.removeprefix(f"{what}-").split("-rank")
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        found.setdefault(int(start), {})[int(rank)] = lines
    return found


def history(folder: Path, what: str = "seen") -> dict[tuple[int, int], list[list]]:
    """{(epoch, step): positions of every rank} of the starts that count: what comes after a resumed step is void.

    Args:
        what: seen, or what else is written down by rank and step.
    """
    kept: dict[tuple[int, int], dict[int, list[int]]] = {}
    seen = seen_in(folder, what)
    begun = {int(p.name.split("-")[1]): int(p.read_text()) for p in folder.glob("begun-*-rank0.json")}
    for start in sorted(begun):
        kept = {key: ranks for key, ranks in kept.items() if key[1] <= begun[start]}
        for rank, lines in seen.get(start, {}).items():
            for epoch, step, positions in lines:
                ranks = kept.setdefault((epoch, step), {})
                if rank in ranks:
                    raise AssertionError(f"start {start}, rank {rank}: step {step} of epoch {epoch} was done twice")
                ranks[rank] = positions
    return {key: [ranks[rank] for rank in sorted(ranks)] for key, ranks in sorted(kept.items())}


def each_image_once(found: dict[tuple[int, int], list[list[int]]]) -> list[str]:
    """What is wrong with the images of an epoch."""
    epochs: dict[int, Counter] = {}
    for (epoch, _), ranks in found.items():
        epochs.setdefault(epoch, Counter()).update(p for positions in ranks for p in positions)
    return [f"epoch {epoch}: an image {max(c.values())} times" for epoch, c in epochs.items() if max(c.values()) > 1]


def final_state(folder: RunFolder) -> dict[str, Any]:
    from lockstep.storage.checkpoint_files import newest_whole
    from lockstep.training.weights import read_checkpoint

    path = newest_whole(folder.checkpoints, kind="last")
    assert path is not None, list(folder.checkpoints.iterdir())
    content = read_checkpoint(path)
    return {key: content[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")}


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two trees of tensors and plain values differ, to the last bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys"]
        return [found for key in a for found in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{path}: lengths"]
        return [found for i, (x, y) in enumerate(zip(a, b)) for found in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [f"{path}: {a!r} {b!r}"]


def validated(folder: RunFolder) -> list[tuple[str, str]]:
    """(step, val/acc) of every row that has one."""
    import csv

    with folder.metrics.open(newline="") as file:
        return [(row["step"], row["val/acc"]) for row in csv.DictReader(file) if row.get("val/acc")]


@dataclass
class Reference:
    folder: RunFolder
    seen: dict[tuple[int, int], list[list[int]]]
    state: dict[str, Any]
    totals: dict[int, dict[str, int]]  # calls by rank and phase

    @property
    def counts(self) -> dict[int, dict[str, int]]:
        """In one epoch."""
        return {rank: {phase: n // EPOCHS for phase, n in totals.items()} for rank, totals in self.totals.items()}


@dataclass
class Kills:
    """How the killed runs went."""

    reference: Reference
    wrong: list[str] = field(default_factory=list)
    killed: list[dict[str, Any]] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    runs: int = 0

    def check(self, name: str, folder: RunFolder, marks: Path) -> None:
        """A run that has ended, against the one that was never killed."""
        self.runs += 1
        found = history(marks)
        if found != self.reference.seen:
            missing = sorted(self.reference.seen.keys() ^ found.keys())[:3]
            self.wrong.append(f"{name}: other images or steps than uninterrupted, {missing}")
        self.wrong += [f"{name}: {fault}" for fault in each_image_once(found)]
        self.wrong += [
            f"{name}: {place} differs" for place in differences(final_state(folder), self.reference.state)[:3]
        ]
        if validated(folder) != validated(self.reference.folder):
            self.wrong.append(f"{name}: metrics.csv has other validations")

    def row(self, name: str, done: str, clock: Clock) -> Row:
        phases = Counter(kill["phase"] for kill in self.killed)
        targets = Counter(kill["target"] for kill in self.killed)
        counted = ", ".join(f"{number} in {phase}" for phase, number in phases.items())
        whom = ", ".join(f"{number} of {target}" for target, number in sorted(targets.items()))
        seen = (
            f"{counted}; {whom}; supervisor and ranks gone {spread(self.ended_s)} s after the kill; "
            f"{self.runs} runs went on by resume=auto to their end, "
            + ("each step's images, val/acc and final weights equal to the last bit" if not self.wrong else "see wrong")
        )
        return Row(name, done, len(self.killed), seen, clock.seconds, self.wrong)


def reference_of(words: list[str], folder: Path, environment: dict[str, str] | None = None) -> Reference:
    marks = folder / "reference-marks"
    done = run_door(
        "train", *words, "run_id=whole", logs=folder / "reference", environment=environment,
        before=planted(Plan(str(marks), 0)),
    )  # fmt: skip
    assert done.code == 0, done.output
    totals = {int(p.stem.split("-rank")[1]): json.loads(p.read_text()) for p in marks.glob("counts-0-rank*.json")}
    found = history(marks)
    assert len(found) == read_json(done.folder.record)["steps"] and not each_image_once(found)
    return Reference(done.folder, found, final_state(done.folder), totals)


def planted(plan: Plan) -> Any:
    return functools.partial(plant, plan)


def kill_and_resume(task: Task, words: list[str], phases: Sequence[str] = PHASES) -> Kills:
    """Runs that are killed KILLS_PER_RUN times each, in every phase in turn, until task.count is reached."""
    kills = Kills(reference_of(words, task.folder))
    task.say(f"calls per epoch: {kills.reference.counts}")
    while len(kills.killed) < task.count and not task.over():
        name, start, here, kept = f"run{kills.runs}", 0, 0, 0
        marks, logs = task.folder / f"{name}-marks", task.folder / name
        while True:
            start += 1
            wanted = here < KILLS_PER_RUN and len(kills.killed) < task.count and not task.over()
            plan = _draw(task, kills, marks, start, phases) if wanted else Plan(str(marks), start)
            done = run_door("train", *words, f"run_id={name}", "resume=auto", logs=logs, before=planted(plan))
            mark = marks / f"killed-{start}.json"
            if mark.exists():
                here += 1
                killed = json.loads(mark.read_text())
                if history(marks):  # else it was before the first step, where there is nothing to go on from
                    kills.killed.append({"phase": plan.phase, "target": plan.target, "where": killed["where"]})
                    kills.ended_s.append(round(time.time() - mark.stat().st_mtime, 1))
                kept = check_kept(kills, f"{name}, start {start}", done, kept)
                expected = -signal.SIGKILL if plan.target == "supervisor" else 1
                if done.code != expected:
                    kills.wrong.append(f"{name}, start {start}: exit code {done.code}: {done.output[-300:]}")
                if done.code == 0:
                    break
            elif done.code == 0:
                break
            else:
                kills.wrong.append(f"{name}, start {start}: exit code {done.code}: {done.output[-500:]}")
                break
        kills.check(name, done.folder, marks)
        task.say(f"{len(kills.killed)} kills, {kills.runs} runs, {len(kills.wrong)} wrong")
        if len(kills.wrong) > 5:
            break
    return kills


def check_kept(kills: Kills, where: str, done: Done, before: int) -> int:
    """The newest step of the checkpoints that are said to be complete: all whole, and no older than before."""
    found = dict(complete(done.folder.checkpoints)) if done.path else {}
    kills.wrong += [f"{where}: {path.name}: {fault}" for path in found if (fault := fault_of(path))]
    newest = max((sidecar.step for sidecar in found.values()), default=0)
    if newest < before:
        kills.wrong.append(f"{where}: the checkpoint of step {before} is gone, {newest} is the newest")
    return newest


def _draw(task: Task, kills: Kills, marks: Path, start: int, phases: Sequence[str]) -> Plan:
    """Where and whom to kill next: the phases and the targets in turn, the moment by chance."""
    number = len(kills.killed)
    phase = phases[number % len(phases)]
    targets = ["rank 0", "rank 1", "supervisor"]
    target = targets[(number + number // len(phases)) % 3]
    rank = {"rank 0": 0, "rank 1": 1}.get(target, task.chance.randrange(2))
    if phase == WRITING or (phase == "checkpoint" and rank == 1 and task.chance.random() < 0.5):
        rank = 0  # rank 0 kills the other while it writes
    return Plan(str(marks), start, phase, 1 + task.chance.randrange(kills.reference.counts[rank][phase]), rank, target)


@piece("kills", 60)
def kills_ddp(task: Task) -> list[Row]:
    clock = Clock()
    kills = kill_and_resume(task, [*DDP, *TINY])
    return [kills.row("kills", "kill -9 of a rank or the supervisor of a `ddp_sim` run, then `resume=auto`", clock)]


@piece("kills-writing", 50)
def kills_writing(task: Task) -> list[Row]:
    clock, words = Clock(), [*DDP, *TINY, "callbacks.checkpoints.asynchronous=true"]
    kills = kill_and_resume(task, words, [WRITING])
    done = "kill -9 in the thread that writes an asynchronous checkpoint beside the training, then `resume=auto`"
    row = kills.row("kills-writing", done, clock)
    row.seen += "" if row.wrong else "; after each kill every checkpoint that was said to be complete was whole"
    return [row]


@piece("kills-sharded", 20)
def kills_fsdp(task: Task) -> list[Row]:
    clock = Clock()
    kills = kill_and_resume(task, [*FSDP, *TINY])
    return [kills.row("kills-sharded", "the same for `fsdp_sim` with sharded checkpoints", clock)]
