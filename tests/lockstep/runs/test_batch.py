"""How a global batch is cut."""

import pytest

from lockstep.runs.batch import Batch
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
