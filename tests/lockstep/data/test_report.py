"""What a run says of its images."""

import logging

from data.synthetic import SyntheticDataModule
from lockstep.data.report import log_contents, settings_of

WANTED = {"mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.5, "interpolation": "bicubic"}


def test_contents_and_what_the_weights_say_are_logged_and_recorded(tmp_path, caplog):
    dm = SyntheticDataModule(
        cache_dir=tmp_path, image_size=8, num_images=64, num_test_images=9, global_batch_size=8, mean="auto", std=0.18,
        path="loader",
    )  # fmt: skip
    dm.use(None, WANTED)
    dm.prepare()
    with caplog.at_level(logging.INFO):
        log_contents(dm, {}, "none")
    names = ", ".join(f"pattern {number}" for number in range(10))
    assert [record.message for record in caplog.records] == [
        f"data: 10 classes: {names} · 58 images to train, 6 to validate, 9 to test",
        "images: loader, as data.path=loader · augmentation=none · mean 0.5, 0.5, 0.5 · std 0.18, 0.18, 0.18 · "
        "the weights say mean, crop_pct, interpolation",
    ]
    assert settings_of(dm, "none") == {
        "path": "loader", "why": "data.path=loader", "augmentation": "none", "mean": [0.5] * 3, "std": [0.18] * 3,
        "crop_pct": 0.5, "interpolation": "bicubic", "resize": 16, "fit": "crop",
        "from_weights": ["mean", "crop_pct", "interpolation"],
    }  # fmt: skip
