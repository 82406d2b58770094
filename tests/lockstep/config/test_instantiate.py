"""Config → objects: what a `_target_` names, and that every experiment's nodes fit what they
build.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.config import locate
from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.config.instantiate import build, parameters_of, resolve_target
from lockstep.process.errors import UserError
from lockstep.training.parameter_groups import RULES

OWN_KEYS = {"monitor", "mode", "outputs", "_target_", "_partial_", "scale_lr_with_batch", "base_batch_size", "freeze",
            *RULES}  # taken out before it is built  # fmt: skip
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("target", ["modelsx.small_cnn.Net", "models.small_cnn.Nothing", "", "SmallCNN", "data..digits",
                                    "torch.nn", "math.pi", 7, None, ["os.system"]])  # fmt: skip
def test_a_target_that_is_none_is_named_with_its_key(target):
    with pytest.raises(
        UserError, match=r"x=.* (names no class|cannot be found|is neither a class nor a function)"
    ):
        resolve_target(target, "x")


def test_a_library_that_fails_on_import_says_its_cause(monkeypatch):
    def fail(name):
        raise ImportError("libGL.so.1: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(locate, "LIBRARIES", (str(Path(__file__).parent),))
    with pytest.raises(UserError, match="cannot be imported. ImportError: libGL.so.1"):
        resolve_target("cv9.Net", "x")


def test_build_hands_over_what_the_run_knows(tmp_path):
    contents = {"config": {"_target_": "os.system"}}
    built = build(
        {
            "_target_": "lockstep.callbacks.checkpoints.Checkpoints",
            "monitor": "val/loss",
            "mode": "min",
        },
        {"folder": tmp_path, "contents": contents, "x": 1},
    )
    assert isinstance(built, Checkpoints) and built.mode == "min" and built.folder == tmp_path
    assert built.contents is contents


def test_build_makes_partials_and_refuses_an_unknown_option():
    partial = build({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5})
    assert partial.func is torch.optim.SGD and partial.keywords == {"lr": 0.5}
    with pytest.raises(UserError, match="no option 'momentun': did you mean momentum"):
        build({"_target_": "torch.optim.SGD", "_partial_": True, "momentun": 0.9})
    data = {"_target_": "data.digits.DigitsDataModule", "flip": True}
    assert build(data).framing.flip is True
    with pytest.raises(
        UserError,
        match="DigitsDataModule (has no|cannot be made: .*) .*'flop'.* has .*val_fraction",
    ):
        build({**data, "flop": True})


class Shape:
    """A class with tuples and positional parameters."""

    def __init__(
        self,
        net,
        size: tuple[int, int] = (1, 2),
        pad: "tuple[int, ...] | None" = None,
        names: Any = None,
    ):
        self.values = (net, size, pad, names)


def test_a_list_becomes_a_tuple_where_the_signature_has_one():
    node = {"_target_": f"{__name__}.Shape", "size": [3, 4], "pad": [5], "names": ["a"]}
    assert build(node, {"net": 0}).values == (0, (3, 4), (5,), ["a"])


def test_keys_of_hydra_in_a_node_are_no_arguments():
    inner = {"_target_": "builtins.dict", "a": 1}
    node = {"_target_": f"{__name__}.Shape", "_recursive_": False, "names": inner}
    assert build(node, {"net": 0}).values[3] == inner
    node = {"_target_": f"{__name__}.Shape", "_args_": [7, [3, 4]]}
    assert build(node, {"net": 0}).values == (7, (3, 4), None, None)
    assert build({**node, "_partial_": True})(pad=(1,)).values[2] == (1,)


def nodes(config):
    if isinstance(config, dict):
        if config.get("_target_"):
            yield config
        for value in config.values():
            yield from nodes(value)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_node_of_an_experiment_fits_what_it_builds(experiment):
    config = plain(compose("train", [f"experiment={experiment}"]))
    found = list(nodes(config))
    assert len(found) >= 5
    for node in found:
        parameters, any_name = parameters_of(resolve_target(node["_target_"], "x"))
        if not any_name:
            assert node.keys() - OWN_KEYS <= parameters.keys(), node["_target_"]


class Optional:
    def __init__(self, rate: float = 0.1, size: int | None = 3, free=1.0, name: str = "a"):
        self.given = [rate, size, free, name]


def test_null_is_refused_where_a_class_takes_a_number():
    node = {"_target_": f"{__name__}.Optional", "size": None, "free": None, "name": None}
    assert build(node).given == [0.1, None, None, None]
    with pytest.raises(UserError, match="rate=null: give a number"):
        build({**node, "rate": None})
    with pytest.raises(UserError, match="weight_decay=null: give a number"):
        build({"_target_": "torch.optim.AdamW", "_partial_": True, "weight_decay": None})
