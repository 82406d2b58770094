"""Ranks that meet, each in a thread: missing ones and differences named, rank 0's decisions given
to all.
"""

import errno
import json
import signal
import socket
import threading
import time

import pytest
import torch.distributed as dist

from lockstep.process import signals
from lockstep.process.errors import Interrupted, UserError
from lockstep.ranks import meeting
from lockstep.ranks.find import Cluster
from lockstep.ranks.meeting import Answer, Meeting, meet
from lockstep.ranks.process_group import all_or_none
from ranks import free_port

SAME = {"code": {"code": "t"}, "options": {"seed": "1"}, "packages": {"torch": "2"}}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(meeting, "LOG_INTERVAL_S", 0.3)
    monkeypatch.setattr(meeting, "_meetings", [])


class Ranks:
    """Starts ranks one after the other, and keeps each one's meeting, or its error's sentence."""

    def __init__(self, world_size, timeout_s=10.0, port=None, address="127.0.0.1"):
        self.address, self.world_size, self.timeout_s, self.port = (
            address,
            world_size,
            timeout_s,
            port or free_port(),
        )
        self.answers, self.threads, self.has_agent_store = {}, [], port is not None

    def start(self, rank, *, fingerprint=SAME, decide=dict):
        cluster = Cluster(
            "nodes", self.world_size, 1, rank, 0, self.address, self.port, self.has_agent_store
        )

        def run():
            try:
                self.answers[rank] = meet(cluster, self.timeout_s, fingerprint, decide)
            except (UserError, RuntimeError, OSError) as error:
                self.answers[rank] = str(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        time.sleep(0.1)
        return self

    def end(self):
        for thread in self.threads:
            thread.join(30)
        return self.answers


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_all_get_rank_zeros_decision_in_whatever_order_they_come(address):
    answers = (
        Ranks(3, address=address).start(2).start(0, decide=lambda: {"folder": "r"}).start(1).end()
    )
    for answer in answers.values():
        assert answer.decision == {"folder": "r"}
        assert answer.hosts == [socket.gethostname()] * 3


def test_a_restart_in_the_same_store_never_meets_its_past():
    """torchrun keeps its store; whoever comes first finds the earlier start's keys, complete."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 0, 2])):
        ranks = Ranks(3, port=store.port)
        for rank in order:
            ranks.start(rank, decide=lambda number=number: {"start": number})
        assert {answer.decision["start"] for answer in ranks.end().values()} == {number}


def refuse():
    raise UserError("rank 1 on this run is finished.")


def test_a_file_that_rank_zero_cannot_read_is_named():
    def decide():
        raise PermissionError(13, "Permission denied", "/group/x.ckpt")

    answers = Ranks(2).start(0, decide=decide).start(1).end()
    assert answers[0] == answers[1]
    assert answers[0].endswith(": [Errno 13] Permission denied: '/group/x.ckpt'")


def test_a_full_disk_of_rank_zero_is_told_as_such():
    def decide():
        raise OSError(errno.ENOSPC, "No space left on device")

    answers = Ranks(2).start(0, decide=decide).start(1).end()
    assert "No space left on device" in answers[0]
    assert "has ended before the run began" in answers[1]


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ({}, {"fingerprint": {**SAME, "code": {"code": "x"}}}, "has code=x, rank 0 on"),
        ({}, {"fingerprint": {**SAME, "options": {"seed": "2"}}}, "has seed=2, rank 0 on"),
        ({}, {"fingerprint": {**SAME, "packages": {"torch": "3"}}}, "has torch=3, rank 0 on"),
        ({"decide": refuse}, {}, "this run is finished."),
    ],
)
def test_every_rank_is_told_of_a_difference_or_refusal(first, second, sentence):
    answers = Ranks(2).start(0, **first).start(1, **second).end()
    assert (
        answers[0] == answers[1] and answers[0].startswith("rank 1 on ") and sentence in answers[0]
    )


def test_a_node_that_never_comes_is_named(capsys):
    began = time.monotonic()
    answers = Ranks(3, timeout_s=1.5).start(0).start(1).end()
    assert answers[0] == answers[1] and answers[0].startswith(
        "node rank 2 did not arrive at 127.0.0.1:"
    ), answers
    assert time.monotonic() - began < 5 and "Waiting for node rank 2 at " in capsys.readouterr().out


def test_a_waiting_rank_hears_a_signal_whose_exception_was_lost(monkeypatch):
    monkeypatch.setattr(signals, "received", [signal.SIGINT])
    with pytest.raises(Interrupted):
        meet(Cluster("nodes", 2, 1, 0, 0, "127.0.0.1", free_port(), False), 5.0)


def earlier_start(port, **keys):
    """Serve the store of a start that this start's rank 1 finds, as a process of rank 0 does."""
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for key, value in {"missing": [], **keys}.items():
        store.set(f"lockstep/earlier/{key}", json.dumps(value))
    store.set("lockstep/start", "earlier")
    return store


DECIDED = Answer(["first", "second"], [], {}, "")


def test_a_rank_waits_until_an_earlier_run_has_ended():
    """Rank 0 still uploads what the earlier run left, and then comes to this one."""
    ranks = Ranks(2)
    store = earlier_start(ranks.port, answer=DECIDED)
    ranks.start(1)
    time.sleep(0.3)
    del store
    time.sleep(0.3)
    answers = ranks.start(0, decide=lambda: {"folder": "next"}).end()
    assert answers[1].decision == answers[0].decision == {"folder": "next"}


def test_an_earlier_run_that_does_not_end_is_told(monkeypatch):
    monkeypatch.setattr(meeting, "FOLLOWER_GRACE_S", 0.0)
    ranks = Ranks(2, timeout_s=1.0)
    store = earlier_start(ranks.port, answer=DECIDED)
    answer = ranks.start(1).end()[1]
    assert answer.startswith("node rank 0 did not arrive at 127.0.0.1:")
    assert "(its earlier run is still there)" in answer
    del store


def test_the_end_of_rank_zero_ends_a_waiting_rank():
    ranks = Ranks(2)
    stores = [earlier_start(ranks.port)]
    threading.Timer(0.5, stores.clear).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="has ended before the run began"):
        meet(Cluster("nodes", 2, 1, 1, 0, "127.0.0.1", ranks.port), 10.0)
    assert time.monotonic() - began < 5


