"""Ranks that meet: starts told apart, differences named, checkpoints brought to nodes that lack them."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from local_ranks import run_ranks
from lockstep.distributed import process_group
from lockstep.distributed.cluster import Cluster
from lockstep.distributed.process_group import agreed_run_id, handshake
from lockstep.runs import provenance
from lockstep.runs.errors import UserError

CPU = torch.device("cpu")


def place(rank, world_size=3, devices=1, port=0, agent_store=True):
    nodes = world_size // devices
    return Cluster("torchrun", nodes, devices, rank // devices, rank % devices, "127.0.0.1", port, agent_store)


def meet(store, ranks, timeout_s=10.0, word=None, world_size=3):
    """handshake in one thread per rank: {rank: answer or sentence}."""
    answers = {}

    def one(rank):
        try:
            answers[rank] = handshake(
                store.clone(), place(rank, world_size), timeout_s, "t", word if rank == 0 else None
            )
        except UserError as error:
            answers[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(30)
    return answers


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_all_ranks_get_one_name_and_rank_zeros_word(store):
    answers = meet(store, [2, 0, 1], word="run-7")
    assert len(set(answers.values())) == 1 and answers[0][1] == "run-7"


def test_a_restart_in_the_same_store_never_meets_its_past(store):
    """torchrun keeps the store; whoever comes first finds the earlier start's keys, complete."""
    first = meet(store, [0, 1, 2], word="old")
    for order in ([2, 1, 0], [1, 0, 2]):
        again = meet(store, order, word="new")
        assert len(set(again.values())) == 1 and again[0][1] == "new" and again[0][0] != first[0][0]


def test_who_is_missing_is_said_and_ends_the_wait(store, capsys, monkeypatch):
    monkeypatch.setattr(process_group, "SPEAK_INTERVAL_S", 0.3)
    answers = meet(store, [0, 1], timeout_s=1.5)
    assert answers[0].startswith("node rank 2 did not arrive within 2 s"), answers
    assert "Waiting for node rank 2 (ranks 2)" in capsys.readouterr().out


def test_a_rank_zero_that_never_comes_is_said_too(capsys, monkeypatch):
    monkeypatch.setattr(process_group, "SPEAK_INTERVAL_S", 0.3)
    from local_ranks import free_port

    with pytest.raises(UserError, match="cannot reach rank 0 at 127.0.0.1:.*node rank 0 did not start"):
        process_group.join(place(1, port=free_port(), agent_store=False), CPU, 1.0)
    assert "Waiting for node rank 0 at 127.0.0.1:" in capsys.readouterr().out


def test_a_run_id_for_all_through_the_agents_store(store):
    ids = {}

    def one(rank):
        ids[rank] = agreed_run_id(place(rank, 2, port=store.port), f"proposal-{rank}", 10.0)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ids == {0: "proposal-0", 1: "proposal-0"}


CONFIG = {"paths": {"log_dir": "/a"}, "seed": 1}


def differing(here, what):
    """Rank 1 differs in one thing; what every rank is told."""
    process_group.join(here, CPU, 30.0)
    config = dict(CONFIG)
    if here.rank == 1 and what == "code":
        provenance.tree_hash = lambda _: "other"
    if here.rank == 1 and what == "options":
        config["seed"] = 2
    if here.rank == 1 and what == "folders":
        config["paths"] = {"log_dir": "/b"}
    if here.rank == 1 and what == "packages":
        found = provenance.versions()
        provenance.versions = lambda: {**found, "numpy": "0.1"}
    try:
        return len(process_group.check_all_equal(provenance.fingerprint(config), here))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("code", "runs with other code"),
        ("options", "runs with other options"),
        ("packages", "has numpy 0.1"),
        ("folders", 2),
    ],
)
def test_what_differs_is_named_to_every_rank(what, said):
    answers = run_ranks(differing, 2, what)
    assert answers[0] == answers[1]
    assert answers[0] == said if isinstance(said, int) else f"rank 1 on {os.uname().nodename} {said}" in answers[0]
