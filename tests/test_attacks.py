"""Untrusted checkpoints, configs, names and images run no code and choose no path.

The canary is a file that each attack would create.
"""

import contextlib
import json
import os
import re
from pathlib import Path

import pytest
import torch

from lockstep.checkpoints.files import Sidecar, complete_checkpoints, write_sidecar
from lockstep.checkpoints.load import read_checkpoint
from lockstep.process.errors import UserError
from lockstep.training.inference import load_finished
from runs import run_script

SMALL = ["data=synthetic", "data.num_images=200", "data.image_size=8", "data.global_batch_size=64", "model=small_cnn",
         "trainer=cpu", "trainer.max_epochs=1"]  # fmt: skip


class Payload:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch '{self.canary}'",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    done = run_script("train", *SMALL, "run_id=good", logs=tmp_path_factory.mktemp("trained"))
    assert done.code == 0, done.output
    return done


@pytest.fixture
def canary(tmp_path):
    """Outside of what a script may write to; must not exist when the test ends."""
    (tmp_path / "outside").mkdir()
    path = tmp_path / "outside" / "canary"
    yield path
    assert not path.exists(), "the attack ran"
    assert list(path.parent.iterdir()) == [], "something was written outside"


def good(trained):
    path, _ = next(complete_checkpoints(trained.folder.checkpoints, "best"))
    return read_checkpoint(path)


def optimizer_state(content, canary):
    return {**content, "optimizer_states": [{"state": {0: Payload(canary)}}]}


def lightning_instantiator(content, canary):
    command = {"command": f"touch '{canary}'"}
    return {
        **content, "hyper_parameters": {"_instantiator": "os.system", "_class_path": "os.system", **command},
        "datamodule_hyper_parameters": {"_instantiator": "posix.system", **command},
        "hparams_name": "kwargs", "hparams_type": "os.system", "callbacks": {"os.system": command},
    }  # fmt: skip


def with_config(content, group, **changes):
    """The checkpoint with another config, as its file says it."""
    own = json.loads(json.dumps({key: content["lockstep"][key] for key in ("config", "data")}))
    own["config"][group].update(changes)
    return {**content, "lockstep": own}


def target_by_alias(content, canary):
    return with_config(content, "model", _target_="models.timm.warnings.sys.modules")


def an_option_that_climbs(content, canary):
    return with_config(content, "choices", model="../../outside/evil")


CHECKPOINTS = {
    optimizer_state: "not a checkpoint that can be loaded safely",
    lightning_instantiator: None,
    target_by_alias: "model._target_='models.timm.warnings.sys.modules'",
    an_option_that_climbs: "model='../../outside/evil', which is not here",
}


@pytest.mark.parametrize("attack", CHECKPOINTS, ids=lambda attack: attack.__name__)
def test_a_hostile_checkpoint_among_this_machines_runs_executes_nothing(
    attack, trained, canary, tmp_path
):
    logs, wanted = tmp_path / "logs", CHECKPOINTS[attack]
    path = logs / "train" / "runs" / "theirs" / "checkpoints" / "best-step00000001.ckpt"
    path.parent.mkdir(parents=True)
    torch.save(attack(good(trained), canary), path)
    with pytest.raises(UserError, match=re.escape(wanted)) if wanted else contextlib.nullcontext():
        load_finished(str(path), logs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", [optimizer_state, lightning_instantiator], ids=lambda a: a.__name__
)
def test_going_on_from_a_hostile_checkpoint_runs_nothing(attack, trained, canary, tmp_path):
    """As ckpt_path of a new run, and put over the last one of a run that is resumed, with the right
    hash beside it.
    """
    logs, wanted = tmp_path / "logs", CHECKPOINTS[attack]
    first = run_script("train", *SMALL, "run_id=r", logs=logs)
    last, sidecar = next(complete_checkpoints(first.folder.checkpoints, "last"))
    torch.save(attack(good(trained), canary), last)
    write_sidecar(last, Sidecar(sidecar.step))
    for word in (f"ckpt_path={last}", "resume=r"):
        done = run_script("train", *SMALL, word, "trainer.max_epochs=2", logs=logs)
        assert done.code == (2 if wanted else 0), done.output
        assert (
            "Traceback" not in done.output
            and (wanted or "finished") in done.output.strip().splitlines()[-1]
        )


@pytest.mark.parametrize("word", ["run_id=../x", "data.name=../../x", "s3.uri=s3://bucket/../../x"])
def test_a_name_that_climbs_is_refused_by_its_key(word, canary, tmp_path):
    done = run_script("train", *SMALL, word, logs=tmp_path / "logs")
    assert done.code == 2 and "Traceback" not in done.output, done.output
    last = done.output.strip().splitlines()[-1]
    assert (
        last.startswith("error: ") and word.partition("=")[2].removeprefix("s3://bucket/") in last
    )
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "outside"}


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def test_predict_starts_no_program_for_an_image(trained, canary, tmp_path, monkeypatch):
    """Pillow starts `gs` for an EPS file, whatever the file is called."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{canary}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    from PIL import EpsImagePlugin

    from predict import main

    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.png").write_bytes(EPS)
    path, _ = next(complete_checkpoints(trained.folder.checkpoints, "best"))
    assert (
        main([f"ckpt_path={path}", f"images={tmp_path / 'images'}", f"out={tmp_path / 'p.csv'}"])
        == 2
    )
