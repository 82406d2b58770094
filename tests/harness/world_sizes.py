"""One run whose number of ranks and nodes changes again and again, beside one that never changed.

Every start is ended at a step drawn by chance, by SIGTERM (its checkpoint stands there) or kill -9 (it goes back to an
earlier one), and resume=auto goes on with other ranks. The nodes share a disk, or the folder of the run is gone before
each start and only its bucket knows it.
"""

import ctypes
import functools
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign import Clock, Row, Task, piece
from faults import signal_at_step
from hosts import INTERFACE, Host, missing, two_hosts
from kill_hooks import Plan, _before, plant
from kills import final_state, history
from lockstep.runs.record import read_json
from object_store import object_store
from ranks import free_port
from runs import Done, start_door
from signals import no_store

SHARDED = ["trainer=fsdp_sim", "trainer.sharded_checkpoint=true"]
HYBRID = "trainer.shard_within_node=true"
STRATEGIES = {
    "ddp": ["trainer=ddp_sim"],
    "allreduce": ["trainer=allreduce_sim"],
    "fsdp": ["trainer=fsdp_sim"],
    "fsdp, shards": SHARDED,
    "hsdp": ["trainer=fsdp_sim", HYBRID],
    "hsdp, shards": [*SHARDED, HYBRID],
}
FROM_BUCKET = {"ddp, from the bucket": STRATEGIES["ddp"], "hsdp, shards from the bucket": STRATEGIES["hsdp, shards"]}
SIZES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))  # nodes, ranks on each
STEPS_PER_EPOCH = 20
RUN = ["experiment=quickstart", "model.dropout=0", "model.head_dropout=0", "trainer.precision=64-true",
       "trainer.num_threads=1", "trainer.timeout_s=60", "trainer.log_every_n_steps=3", "data.eval_batch_size=400",
       "callbacks.checkpoints.every_minutes=0", "~callbacks.hardware", "test=false"]  # fmt: skip
LARGEST_DIFFERENCE = 1e-9


@dataclass
class Changes:
    """How the run went.

    Args:
        words: of its strategy; with the bucket's where only that keeps the run.
        hosts: in whose networks two nodes run; none: on the loopback.
        sizes: of every start so far.
    """

    folder: Path
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    hosts: Sequence[Host] = ()
    wrong: list[str] = field(default_factory=list)

    @property
    def marks(self) -> Path:
        return self.folder / "marks"

    def start(self, size: tuple[int, int], stop: tuple[int, int] | None = None) -> Done:
        """One start on every node; how node 0's ended.

        Args:
            stop: the step at which rank 0 sends itself a signal, and which.
        """
        if self.environment:
            shutil.rmtree(self.folder / "logs", ignore_errors=True)
        self.sizes.append(size)
        nodes, devices = size
        before = functools.partial(_plant, Plan(str(self.marks), len(self.sizes)), stop)
        words = [
            *RUN,
            *self.words,
            "run_id=r",
            "resume=auto",
            f"trainer.devices={devices}",
            f"trainer.num_nodes={nodes}",
        ]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCKSTEP_SECRET": "s" * 32}
        doors = []
        for node in range(nodes):
            own = {**meeting, "NODE_RANK": str(node)} if nodes > 1 else {}
            begin = before
            if nodes > 1 and self.hosts:
                own |= {"MASTER_ADDR": self.hosts[0].address, "GLOO_SOCKET_IFNAME": INTERFACE}
                begin = functools.partial(_on_host, self.hosts[node].holder.pid, before)
            options = {"environment": {**self.environment, **own}, "before": begin}
            doors.append(start_door("train", *words, logs=self.folder / "logs", **options))
        done = [door.done() for door in doors]
        if (done[0].code == 0) != (stop is None):
            self.wrong.append(f"start {len(self.sizes)} on {size}: exit code {done[0].code}: {done[0].output[-500:]}")
        return done[0]


def _on_host(pid: int, then: Callable[[], None]) -> None:
    """In the network of this process; its disk is that of the other host."""
    with open(f"/proc/{pid}/ns/net") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    then()


