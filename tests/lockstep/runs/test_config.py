"""The user's config is read-only to its last leaf, and still a dict to whoever reads it."""

import copy
import json
import pickle

import pytest
import yaml

from lockstep.runs.config import read_only, writable

TREE = {"trainer": {"devices": 2, "stages": ["cpu", {"deep": [1]}]}, "none": None}


def test_nothing_in_it_can_be_changed():
    config = read_only(TREE)
    for change in (
        lambda: config.update(a=1),
        lambda: config["trainer"].pop("devices"),
        lambda: config["trainer"].__setitem__("devices", 3),
        lambda: config["trainer"]["stages"][1].setdefault("new", 1),
        lambda: config["trainer"].clear(),
        lambda: config.__ior__({"a": 1}),
        lambda: config.__delitem__("none"),
    ):
        with pytest.raises(TypeError, match="read-only: what is decided from it belongs in the run's plan"):
            change()
    with pytest.raises(TypeError):
        config["trainer"]["stages"][0] = "gpu"
    assert writable(config) == TREE


def test_it_is_read_as_a_dict():
    config = read_only(TREE)
    assert isinstance(config, dict) and isinstance(config["trainer"], dict)
    assert json.loads(json.dumps(config)) == TREE
    assert writable(pickle.loads(pickle.dumps(config))) == TREE == writable(copy.deepcopy(config))


def test_a_writable_copy_is_plain_and_its_own():
    config = read_only(TREE)
    own = writable(config)
    own["trainer"]["stages"].append("more")
    assert yaml.safe_load(yaml.safe_dump(own))["trainer"]["stages"] == ["cpu", {"deep": [1]}, "more"]
    assert len(config["trainer"]["stages"]) == 2 and len(TREE["trainer"]["stages"]) == 2
