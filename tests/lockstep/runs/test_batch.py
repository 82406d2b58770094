"""How a global batch is cut."""

import math

import pytest

from lockstep.runs.batch import Batch, states_accumulation
from lockstep.runs.errors import UserError


def test_a_batch_divides_by_ranks_and_accumulation():
    assert Batch.cut(128, 4, 8) == Batch(global_size=128, per_device=4, accumulate=8)
    assert Batch.cut(1, 1, 1) == Batch(1, 1, 1)
    assert Batch.of_device(4, 4, 8) == Batch.cut(128, 4, 8)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((100, 3, 2), "into 3 ranks × 2 accumulated batches: the nearest that do are 96 and 102."),
        ((5, 4, 2), "the nearest that do are 8."),
        ((9, 2, 4), "the nearest that do are 8 and 16."),
        ((0, 1, 1), "data.global_batch_size=0: give a whole number from 1 on."),
        ((-8, 2, 1), "data.global_batch_size=-8: give"),
        (("max", 2, 1), "data.global_batch_size='max': give"),
        ((True, 1, 1), "data.global_batch_size=True: give"),
        ((8, 1, 0), "trainer.accumulate_grad_batches=0: give"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_do(sizes, said):
    with pytest.raises(UserError) as refused:
        Batch.cut(*sizes)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((64, 2, 32), Batch(64, 32, 1)),
        ((64, 1, 32), Batch(64, 32, 2)),
        ((64, 4, 32), Batch(64, 16, 1)),
        ((48, 2, 10), Batch(48, 8, 3)),  # 24 images of each rank: 12 are too many
        ((6, 2, 1), Batch(6, 1, 3)),
        ((64, 4, math.inf), Batch(64, 16, 1)),
    ],
)
def test_accumulation_follows_the_number_of_ranks_within_what_a_device_takes(sizes, wanted):
    assert Batch.within(*sizes) == wanted


@pytest.mark.parametrize(
    ("sizes", "near"),
    [((64, 3, 32), "2 and 4."), ((10, 7, 1), "5 and 10."), ((8, 9, 8), "8."), ((8, 3, 8), "2 and 4.")],
)
def test_ranks_that_do_not_divide_a_batch_are_refused_with_the_nearest_that_do(sizes, near):
    with pytest.raises(UserError, match=f"over {sizes[1]} ranks: the nearest numbers of ranks .* {near}$"):
        Batch.within(*sizes)


@pytest.mark.parametrize("size", [0, "max", None, True])
def test_what_is_no_batch_is_refused_for_any_number_of_ranks(size):
    with pytest.raises(UserError, match="give a whole number from 1 on"):
        Batch.within(size, 2, 8)


def test_a_stated_accumulation_is_seen_in_the_words():
    assert states_accumulation(["a=1", "++trainer.accumulate_grad_batches=2"])
    assert not states_accumulation(["trainer.accumulate_grad_batches_=2", "~trainer.accumulate_grad_batches"])
