"""What a run says of its images."""

import logging

from data.synthetic import SyntheticDataModule
from lockstep.data.report import log_contents, report_of, settings_of, write_lists

WANTED = {"mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.5, "interpolation": "bicubic"}


def module(tmp_path, **options):
    options = {"image_size": 8, "num_images": 64, "num_test_images": 9, "global_batch_size": 8, **options}
    dm = SyntheticDataModule(cache_dir=tmp_path, **options)
    dm.use(None, WANTED)
    dm.prepare()
    return dm


def test_contents_and_what_the_weights_say_are_logged_and_recorded(tmp_path, caplog):
    dm = module(tmp_path, mean="auto", std=0.18, path="loader")
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


def test_what_was_left_out_and_identical_images_are_logged_and_listed(tmp_path, caplog):
    dm = module(tmp_path)
    fields, lists = report_of(dm)
    write_lists(tmp_path, lists)
    assert not (tmp_path / "data_report.txt").exists() and not fields["left_out"]
    dm.left_out = {"damaged images": ["a.jpg cannot be decoded"], ".heic files": ["b.heic", "c.heic"]}
    dm.identical_images = lambda _: {"1 test image is identical to a training image": ["test/d.jpg = train/d.jpg"]}
    fields, lists = report_of(dm)
    with caplog.at_level(logging.INFO):
        log_contents(dm, lists)
    write_lists(tmp_path, lists)
    assert "left out: 1 damaged images, 2 .heic files (data_report.txt)" in caplog.text
    assert "1 test image is identical to a training image (data_report.txt)." in caplog.text
    assert fields["left_out"] == {"damaged images": 1, ".heic files": 2} and fields["smallest_image"] == "16×16"
    assert fields["images_per_class"]["pattern 0"].keys() == {"train", "val", "test"}
    lines = (tmp_path / "data_report.txt").read_text().splitlines()
    assert lines[0] == "a.jpg cannot be decoded  # damaged images" and len(lines) == 4
    assert lines[3] == "test/d.jpg = train/d.jpg  # 1 test image is identical to a training image"
