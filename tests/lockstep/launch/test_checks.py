"""What is refused before torch is imported."""

import subprocess
import sys

import pytest

from lockstep.config.compose import compose, plain
from lockstep.launch.checks import check, check_root, check_training
from lockstep.launch.launchers import Cluster
from lockstep.launch.plan import validates
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import REPOSITORY

NONE = "data.val_fraction=0"


def config_of(*words):
    return {**plain(compose("train", list(words))), "overrides": list(words)}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], True),
        ([NONE], False),
        (["data.val_fraction=0.0"], False),
        (["data.num_val=0"], False),
        ([NONE, "data.num_val=5"], True),
        (["trainer.limit_val_batches=0"], False),
    ],
)
def test_what_validates(words, wanted):
    assert validates(config_of(*words)) is wanted


@pytest.mark.parametrize("data", ["cifar10", "csv", "webdataset"])
def test_a_root_that_is_not_there_is_refused(data, tmp_path):
    with pytest.raises(UserError, match=r"data.root=\S+nowhere does not exist: give a folder or file"):
        check_root(config_of(f"data={data}", f"data.root={tmp_path / 'nowhere'}"))
    check_root(config_of(f"data={data}", f"data.root={tmp_path}"))
    check_root(config_of(f"data={data}"))
    check_root(config_of(f"data={data}", "data.root=s3://bucket/nowhere"))


def test_a_class_of_ones_own_may_make_its_root():
    config = config_of("data=digits")
    check_root({**config, "data": {**config["data"], "root": "nowhere"}})


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("train", ["data=image_folder", "data.root=nowhere", "trainer=cpu"], "data.root=nowhere does not exist"),
        ("eval", ["ckpt_path=c11"], "No run 'c11'"),
    ],
)
def test_these_are_refused_without_torch(script, words, said, tmp_path):
    code = f"""
import sys
sys.modules["torch"] = None  # an import of it fails
sys.argv = ["src/{script}.py"]
import {script}
sys.exit({script}.main({[*words, f"paths.log_dir={tmp_path}"]}))
"""
    path = {"PYTHONPATH": str(REPOSITORY / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_a_temporary_folder_that_is_too_long_for_sockets_is_refused(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 100)
    with pytest.raises(UserError, match="too long for the sockets"):
        check(config_of("trainer=cpu"), Cluster("none", 1, 1, 0, 0, "127.0.0.1", None), "cpu", {})


@pytest.mark.parametrize("epochs", [-1, 0])
def test_a_number_of_epochs_that_none_can_be_is_refused(epochs):
    with pytest.raises(UserError, match=f"^trainer.max_epochs={epochs}: give a whole number"):
        check_training(config_of("trainer=cpu", f"trainer.max_epochs={epochs}"), "cpu")


def refused(*words, accelerator="cpu"):
    try:
        check_training(config_of(*words), accelerator)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("words", [[], ["seed=3"], ["trainer.max_epochs=1"], ["ckpt_path=r"]])
def test_nothing_that_makes_it_small(words):
    said = refused(*words)
    assert "vit_base_patch32_224 on cifar10 at 224 pixels" in said and "make train (experiment=quickstart)" in said
    assert refused(*words, accelerator="gpu") is None


@pytest.mark.parametrize(
    "word",
    ["trainer=cpu", "trainer=ddp_sim", "experiment=vit_ddp", "model=small_cnn", "data=digits", "debug=fast_dev_run",
     "resume=r", "trainer.max_steps=2", "trainer.accelerator=cpu"],
)  # fmt: skip
def test_somebody_chose(word):
    assert refused(word) is None
