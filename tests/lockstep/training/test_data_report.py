"""The comparison of a run's images: beside the training where it takes long."""

import time

import numpy as np
import pytest
from PIL import Image

from lockstep.config.compose import compose, plain
from lockstep.data.image_list import ImageList
from lockstep.records.folder import RunFolder
from lockstep.training import data_report
from lockstep.training.build_data import build_prepared_data
from lockstep.training.data_report import DataReport
from runs import run_script


@pytest.fixture
def photos(tmp_path):
    """Pictures of two classes whose files have one size; two of them are equal."""
    generator = np.random.default_rng(0)
    for number in range(40):
        folder = tmp_path / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.bmp")
    (folder / "copy.bmp").write_bytes((folder.parent / "dog/0.bmp").read_bytes())
    return tmp_path / "photos"


def slowly(seconds):
    read = ImageList.read_bytes

    def slow_read(self, position):
        time.sleep(seconds)
        return read(self, position)

    return slow_read


WORDS = ["data=image_folder", "data.image_size=8", "data.path=array", "data.global_batch_size=8"]


def test_a_slow_comparison_goes_on_beside_the_training(photos, tmp_path, monkeypatch, capsys):
    config = plain(compose("train", [*WORDS, f"data.root={photos}", f"data.cache_dir={tmp_path}"]))
    data = build_prepared_data(config, config["data"])
    monkeypatch.setattr(ImageList, "read_bytes", slowly(0.02))
    monkeypatch.setattr(data_report, "WAIT_AT_START_S", 0.05)
    report = DataReport(data, RunFolder(tmp_path))

    began = time.monotonic()
    report.start()
    assert time.monotonic() - began < 0.5 and report.record_fields() == {}

    while not report.record_fields():
        assert time.monotonic() - began < 20
        time.sleep(0.05)
    fields = report.record_fields()["data_report"]
    assert any("under two labels" in sentence for sentence in fields["identical_images"])
    assert "dog/0.bmp" in (tmp_path / "data_report.txt").read_text()
    assert "1 image occurs under two labels (data_report.txt)." in capsys.readouterr().err


@pytest.mark.slow
def test_other_ranks_do_not_wait_for_the_comparison(photos, tmp_path):
    """The comparison takes 12 seconds here, and a collective at most five."""
    words = [*WORDS, f"data.root={photos}", "trainer=ddp_sim", "trainer.timeout_s=5", "run_id=r"]
    words += ["model=small_cnn", "trainer.max_epochs=1", "augmentation=none", "test=false"]
    done = run_script("train", *words, logs=tmp_path / "logs", before=slow_comparison)
    assert done.code == 0, done.output


def slow_comparison():
    from lockstep.data import report

    data_report.WAIT_AT_START_S = 0.1
    compare = report.find_identical_images

    def slow_compare(*arguments):
        time.sleep(12)
        return compare(*arguments)

    report.find_identical_images = slow_compare
