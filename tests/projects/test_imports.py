"""A user's file that imports pytorch_lightning, or cannot be imported."""

import sys
from functools import partial
from types import ModuleType

import pytest
from torch import nn

from runs import run_script, succeed

MODULE = """
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping
from torch.utils.data import DataLoader

import lightning.pytorch

assert pl is lightning.pytorch and issubclass(Callback, lightning.pytorch.Callback)
assert pl.__spec__.name == "lightning.pytorch"


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.ones(32, 2), 4)
"""
CLASSES = ("task._target_=theirs.Model", "data._target_=theirs.Data", "trainer=cpu")
SHORT = ("trainer.max_epochs=1", "run_id=r")


@pytest.fixture
def files(tmp_path):
    (tmp_path / "theirs.py").write_text(MODULE)
    return partial(make_importable, tmp_path)


def make_importable(folder):
    sys.path.insert(0, str(folder))


def test_pytorch_lightning_gives_the_classes_of_lightning(files, tmp_path):
    done = succeed("train", *CLASSES, *SHORT, logs=tmp_path, before=files)
    assert done.record["steps"] == 8
    assert done.output.count("`import pytorch_lightning` gives lightning.pytorch") == 1


def import_the_other_package(path):
    """Stand in for a library that has imported pytorch_lightning before."""
    make_importable(path)
    other = ModuleType("pytorch_lightning")
    other.LightningModule = type("LightningModule", (nn.Module,), {"__module__": other.__name__})
    sys.modules[other.__name__] = other


def test_a_module_of_the_other_package_is_told_its_line(tmp_path):
    text = "import torch\nimport pytorch_lightning as pl\n\nclass Model(pl.LightningModule): pass\n"
    (tmp_path / "theirs.py").write_text(text)
    before = partial(import_the_other_package, tmp_path)
    overrides = ("task._target_=theirs.Model", "data=digits", "trainer=cpu")
    done = run_script("train", *overrides, *SHORT, logs=tmp_path, before=before)
    assert done.code == 2
    last_line = done.output.strip().splitlines()[-1]
    assert "`import lightning.pytorch as pl`" in last_line
    assert f"{tmp_path / 'theirs.py'}, line 2" in last_line


@pytest.mark.parametrize(
    ("text", "line"), [("import os\nimport not_installed\n", 2), ("\n\ndef f(:\n", 3)]
)
def test_an_import_error_is_printed_once_with_its_line(text, line, files, tmp_path):
    (tmp_path / "theirs.py").write_text(text)
    done = run_script("train", *CLASSES, *SHORT, logs=tmp_path, before=files)
    assert done.code == 2
    errors = [line for line in done.output.splitlines() if "error" in line.lower()]
    assert len(errors) == 1
    assert f"{tmp_path / 'theirs.py'}, line {line}: " in errors[0]
