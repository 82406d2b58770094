"""The yaml of each data set states every argument of the class that it builds, and no other."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import yaml

OF_ALL = {"fold", "num_folds", "stratify", "views"}  # in configs/train.yaml
FOLDER = Path(__file__).parents[2] / "configs" / "data"
SHARED = FOLDER / "default.yaml"
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if path != SHARED)


def arguments(cls):
    names = set()
    for base in cls.__mro__:
        if base.__module__.startswith(("data.", "lockstep.data.")):
            parameters = inspect.signature(base.__init__).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return names - {"self"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_and_class_have_the_same_options(path):
    config = {**yaml.safe_load(SHARED.read_text()), **yaml.safe_load(path.read_text())}
    assert config.pop("defaults") == ["default"]
    module, name = config.pop("_target_").rsplit(".", 1)
    unused = {"group", "skip_corrupt"} if path.stem == "dataset" else set()
    assert arguments(getattr(import_module(module), name)) - unused - OF_ALL == set(config)
    assert config["name"] == path.stem and config["seed"] == "${seed}"


@pytest.mark.parametrize("path", [*CONFIGS, SHARED], ids=lambda path: path.stem)
def test_every_option_is_explained(path):
    first, *lines = path.read_text().splitlines()
    assert first.startswith("# ")
    shared = () if path == SHARED else yaml.safe_load(SHARED.read_text())
    unexplained = {line.partition(":")[0] for line in lines if "  # " not in line}
    assert unexplained <= {"_target_", "defaults", *shared}
