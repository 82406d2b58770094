"""A module that brings its own loaders needs no data module."""

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from lockstep.config import class_source
from lockstep.config.compose import chosen_options, compose
from runs import run_script, succeed

MODULE = "task._target_=projects.segmentation.SegModel"
SHORT = ("task.monitor=valid_loss", "task.mode=min", "trainer=cpu", "run_id=r")


def make_importable(folder):
    sys.path.insert(0, str(folder))


PROJECTS = partial(make_importable, Path(__file__).parents[1])


def test_a_module_with_loaders_trains_resumes_and_is_evaluated(tmp_path):
    first = succeed("train", MODULE, *SHORT, "trainer.max_epochs=1", logs=tmp_path, before=PROJECTS)
    assert "SegModel has its own loaders" in first.output
    assert (first.record["steps"], first.record["data"]) == (8, "its own loaders")

    again = succeed("train", "resume=r", "trainer.max_epochs=2", logs=tmp_path, before=PROJECTS)
    assert again.record["steps"] == 16
    assert again.record["restarts"][0]["resumed_step"] == 8
    tested = succeed("eval", "ckpt_path=r", logs=tmp_path, before=PROJECTS)
    expected = again.record["metrics"]["test_loss"]
    assert tested.record["metrics"]["test_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_module_with_loaders_predicts_them(tmp_path):
    succeed("train", MODULE, *SHORT, "trainer.max_epochs=1", logs=tmp_path, before=PROJECTS)
    out = tmp_path / "p.pt"
    done = succeed("predict", "ckpt_path=r", f"out={out}", logs=tmp_path, before=PROJECTS)
    assert [tuple(each.shape)[:2] for each in torch.load(out)] == [(8, 2)] * 4
    assert done.output.splitlines()[-1] == f"the run's own data · {out}"


@pytest.mark.parametrize(
    ("overrides", "option"),
    [
        ([MODULE], "none"),
        ([MODULE, "data=digits"], "digits"),
        ([MODULE, "data._target_=projects.vae.Images"], "Images"),
        ([MODULE, "experiment=mnist"], "mnist"),
        (["task._target_=projects.vae.VAE"], "cifar10"),
        (["task=classifier"], "cifar10"),
        (["data=none"], "none"),
    ],
)
def test_data_that_was_chosen_stays(overrides, option):
    assert chosen_options(compose("train", overrides))["data"] == option


def test_data_of_an_experiment_that_another_includes_stays(tmp_path):
    (tmp_path / "experiment").mkdir()
    yaml = "# @package _global_\ndefaults: [mnist, _self_]\nseed: 3\n"
    (tmp_path / "experiment/mine.yaml").write_text(yaml)
    overrides = [f"hydra.searchpath=[file://{tmp_path}]", MODULE, "experiment=mine"]
    config = compose("train", overrides)
    assert (chosen_options(config)["data"], config.seed) == ("mnist", 3)


def test_a_module_without_loaders_is_told_so(tmp_path):
    overrides = ("task._target_=projects.vae.VAE", "data=none", *SHORT)
    done = run_script("train", *overrides, logs=tmp_path, before=PROJECTS)
    assert done.code == 2
    assert "VAE has no train_dataloader. Pass data=" in done.output.splitlines()[-1]


@pytest.mark.parametrize("script", ["find_batch_size", "check_data"])
def test_scripts_that_need_a_data_module_say_so(script, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    main = importlib.import_module(script).main
    assert main([MODULE, "trainer=cpu"]) == 2
    last = "".join(capfd.readouterr()).strip().splitlines()[-1]
    assert "data=none" in last and "SegModel" in last and "data=NAME" in last


def test_a_method_is_read_through_packages_without_an_import(tmp_path, monkeypatch):
    files = {
        "__init__.py": "from .nets.model import Model as Net\nraise RuntimeError",
        "nets/__init__.py": "",
        "nets/model.py": "from ..base import Base\nclass Model(Base): pass",
        "base.py": "import lightning\nclass Base(lightning.LightningModule):\n  def extra(self): pass",
    }
    for name, text in files.items():
        path = tmp_path / "theirs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert class_source.defines_in_source("theirs.Net", "extra")
    # LightningModule itself has it, which says nothing.
    assert not class_source.defines_in_source("theirs.Net", "train_dataloader")


@pytest.mark.parametrize(
    ("code", "has_extra"),
    [
        # For pickling, a script imports its class from itself.
        ("class Net:\n  def extra(self): pass\nif __name__:\n  from one import Net", True),
        ("import lightning\nif lightning:\n  from one import Net", False),
        ("from bases import *\nclass Net(Net): pass", False),
        ("class Base:\n  def extra(self): pass\nclass Net(Base[int]): pass", True),
    ],
)
def test_the_bases_of_a_file_are_read(tmp_path, monkeypatch, code, has_extra):
    (tmp_path / "one.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert class_source.defines_in_source("one.Net", "extra") is has_extra
