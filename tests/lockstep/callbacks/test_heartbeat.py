"""No rank hangs when another fails, and the one that failed is named: with real processes and signals."""

import json
import signal
import time
from functools import partial

import pytest

import watched_ranks
from lockstep.callbacks import heartbeat as watch
from lockstep.callbacks.heartbeat import _is_of_the_network
from lockstep.runs.errors import Diverged, Interrupted, UserError
from runs import run_door
from watched_ranks import collective, finishes, gets_signal, is_stopped_at_the_start, raises, stops_together


@pytest.fixture
def start(tmp_path):
    started = []

    def build(scenario, world_size=2, **options):
        started.append(watched_ranks.start(scenario, world_size, tmp_path, **options))
        return started[-1]

    yield build
    for ranks in started:
        ranks.end()


def named(ranks, rank, culprit, said):
    facts = ranks.culprit(rank)
    assert facts["rank"] == culprit and said in facts["message"] and facts["phase"] == "training", facts
    assert facts["host"]


@pytest.mark.slow
def test_ranks_wait_for_one_that_prepares_for_longer_than_the_timeout(tmp_path):
    done = run_door("train", "experiment=quickstart", "trainer=ddp_sim", "trainer.max_steps=2", "trainer.timeout_s=2",
                    "test=false", logs=tmp_path, before=prepare_slowly)  # fmt: skip
    assert done.code == 0 and done.record["steps"] == 2, done.output


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_own_code_is_named_and_not_the_one_that_waits(tmp_path):
    harm = f"+callbacks.harm={{_target_: rank_faults.Harmed, how: hangs, flag: {tmp_path / 'flag'}}}"
    done = run_door("train", "experiment=quickstart", "trainer=ddp_sim", "trainer.timeout_s=5", harm, logs=tmp_path)
    error = done.record["error"]
    assert done.code == 1 and (error["rank"], error["phase"]) == (1, "training"), done.output
    assert "the others have waited for it for" in error["message"] and "in hangs" in error["message"]


class Store(dict):
    def check(self, keys):
        return all(key in self for key in keys)

    set, get = dict.__setitem__, dict.__getitem__


def waiting(tmp_path, **held):
    """What ends the wait of rank 1 for a rank 0 that never comes."""
    watching = watch.Watch(tmp_path)
    watching.store, watching.rank, watching.world_size = Store(held), 1, 2
    watching.wait_for_all("prepared")


def test_who_waits_ends_with_the_others(tmp_path):
    with pytest.raises(Interrupted) as stopped:
        waiting(tmp_path, **{watch.STOP: "1"})
    assert stopped.value.elsewhere
    with pytest.raises(RuntimeError) as failed:
        waiting(tmp_path, **{watch.ERROR: json.dumps({"rank": 0})})
    assert _is_of_the_network(failed.value)


def prepare_slowly():
    from lockstep.training import build

    original = build.build_data

    def build_data(plan, *_):
        time.sleep(4 * plan.cluster.rank)
        return original(plan)

    build.build_data = build_data


def test_all_end_well(start):
    ranks = start(finishes)
    ranks.wait([0, 1])
    assert ranks.code(0) == ranks.code(1) == 0
    assert not list(ranks.folder.glob("error-*")) and not list(ranks.folder.glob("stack-*"))


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_in_a_collective_that_never_returns_ends_with_the_error_of_another(start, who):
    ranks = start(partial(raises, who=who))
    other = 1 - who
    assert ranks.wait([0, 1]) < 10
    assert ranks.code(other) == 1
    named(ranks, other, who, "the culprit")
    assert "never_returns" in ranks.stack(other)


def test_of_three_the_one_that_raised_is_named_by_all(start):
    """The others see a closed connection, perhaps first that of each other."""
    ranks = start(partial(raises, who=2, others=collective), 3)
    ranks.wait([0, 1, 2])
    for rank in range(3):
        named(ranks, rank, 2, "the culprit")


@pytest.mark.slow
@pytest.mark.parametrize("others", [watched_ranks.never_returns, collective])
def test_a_rank_killed_without_a_word_is_named_by_its_silence(start, others):
    ranks = start(partial(gets_signal, others=others), timeout_s=3.0)
    assert ranks.wait([0, 1]) < 12
    assert ranks.code(1) == -signal.SIGKILL and ranks.code(0) == 1
    named(ranks, 0, 1, "died" if others is collective else "not heard of for")


@pytest.mark.slow
def test_rank_zero_killed_takes_the_store_with_it_and_is_named(start):
    ranks = start(partial(gets_signal, who=0), 3)
    assert ranks.wait([0, 1, 2]) < 12
    for rank in (1, 2):
        assert ranks.code(rank) == 1
        named(ranks, rank, 0, "its store is gone")


@pytest.mark.slow
def test_a_stopped_rank_is_named_after_the_timeout(start):
    ranks = start(partial(gets_signal, who=2, number=signal.SIGSTOP), 3, timeout_s=3.0)
    assert 2 < ranks.wait([0, 1]) < 12
    for rank in (0, 1):
        assert ranks.code(rank) == 1
        named(ranks, rank, 2, "stopped, or the network")


@pytest.mark.slow
def test_a_stopped_rank_zero_answers_nobody_and_is_named(start):
    """An operation on its store never returns."""
    ranks = start(partial(gets_signal, who=0, number=signal.SIGSTOP, others=collective), timeout_s=3.0)
    assert 2 < ranks.wait([1]) < 12
    assert ranks.code(1) == 1
    named(ranks, 1, 0, "stopped, or the network")


def test_a_rank_stopped_by_a_signal_before_there_is_anything_to_agree_on_interrupts_all(start):
    ranks = start(is_stopped_at_the_start)
    assert ranks.wait([0, 1]) < 10
    assert ranks.code(0) == ranks.code(1) == 75
    assert not list(ranks.folder.glob("error-*"))


def test_ranks_of_an_interrupted_run_wait_for_rank_zeros_upload(start):
    ranks = start(stops_together)
    time.sleep(0.1)
    assert ranks.wait([1]) > -0.5  # after rank 0 was ready, not 1.5 s before
    ranks.wait([0, 1])
    assert ranks.code(0) == ranks.code(1) == 75


def test_what_is_an_echo_of_another_ranks_failure():
    echoes = ["[gloo/transport/tcp/pair.cc:547] Connection closed by peer", "NCCL error: remote process exited",
              "Timed out waiting 15000ms for recv operation to complete", "Broken pipe"]  # fmt: skip
    assert all(_is_of_the_network(RuntimeError(text)) for text in echoes)
    own = [ValueError("connection closed"), UserError("timed out"), Diverged("nan"), RuntimeError("shapes differ")]
    assert not any(map(_is_of_the_network, own))
