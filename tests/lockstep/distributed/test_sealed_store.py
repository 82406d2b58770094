"""Values that a stranger wrote, moved or changed are refused; torch meets through it."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from local_ranks import run_ranks
from lockstep.distributed.sealed_store import SealedStore
from lockstep.distributed.secret import Secret
from lockstep.runs.errors import UserError

SECRET = Secret("the secret of a store")


@pytest.fixture
def plain():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=3))


@pytest.mark.parametrize("value", [b"", b"x", b"\x00\xff" * 500, "words"])
def test_what_a_rank_writes_another_reads(plain, value):
    one, two = SealedStore(plain, SECRET), SealedStore(plain.clone(), SECRET)
    one.set("k", value)
    assert two.get("k") == (value.encode() if isinstance(value, str) else value)
    assert two.check(["k"]) and not two.check(["other"]) and two.add("n", 2) == 2 and one.add("n", 1) == 3


def test_compare_set_lets_the_first_win(plain):
    store = SealedStore(plain, SECRET)
    assert [store.compare_set("k", "", word) for word in ("first", "second")] == [b"first", b"first"]
    assert store.compare_set("k", "first", "third") == b"third" and store.get("k") == b"third"


@pytest.mark.parametrize("tamper", ["plain", "changed", "short", "moved", "other secret", "compare_set"])
def test_a_strangers_value_is_refused_with_its_key(plain, tamper):
    store = SealedStore(plain, SECRET)
    store.set("here", "true words")
    sealed = plain.get("here")
    written = {
        "plain": b"x" * 100, "changed": b"false" + sealed[5:], "short": b"", "moved": sealed,
        "other secret": b"v" + Secret("a stranger's secret").tag(b"store", b"there", b"v"), "compare_set": b"mine",
    }  # fmt: skip
    plain.set("there", written[tamper])
    with pytest.raises(UserError, match="a stranger wrote there into the store"):
        store.compare_set("there", "", "ours") if tamper == "compare_set" else store.get("there")


def test_without_a_secret_it_is_the_plain_store(plain):
    SealedStore(plain, None).set("k", "v")
    assert plain.get("k") == b"v" == SealedStore(plain, None).get("k")


def meets(here, secret_of_last):
    secret = secret_of_last if here.rank == here.world_size - 1 else SECRET
    real = dist.TCPStore("127.0.0.1", here.master_port, is_master=here.rank == 0, wait_for_workers=False,
                         timeout=timedelta(seconds=5))  # fmt: skip
    store = SealedStore(real, secret)
    try:
        dist.init_process_group("gloo", store=dist.PrefixStore("p", store), rank=here.rank, world_size=here.world_size,
                                timeout=timedelta(seconds=5))  # fmt: skip
        group = dist.new_group([0, 1], backend="gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        if here.rank < 2:
            dist.all_reduce(total, group=group)
        return float(total)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
def test_gloo_meets_through_it_for_groups_of_groups_too():
    assert run_ranks(meets, 3, SECRET) == [6.0, 6.0, 3.0]


def test_gloo_connects_to_no_address_that_a_stranger_wrote():
    answers = run_ranks(meets, 3, Secret("a stranger's secret"))
    said = [words for _, words in answers if "Connection was likely closed" not in words]  # rank 0's store has gone
    assert said and all("a stranger wrote p/" in words for words in said), answers
