"""The loaders' arithmetic: order, shares, resume and evaluation padding, without any images."""

import numpy as np
import pytest

from lockstep.data.batches import EvalBatches, TrainBatches
from lockstep.process.errors import UserError

INDICES = np.arange(100, 297)  # 197 images that do not start at 0


def draw(seed, epoch, n):
    generator = np.random.default_rng([seed, epoch])
    return generator.integers(0, 9, (3, n)), generator.random((6, n // 2))


def train(global_batch_size=24, rank=0, world_size=1, accumulate=1, epoch=0, **options):
    loader = TrainBatches(
        iter, INDICES, draw, global_batch_size=global_batch_size, rank=rank, world_size=world_size,
        accumulate_grad_batches=accumulate, seed=3, **options,
    )  # fmt: skip
    loader.set_epoch(epoch)
    return loader


def pixels(selections):
    """What decides the pixels of each image: its index, its draws, and the mixing of its pair, as
    one array (10, n).
    """
    parts = [
        np.vstack([each.positions, each.draws, each.mixing.repeat(2, axis=1)])
        for each in selections
    ]
    return np.concatenate(parts, axis=1)


def test_an_epoch_depends_on_seed_and_epoch_alone():
    loader = train()
    seen = pixels(loader)
    assert len(loader) == 197 // 24 == 8 and seen.shape[1] == 192
    assert len(set(seen[0])) == 192 and set(seen[0]) <= set(INDICES)
    loader.set_epoch(1)
    other = pixels(loader)
    assert not np.array_equal(seen[0], other[0]) and not np.array_equal(seen[1:], other[1:])
    loader.set_epoch(0)
    assert np.array_equal(pixels(loader), seen)
    assert (
        len({seen[1:4, i : i + 12].tobytes() for i in range(0, 192, 12)}) == 16
    )  # no part repeats another


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (3, 2), (4, 3), (1, 6)])
def test_ranks_and_micro_batches_share_out_the_same_global_batch(world_size, accumulate):
    whole = [pixels([s]) for s in train()]
    ranks = [
        list(train(rank=r, world_size=world_size, accumulate=accumulate)) for r in range(world_size)
    ]
    for step, expected in enumerate(whole):
        # Micro-batch after micro-batch, and within each rank after rank, is the global batch in its
        # order.
        parts = [
            ranks[r][step * accumulate + j] for j in range(accumulate) for r in range(world_size)
        ]
        assert {len(part.positions) for part in parts} == {24 // world_size // accumulate}
        assert np.array_equal(pixels(parts), expected)


def test_state_counts_global_batches_and_resumes_in_another_world():
    saved = train(accumulate=2, epoch=4)
    batches = iter(saved)
    for _ in range(7):  # three steps and a half: the half is done again
        next(batches)
    state = saved.state_dict()
    assert (state["epoch"], state["global_batches"]) == (4, 3)

    resumed = [train(rank=r, world_size=3) for r in range(3)]
    for loader in resumed:
        iterator = iter(loader)  # Lightning's order: iter first, then the state, then the epoch
        loader.load_state_dict(state)
        loader.set_epoch(4)
        loader.rest = list(iterator)
    assert all(len(loader.rest) == 5 for loader in resumed)
    rest = [loader.rest[i] for i in range(5) for loader in resumed]
    assert np.array_equal(pixels(rest), pixels(list(train(epoch=4))[3:]))
    assert resumed[0].state_dict()["global_batches"] == 8


@pytest.mark.parametrize(("done", "rest"), [(6, 2), (8, 0)])
def test_the_epoch_after_a_resumed_one_is_whole(done, rest):
    loader = train()
    loader.load_state_dict({**loader.state_dict(), "global_batches": done})
    assert len(list(loader)) == rest
    loader.set_epoch(1)
    assert len(list(loader)) == 8
    assert len(list(loader)) == 8  # iterated again without a new epoch


def test_another_global_batch_cannot_continue_within_an_epoch():
    state = {**train().state_dict(), "global_batches": 6}
    with pytest.raises(UserError, match="step 6 of 8 .*global_batch_size=24"):
        train(global_batch_size=12).load_state_dict(state)
    train(global_batch_size=12).load_state_dict({**state, "global_batches": 8})


def test_overfitting_repeats_the_same_epoch():
    loader = train(repeats_first_epoch=True)
    assert not hasattr(loader.sampler, "set_epoch")
    assert np.array_equal(pixels(loader), pixels(train()))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 500])
def test_evaluation_counts_each_image_once_on_any_ranks(world_size, batch_size):
    centre = np.array([4, 4, 0])
    loaders = [
        EvalBatches(iter, INDICES, centre, batch_size=batch_size, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    selections = [list(loader) for loader in loaders]
    assert len({len(batches) for batches in selections}) == 1 and len(selections[0]) == len(
        loaders[0]
    )
    flat = [s for batches in selections for s in batches]
    sizes = {len(s.positions) for s in flat}
    assert max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    assert np.array_equal(np.sort(np.concatenate([s.positions for s in flat])), INDICES)
    assert all((s.draws == centre[:, None]).all() for s in flat)
