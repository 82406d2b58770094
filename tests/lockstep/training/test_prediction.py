"""Predictions on a device: the precision, the part of each rank, and the time that is left."""

import logging
import signal
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lockstep.data.framing import Framing
from lockstep.data.reading import Reading
from lockstep.data.unlabelled import FilesOrBlanks, UnlabelledImages
from lockstep.process.errors import UserError
from lockstep.training import prediction
from lockstep.training.own_loaders import predict_own_batches
from lockstep.training.prediction import PredictionProgress, Predictor, create_precision_plugin

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
    assert create_precision_plugin(precision, CPU).precision == name
    layer = torch.nn.Linear(2, 2)
    module = SimpleNamespace(predict_step=lambda batch, number: layer(batch))
    model = SimpleNamespace(module=layer)
    predictor = Predictor(model, CPU, precision)
    predictor.module = module
    hooks = SimpleNamespace(
        on_before_batch_transfer=lambda batch, _: batch,
        on_after_batch_transfer=lambda batch, _: batch,
    )
    [result] = predictor.predictions([torch.ones(1, 2)], hooks)
    assert result.dtype == dtype


def test_no_context_of_a_prediction_is_open_at_a_result():
    """It would hold in the caller, and in the workers that the loader forks for a batch."""

    def state():
        autocast = torch.is_autocast_enabled("cpu")
        return torch.get_default_dtype(), torch.is_inference_mode_enabled(), autocast

    def batches():
        states.append(state())
        yield torch.ones(1, 2)

    states = []
    for precision in ("bf16-true", "bf16-mixed"):
        model = SimpleNamespace(module=Doubling())
        for _ in Predictor(model, CPU, precision).predictions(batches(), pl.LightningDataModule()):
            states.append(state())
    assert states == [(torch.float32, False, False)] * 4


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


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_a_damaged_deep_image_is_float32_as_the_others(files, default):
    source = FilesOrBlanks(files, Reading(value_range=(0.0, 255.0)), 6)
    torch.set_default_dtype(default)
    try:
        dtypes = {source.open(position)[0].dtype for position in range(len(files))}
    finally:
        torch.set_default_dtype(torch.float32)
    assert source.is_damaged.nonzero().flatten().tolist() == [3] and dtypes == {torch.float32}


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
    progress = PredictionProgress(1000, num_ranks=2)
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
        [result] = predictor.predictions([torch.full((1, 2), 255.0)], data)
        assert result.tolist() == [[value, value]]


class Doubling(pl.LightningModule):
    """A module that says where its batches come from."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch * 2 + 100 * dataloader_idx


class OwnData(pl.LightningDataModule):
    """Numbers from 0 to 4 in batches of 3, which a hook makes larger where nothing is trained."""

    num_loaders = 1

    def setup(self, stage):
        if stage == "test":
            self.rows = torch.arange(5.0)

    def val_dataloader(self):
        loaders = [DataLoader(self.rows, 3) for _ in range(self.num_loaders)]
        return loaders if self.num_loaders > 1 else loaders[0]

    test_dataloader = val_dataloader

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch if self.trainer.training else batch + 10


class WithLoader(Doubling):
    def predict_dataloader(self):
        return DataLoader(torch.arange(5.0), 3)


def as_lists(results):
    return [each.tolist() for each in results]


def own_results(module, data):
    return predict_own_batches(Predictor(SimpleNamespace(module=module.eval()), CPU), data)


@pytest.mark.filterwarnings("ignore")
def test_data_hooks_have_a_trainer_that_predicts():
    assert as_lists(own_results(Doubling(), OwnData())) == [[20, 22, 24], [26, 28]]


@pytest.mark.filterwarnings("ignore")
def test_several_loaders_have_a_list_each():
    data = OwnData()
    data.num_loaders = 2
    first, second = own_results(Doubling(), data)
    assert as_lists(first) == [[20, 22, 24], [26, 28]]
    assert as_lists(second) == [[120, 122, 124], [126, 128]]


@pytest.mark.filterwarnings("ignore")
def test_a_module_with_its_own_loader_predicts_without_data():
    assert as_lists(own_results(WithLoader(), None)) == [[0, 2, 4], [6, 8]]


def test_data_without_a_loader_are_refused():
    with pytest.raises(UserError, match="Doubling has no images to predict"):
        own_results(Doubling(), None)


@pytest.mark.filterwarnings("ignore")
def test_sigterm_ends_a_prediction():
    """Lightning's handler would note the signal, and predict on."""
    seen = []

    class Asking(Doubling):
        def predict_step(self, batch, batch_idx):
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    own_results(Asking(), OwnData())
    assert seen == [before] * 2
