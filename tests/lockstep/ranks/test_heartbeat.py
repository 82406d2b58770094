"""Ranks that wait for each other without a limit, and notice which of them has died."""

import json
import signal
import threading
import time
from functools import partial
from unittest.mock import patch

import pytest
import torch.distributed as dist

from faults import freeze_during_save, stop_while_preparing
from lockstep.ranks.failures import explain_failure
from lockstep.ranks.find import Cluster
from lockstep.ranks.heartbeat import Heartbeat, LostRank
from ranks import free_port
from runs import run_script, start_script

QUICK = {"interval_s": 0.1, "lost_after_s": 0.6}


class Ranks:
    """The heartbeats of several ranks in this process, each with its own connection."""

    def __init__(self, world_size):
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.beats = [
            Heartbeat(self.store("beats"), self.store("errors"), rank, world_size, **QUICK)
            for rank in range(world_size)
        ]
        self.ends = {}
        self.threads = []
        for beat in self.beats:
            beat.start()

    def store(self, name):
        return dist.PrefixStore(name, self.server).clone()

    def wait(self, rank):
        def run():
            try:
                self.beats[rank].wait_for_all()
                self.ends[rank] = time.monotonic()
            except RuntimeError as error:
                self.ends[rank] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def join(self):
        for thread in self.threads:
            thread.join(10)
        return self.ends


@pytest.fixture
def three():
    ranks = Ranks(3)
    yield ranks
    for beat in ranks.beats:
        beat.end()


def test_all_leave_when_the_last_has_come(three):
    for _ in range(2):
        three.wait(2)
        three.wait(0)
        # Longer than a silent rank is waited for: a rank that prepares its data beats on.
        time.sleep(1)
        assert three.ends == {}
        came = time.monotonic()
        three.wait(1)
        ends = three.join()
        assert all(0 < ends[rank] - came < 1 for rank in range(3)), ends
        three.ends.clear()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_silent_rank_is_named_to_all_that_wait(three, dead):
    three.beats[dead].end()
    waiting = {0, 1, 2} - {dead}
    began = time.monotonic()
    for rank in waiting:
        three.wait(rank)
    ends = three.join()
    assert {rank: type(end) for rank, end in ends.items()} == dict.fromkeys(waiting, LostRank)
    assert {end.rank for end in ends.values()} == {dead} and time.monotonic() - began < 3


def test_ranks_that_stood_still_themselves_blame_nobody(three, monkeypatch):
    """SLURM suspends a job, or its user types Ctrl-Z, and it goes on an hour later."""
    three.wait(0)
    three.wait(2)
    time.sleep(0.3)
    clock = time.monotonic
    monkeypatch.setattr("lockstep.ranks.heartbeat.time.monotonic", lambda: clock() + 3600)
    time.sleep(0.3)
    three.wait(1)
    ends = three.join()
    assert all(isinstance(ends[rank], float) for rank in range(3)), ends


def test_an_error_of_another_rank_ends_the_wait(three):
    cluster = Cluster("torchrun", 3, 1, 2, 0, "127.0.0.1", None)
    three.wait(2)
    error = {"rank": 1, "host": "b", "phase": "start", "message": "no disk", "kind": "UserError"}
    three.store("errors").set("first", json.dumps(error))
    end = three.join()[2]
    culprit = explain_failure(end, three.store("errors"), cluster, ["a", "b", "c"]).culprit
    assert culprit == error


def test_the_lost_rank_is_the_culprit_with_its_host(three):
    cluster = Cluster("torchrun", 3, 1, 0, 0, "127.0.0.1", None)
    culprit = explain_failure(
        LostRank(2, 40), three.store("errors"), cluster, ["a", "b", "c"]
    ).culprit
    assert (culprit["rank"], culprit["host"], culprit["kind"]) == (2, "c", "hangs")
    assert "no sign of life for 40 s" in culprit["message"]


def test_a_round_takes_the_same_calls_however_many_ranks():
    def calls(world_size):
        store = dist.HashStore()
        for rank in range(world_size):
            store.set(f"beat/{rank}", "[0, 0, 0]")
        beat = Heartbeat(store, dist.HashStore(), 0, world_size)
        count = 0

        def counting(name):
            original = getattr(store, name)

            def call(*arguments):
                nonlocal count
                count += 1
                return original(*arguments)

            return call

        with patch.object(beat, "store") as counted:
            for name in ("set", "get", "check", "multi_get"):
                setattr(counted, name, counting(name))
            beat._do_round()
        return count

    assert calls(2) == calls(2000) <= 5


SIGN = "gave no sign of life for 2 s while the other ranks waited for it"


def test_a_rank_that_is_stopped_while_it_prepares_is_named(tmp_path):
    fault = partial(stop_while_preparing, 1)
    began = time.monotonic()
    done = run_script("train", "trainer=ddp_sim", "run_id=r", logs=tmp_path, before=fault)
    assert done.code == 1 and time.monotonic() - began < 60, done.output
    assert done.record["error"]["rank"] == 1 and SIGN in done.record["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "place"), [(0, "write"), (1, "write"), (1, "hook")])
def test_a_rank_that_freezes_in_a_save_is_named(frozen, place, tmp_path):
    """Lightning's barrier would wait for it for 300 s, the one of a long write for two hours."""
    flag = tmp_path / "frozen"
    fault = partial(freeze_during_save, frozen, place, flag)
    done = run_script(
        "train",
        "trainer=ddp_sim",
        "data=digits",
        "model=small_cnn",
        "trainer.max_epochs=1",
        "trainer.num_threads=1",
        "run_id=r",
        logs=tmp_path,
        before=fault,
    )
    assert done.code == 1 and time.time() - flag.stat().st_mtime < 60, done.output
    assert done.record["error"]["rank"] == frozen and SIGN in done.record["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_node_that_goes_while_it_prepares_is_named(dead, number, tmp_path):
    """Nobody but the other node can notice: each node is one rank. Rank 0 holds the store."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [
        start_script(
            "train",
            "trainer=ddp_sim",
            "trainer.devices=1",
            "trainer.num_nodes=2",
            "run_id=r",
            logs=tmp_path / str(rank),
            environment={**master, "NODE_RANK": str(rank)},
            before=partial(stop_while_preparing, dead, number),
        )
        for rank in (0, 1)
    ]
    try:
        done = nodes[1 - dead].done(60)
    finally:
        nodes[dead].process.kill()
    assert done.code == 1 and f"rank {dead} on " in done.output, done.output
    if number == signal.SIGSTOP:
        assert SIGN in done.output, done.output