def _plant(plan: Plan, stop: tuple[int, int] | None) -> None:
    from lockstep.callbacks.training_log import TrainingLog

    plant(plan)
    held: list[float] = []

    def losses(_log: Any, trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        held.append(float(outputs["loss"]))  # Lightning has divided it by the number of micro-batches
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            line = f"[{trainer.current_epoch}, {trainer.global_step}, [{sum(held)!r}]]\n"
            with open(f"{plan.folder}/losses-{plan.start}-rank{os.environ.get('RANK', 0)}.jsonl", "a") as file:
                file.write(line)
            held.clear()

    _before(TrainingLog, "on_train_batch_end", losses)
    if stop is not None:
        signal_at_step(*stop)


def change(
    task: Task, words: list[str], folder: Path, environment: dict[str, str], hosts: Sequence[Host] = ()
) -> tuple[Changes, int]:
    """task.count changes of size in one run, as far as the time allows; (the run, how many there were)."""
    run = Changes(folder, words, environment, hosts=hosts)
    size, done, step = task.chance.choice(SIZES), 0, 0
    total = -(-3 * (task.count + 2) // STEPS_PER_EPOCH) * STEPS_PER_EPOCH
    run.words = [*words, f"trainer.max_epochs={total // STEPS_PER_EPOCH}"]
    while done < task.count and not task.over() and not run.wrong:
        step += task.chance.randint(1, max(1, min(5, (total - 1 - step) // (task.count - done))))
        run.start(size, (step, task.chance.choice((signal.SIGTERM, signal.SIGKILL))))
        size, done = task.chance.choice([other for other in SIZES if other != size]), done + 1
    if not run.wrong:
        _compare(run, run.start(size), total)
    return run, done


def _compare(run: Changes, done: Done, total: int) -> None:
    """With a run of two ranks that was never stopped."""
    logs = [word for word in run.words if not word.startswith("s3.")]
    whole = Changes(run.folder / "whole", logs)
    reference = whole.start((1, 2))
    run.wrong += whole.wrong
    images, expected = (_images(history(each.marks)) for each in (run, whole))
    if images != expected or len(images) != total:
        run.wrong.append(f"other images or steps: {[key for key in expected if images.get(key) != expected[key]][:3]}")
    run.wrong += [f"losses differ by {gap:.1e}" for gap in [loss_gap(run, whole)] if not gap <= LARGEST_DIFFERENCE]
    gap = weight_gap(done, reference)
    run.wrong += [f"weights differ by {gap:.1e}"] * (not gap <= LARGEST_DIFFERENCE)
    said = [each.get("world_size") for each in read_json(done.folder.record)["restarts"]]
    ranks = [nodes * devices for nodes, devices in run.sizes[1:]]
    known = ranks[-1:] if run.environment else ranks  # a start that was killed at once has sent its bucket nothing
    if said[-len(known) :] != known:
        run.wrong.append(f"the record says {said} ranks, there were {ranks}")


def _images(found: dict[tuple[int, int], list[list[int]]]) -> dict[tuple[int, int], list[int]]:
    """Each step's, on whatever rank: one of them twice would be there twice."""
    return {key: sorted(position for rank in ranks for position in rank) for key, ranks in found.items()}


def loss_gap(run: Changes, whole: Changes) -> float:
    means = [
        {key: sum(loss for [loss] in ranks) / len(ranks) for key, ranks in history(each.marks, "losses").items()}
        for each in (run, whole)
    ]
    return max(abs(means[0].get(key, float("inf")) - loss) for key, loss in means[1].items())


def weight_gap(done: Done, reference: Done) -> float:
    ours, theirs = (final_state(each.folder)["state_dict"] for each in (done, reference))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


@contextmanager
def kept_in(folder: Path, in_bucket: bool) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The words and the environment of a bucket of its own; nothing where a shared disk keeps the run."""
    if not in_bucket:
        yield [], {}
        return
    with object_store(folder / "store") as server:
        yield (
            [f"s3.uri=s3://{server.new_bucket()}/runs", f"s3.endpoint_url={server.endpoint_url}"],
            server.environment(),
        )


def row_of(task: Task, name: str, in_bucket: bool = False, hosts: Sequence[Host] = ()) -> Row:
    clock, folder = Clock(), task.folder / name.replace(", ", "-").replace(" ", "-")
    folder.mkdir(parents=True)
    words = (FROM_BUCKET if in_bucket else STRATEGIES)[name]
    with kept_in(folder, in_bucket) as (place, environment):
        run, times = change(task, [*words, *place], folder, environment, hosts)
    counted = ", ".join(f"{run.sizes.count(size)} on {size[0]} × {size[1]}" for size in SIZES)
    same = "every step's images, its loss and the final weights (within 1e-9 in float64) as in a run that never changed"
    seen = f"starts by nodes × ranks: {counted}; " + (same if not run.wrong else "see wrong")
    task.say(f"{name}: {times} changes, {len(run.wrong)} wrong")
    where = ", two nodes on two hosts in network namespaces" if hosts else ""
    done = f"`{name}`: the number of ranks and nodes changed{where}"
    return Row("world-sizes-hosts" if hosts else "world-sizes", done, times, seen, clock.seconds, run.wrong)


@piece("world-sizes", 60)
def world_sizes(task: Task) -> list[Row]:
    """So many changes for each strategy."""
    rows = [row_of(task, name) for name in STRATEGIES]
    return rows if no_store() else [*rows, *(row_of(task, name, in_bucket=True) for name in FROM_BUCKET)]


@piece("world-sizes-hosts", 60, missing)
def world_sizes_on_hosts(task: Task) -> list[Row]:
    with two_hosts(task.folder / "hosts") as hosts:
        return [row_of(task, "ddp", hosts=hosts)]
