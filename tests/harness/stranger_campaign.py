"""Runs with a stranger beside them: of two ranks on one machine, and of two hosts."""

import collections
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import stranger
from campaign import Clock, Row, Task, piece
from hosts import missing, two_hosts
from runs import run_door

TRAIN = ["data=synthetic", "data.num_images=400", "data.image_size=8", "data.global_batch_size=64", "model=small_cnn",
         "trainer=ddp_sim", "trainer.num_threads=1", "trainer.max_epochs=60", "trainer.timeout_s=15",
         "test=false"]  # fmt: skip
LONGEST_S = 90.0  # a start, its timeout, and the time to notice
OF_TORCH = ["keys_before_the_ranks", "other_values", "as_a_rank"]
SECRET = "of-two-hosts-and-no-stranger"


@dataclass
class Outcome:
    """
    Attributes:
        codes: of each node; None: it had not ended within LONGEST_S.
        last: each node's last line.
        tries: how often the stranger spoke, by kind.
        caught: files that his pickles left as the run's user.
    """

    codes: list[int | None]
    last: list[str]
    tries: collections.Counter = field(default_factory=collections.Counter)
    caught: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Neither finished nor ended by a sentence of its own, or worse."""
        found = [f"executed his code: {name}" for name in self.caught]
        for code, last in zip(self.codes, self.last, strict=True):
            if code is None:
                found.append(f"did not end: {last}")
            elif code and not last.startswith("error: "):
                found.append(f"ended with {code} and: {last}")
        return found


def place_for_canaries(folder: Path) -> Path:
    place = folder / "canaries"
    place.mkdir(parents=True)
    place.chmod(0o777)
    return place


def caught_in(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.stat().st_uid == os.geteuid()]


def tries_in(report: str) -> collections.Counter:
    return collections.Counter(line for line in report.splitlines() if line in stranger.KINDS)


def beside_one_machine(folder: Path, seed: int, kinds: list[str]) -> Outcome:
    canaries, report = place_for_canaries(folder), folder / "report.txt"
    invite = partial(stranger.invite, str(report), str(canaries), seed, kinds)
    try:
        done = run_door("train", *TRAIN, logs=folder / "logs", before=invite)
        codes, output = [done.code], done.output
    except AssertionError as error:
        codes, output = [None], str(error)
    return Outcome(codes, [last_line(output)], tries_in(report.read_text()), caught_in(canaries))


def beside_two_hosts(folder: Path, seed: int, kinds: list[str], secret: str = SECRET) -> Outcome:
    canaries = place_for_canaries(folder)
    with two_hosts(folder) as hosts:
        for index, host in enumerate(hosts):
            script = [".venv/bin/python", stranger.__file__, str(canaries), str(seed + index), *kinds]
            host.start(script, "stranger.txt")
        _until(lambda: all("ready" in host.output("stranger.txt") for host in hosts), 60)
        running = [
            host.start([".venv/bin/python", "src/train.py", *TRAIN, "trainer.devices=1", "trainer.num_nodes=2"],
                       MASTER_ADDR=hosts[0].address, MASTER_PORT="29500", NODE_RANK=str(rank), LOCKSTEP_SECRET=secret)
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        _until(lambda: all(process.poll() is not None for process in running), LONGEST_S)
        codes = [process.poll() for process in running]
        tries = sum((tries_in(host.output("stranger.txt")) for host in hosts), collections.Counter())
        return Outcome(codes, [last_line(host.output()) for host in hosts], tries, caught_in(canaries))


def last_line(output: str) -> str:
    return next(reversed(output.strip().splitlines()), "")


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


@piece("strangers", 500, missing)
def strangers(task: Task) -> list[Row]:
    """At least `count` tries beside runs of one machine, and as many beside two hosts; every other run hears only
    what is said in torch's own protocols."""
    rows = []
    for name, beside in (("two ranks of one machine", beside_one_machine), ("two hosts", beside_two_hosts)):
        clock, tries, wrong = Clock(), collections.Counter(), []
        finished = number = 0
        while tries.total() < task.count and not task.over():
            kinds = OF_TORCH if number % 2 else list(stranger.KINDS)
            seen = beside(task.folder / f"{beside.__name__}-{number}", task.seed * 1000 + number, kinds)
            tries += seen.tries
            wrong += seen.wrong
            finished += set(seen.codes) == {0}
            number += 1
            task.say(
                f"{name}, run {number}: {seen.tries.total()} tries, exit codes {seen.codes}, {seen.wrong or 'fine'}"
            )
        which = ", ".join(f"{kind} {times}" for kind, times in sorted(tries.items()))
        said = f"no code of his ran; {finished} of {number} runs finished, the others ended by one sentence ({which})"
        what = f"another user beside {name}, at every port that listens"
        rows.append(Row("strangers", what, tries.total(), said, clock.seconds, wrong))
    return rows
