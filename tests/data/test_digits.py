"""The digits inside scikit-learn."""

import numpy as np
from sklearn.datasets import load_digits

from data.digits import DigitsDataModule


def test_all_digits_with_a_test_set_that_no_seed_moves(tmp_path):
    modules = [DigitsDataModule(cache_dir=tmp_path, seed=seed, global_batch_size=100) for seed in (0, 1)]
    for dm in modules:
        dm.place()
    assert [(dm.num_train, dm.num_val, dm.num_test, dm.channels) for dm in modules] == [(1293, 144, 360, 1)] * 2
    tests = [dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0) for dm in modules]
    assert (tests[0][0] == tests[1][0]).all() and (tests[0][1] == tests[1][1]).all()
    assert np.array_equal(np.bincount(modules[0]._classes()), np.bincount(load_digits().target))
    images = modules[0].on_after_batch_transfer(next(iter(modules[0].train_dataloader())), 0)[0]
    assert images.shape == (100, 1, 8, 8) and abs(images.mean()) < 0.1 and abs(images.std() - 1) < 0.1


def test_pixels_are_the_digits_stretched_to_a_byte(tmp_path):
    dm = DigitsDataModule(cache_dir=tmp_path, mean=0, std=1)
    dm.place()
    images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
    digits = load_digits()
    last = np.random.default_rng(0).permutation(1797)[-360:]
    assert np.array_equal(labels, digits.target[last])
    assert np.abs(images[:, 0].numpy() - digits.images[last] / 16).max() <= 0.5 / 255 + 1e-6
