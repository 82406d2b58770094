"""Mixup and CutMix of pairs."""

import numpy as np
import torch

from lockstep.data.augmentation import Mixing, mix

IMAGES = torch.rand((4, 3, 8, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([2, 0, 1, 1])
NOT_MIXED = [1, 1, 0, 0, 0, 0]


def test_mixup_blends_neighbours_and_cutmix_puts_the_neighbours_box_in():
    drawn = torch.tensor([[0.7, 0.7, 0, 0, 0, 0], [0.75, 1, 2, 6, 0, 4]], dtype=torch.float64).T
    images, targets = mix(IMAGES, LABELS, drawn, 3)
    cut = IMAGES[2:].clone()
    cut[:, :, 2:6, 0:4] = IMAGES[[3, 2]][:, :, 2:6, 0:4]
    assert torch.allclose(images[:2], 0.7 * IMAGES[:2] + 0.3 * IMAGES[[1, 0]]) and torch.equal(images[2:], cut)
    expected = torch.tensor([[0.3, 0, 0.7], [0.7, 0, 0.3], [0, 1, 0], [0, 1, 0]])
    assert targets.dtype == torch.float32 and torch.allclose(targets, expected)
    images, targets = mix(IMAGES, LABELS, torch.tensor([NOT_MIXED, NOT_MIXED]).double().T, 3)
    assert torch.equal(images, IMAGES) and torch.equal(targets.argmax(1), LABELS)


def test_a_label_counts_as_much_as_its_pixels():
    share, blend, *box = Mixing(0, 1.0).draw(np.random.default_rng(0), 500, 20)
    top, bottom, left, right = box
    assert (blend == 1).all() and np.allclose(share, 1 - (bottom - top) * (right - left) / 400)
    assert min(top.min(), left.min()) == 0 and max(bottom.max(), right.max()) == 20
    share, blend, *box = Mixing(0.5, 0).draw(np.random.default_rng(0), 500, 20)
    assert np.array_equal(share, blend) and (box[0] == box[1]).all() and abs(share.mean() - 0.5) < 0.05


def test_how_often_and_which():
    rows = Mixing(0.8, 1.0, prob=0.6).draw(np.random.default_rng(1), 4000, 32)
    mixed, cut = (rows[1] < 1).mean(), (rows[3] > rows[2]).mean()
    assert abs(mixed - 0.3) < 0.03 and abs(cut - 0.3) < 0.03