def test_no_rank_enters_a_group_that_another_has_given_up():
    """The last rank comes between the deadline of the others and the error that they publish."""
    store = dist.HashStore()
    for rank in (0, 1):
        cluster = Cluster("nodes", 2, 1, rank, 0, "127.0.0.1", None)
        meeting._meetings.append(Meeting(cluster, store, ["a", "b"], timeout_s=0.1))
        with pytest.raises(RuntimeError, match="timed out: another rank"), all_or_none():
            pytest.fail(f"rank {rank} would wait in torch for the other one")


def test_a_rank_zero_that_never_comes_is_named_too(capsys):
    answers = Ranks(2, timeout_s=1.0).start(1).end()
    assert (
        answers[1].startswith("node rank 0 did not arrive at 127.0.0.1:")
        and "(Connection refused)" in answers[1]
    )
    assert "Waiting for node rank 0 at 127.0.0.1:" in capsys.readouterr().out


def test_a_port_that_another_program_uses():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ranks = Ranks(2)
        ranks.port = taken.getsockname()[1]
        answer = ranks.start(0).end()[0]
    assert (
        answer.startswith("rank 0 cannot serve at 127.0.0.1:")
        and "Address already in use" in answer
    )


def test_rank_zero_listens_at_master_addr_alone():
    ranks = Ranks(2, timeout_s=3.0).start(0)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", ranks.port), timeout=1).close()
    assert isinstance(ranks.start(1).end()[0], Meeting)


class Counting:
    """A store that counts its calls."""

    def __init__(self, store):
        self.store = store
        self.calls = 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_takes_the_same_calls_however_many_ranks(rank, monkeypatch):
    monkeypatch.setattr(meeting.secrets, "token_hex", lambda _: "n")
    monkeypatch.setattr(meeting.dist, "PrefixStore", lambda *_: None)

    def calls(world_size):
        store = dist.HashStore()
        others = [number for number in range(world_size) if number != rank]
        for number in others:
            store.set(f"lockstep/n/{number}", json.dumps(["n", "host", SAME]))
        store.set("lockstep/n/arrived", "".join(f"{number} " for number in others))
        if rank:
            store.set("lockstep/start", "n")
            store.set("lockstep/n/missing", "[]")
            store.set("lockstep/n/answer", json.dumps(Answer(["n"], [], {}, "")))
        counting = Counting(Appending(store))
        monkeypatch.setattr(meeting, "_open_store", lambda *_: counting)
        cluster = Cluster("nodes", world_size, 1, rank, 0, "127.0.0.1", 1)
        assert meet(cluster, 5.0, SAME).decision == {}
        return counting.calls

    assert calls(2) == calls(2000) <= 10


class Appending:
    """A HashStore with TCPStore's `append`."""

    def __init__(self, store):
        self.store = store

    def append(self, key, value):
        self.store.set(key, self.store.get(key).decode() + value)

    def __getattr__(self, name):
        return getattr(self.store, name)
