"""A global batch is cut by ranks and accumulation; what does not divide is refused with the nearest sizes that do."""

import math

import pytest

from lockstep.runs.batch import Batch, states_accumulation
from lockstep.runs.errors import UserError


def test_a_batch_divides_by_ranks_and_accumulation():
    assert Batch.cut(128, 4, 8) == Batch.of_device(4, 4, 8) == Batch(global_size=128, per_device=4, accumulate=8)
    assert states_accumulation(["a=1", "++trainer.accumulate_grad_batches=2"])
    assert not states_accumulation(["trainer.accumulate_grad_batches_=2", "~trainer.accumulate_grad_batches"])
    for sizes, wanted in {
        (64, 2, 32): Batch(64, 32, 1), (64, 1, 32): Batch(64, 32, 2), (64, 4, math.inf): Batch(64, 16, 1),
        (48, 2, 10): Batch(48, 8, 3),  # 24 images of each rank: 12 are too many
    }.items():  # fmt: skip
        assert Batch.within(*sizes) == wanted


@pytest.mark.parametrize(
    ("cut", "sizes", "said"),
    [
        (Batch.cut, (100, 3, 2), "into 3 ranks × 2 accumulated batches: the nearest that do are 96 and 102."),
        (Batch.cut, (5, 4, 2), "the nearest that do are 8."),
        (Batch.cut, ("max", 2, 1), "data.global_batch_size='max': give a whole number from 1 on."),
        (Batch.cut, (True, 1, 1), "data.global_batch_size=True: give"),
        (Batch.cut, (8, 1, 0), "trainer.accumulate_grad_batches=0: give"),
        (Batch.within, (0, 2, 8), "data.global_batch_size=0: give"),
        (Batch.within, (64, 3, 32), "over 3 ranks: the nearest numbers of ranks over which it does are 2 and 4."),
        (Batch.within, (8, 9, 8), "over which it does are 8."),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_do(cut, sizes, said):
    with pytest.raises(UserError) as refused:
        cut(*sizes)
    assert said in str(refused.value)
