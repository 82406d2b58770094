"""Predictions on a device: the precision, the part of each rank, and the time that is left."""

import logging
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.framing import Framing
from lockstep.data.reading import Reading
from lockstep.data.unlabelled import UnlabelledImages
from lockstep.training import prediction
from lockstep.training.prediction import Predictor, Progress, plugin_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "name", "dtype"),
    [
        ("auto", "32-true", torch.float32),
        ("16-mixed", "32-true", torch.float32),
        ("bf16-mixed", "bf16-mixed", torch.bfloat16),
        ("bf16-true", "bf16-true", torch.bfloat16),
        ("64", "64-true", torch.float64),
    ],
)
def test_predictions_have_the_precision_of_the_training(precision, name, dtype):
    assert plugin_of(precision, CPU).precision == name
    layer = torch.nn.Linear(2, 2)
    module = SimpleNamespace(predict_step=lambda batch, number: layer(batch))
    model = SimpleNamespace(module=layer)
    predictor = Predictor(model, CPU, precision)
    predictor.module = module
    hooks = SimpleNamespace(
        on_before_batch_transfer=lambda batch, _: batch,
        on_after_batch_transfer=lambda batch, _: batch,
    )
    [result] = predictor.results([torch.ones(1, 2)], hooks)
    assert result.dtype == dtype


@pytest.fixture
def files(tmp_path):
    """Seven images and one that is damaged, at the position 3."""
    paths = []
    for number in range(8):
        path = tmp_path / f"{number}.png"
        Image.fromarray(np.full((6, 6, 3), 30 * number, np.uint8)).save(path)
        paths.append(path)
    paths[3].write_bytes(b"no image")
    return paths


def batches_of(files, rank, world_size):
    """Return positions and pixels of the batches of a rank, and the positions of damaged images."""
    framing = Framing(4, 4, "squash", mean=(0.5, 0.5, 0.5))
    options = {"eval_batch_size": 3, "num_workers": 1}
    data = UnlabelledImages(files, Reading(), framing, [0.5] * 3, **options)
    prediction.set_device(data, CPU, rank, world_size)
    loader = data.predict_dataloader()
    parts = []
    for number, batch in enumerate(loader):
        images = data.on_after_batch_transfer(batch, 0)
        parts.append((loader.positions(number).tolist(), images))
    return parts, data.source.is_damaged.nonzero().flatten().tolist()


def test_batches_are_the_same_on_any_number_of_ranks(files):
    alone, damaged = batches_of(files, 0, 1)
    assert damaged == [3]
    assert [positions for positions, _ in alone] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    first, _ = batches_of(files, 0, 2)
    second, _ = batches_of(files, 1, 2)
    for expected, part in zip(alone, [first[0], second[0], first[1]], strict=True):
        assert expected[0] == part[0] and torch.equal(expected[1], part[1])


def test_progress_tells_the_speed_and_the_time_left(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr(prediction, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    caplog.set_level(logging.INFO, logger=prediction.__name__)
    progress = Progress(1000, num_ranks=2)
    for clock[0] in (5.0, 10.0):
        progress.add(100)
    assert caplog.messages == ["400 of 1,000 images · 40 images/s · 15 s left"]


def test_hooks_of_the_module_make_its_batches():
    class Net(pl.LightningModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch / 255

        def predict_step(self, batch, batch_idx):
            return batch

    class Data(pl.LightningDataModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch / 51

    predictor = Predictor(SimpleNamespace(module=Net()), torch.device("cpu"))
    for data, value in ((pl.LightningDataModule(), 1.0), (Data(), 5.0)):
        [result] = predictor.results([torch.full((1, 2), 255.0)], data)
        assert result.tolist() == [[value, value]]
