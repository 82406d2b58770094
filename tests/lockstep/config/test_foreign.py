"""What a checkpoint's or a bucket's config may say: options of this clone and plain values, and
nothing else.
"""

import copy
import functools

import pytest
import yaml

from lockstep.config import foreign
from lockstep.config.compose import CONFIGS, chosen_options, compose, plain
from lockstep.config.foreign import (
    CHECKPOINT_ROOTS,
    DATA_ROOTS,
    GROUPS,
    RUN_ROOTS,
    accept_config,
    config_of_checkpoint,
)
from lockstep.process.errors import UserError

OPTIONS = [
    pytest.param(group, path.stem, marks=[pytest.mark.slow] * (number > 0))
    for group in GROUPS
    for number, path in enumerate(sorted((CONFIGS / group).glob("*.yaml")))
]
HOSTILE = [
    "/etc/passwd", "../x", "x/../../y", "~/x", "x.pth", "s3://bucket/x", "http://host/x", "file:///etc/passwd",
    "host:80", "hf-hub:user/name", "local-dir:x", "${oc.env:HOME}", "${repository:}", "os.system", "posix.system",
    {"_target_": "os.system", "command": "true"}, [{"_target_": "os.system"}], ["/etc/passwd"], [["x.y"]], b"x",
    "x y", "x,y", "a=b", "{x:1}", "[1]", "x\n+a=1", "-x", "", 10**12, 10**400, float("nan"), float("inf"), "x" * 101,
]  # fmt: skip


@functools.cache
def composed(*words: str) -> dict:
    cfg = compose("train", list(words))
    return {**plain(cfg), "choices": dict(chosen_options(cfg)), "overrides": list(words)}


def stored(*words: str) -> dict:
    """As a checkpoint holds it."""
    return copy.deepcopy(composed(*words))


@pytest.fixture
def composed_once(monkeypatch):
    """The same options are composed once for all values."""
    monkeypatch.setattr(foreign, "compose", lambda name, words: tuple(words))
    monkeypatch.setattr(foreign, "plain", lambda words: composed(*words))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_no_key_lets_a_target_path_or_address_through(group, option, composed_once, monkeypatch):
    base = stored(
        *(["model.name=resnet18"] if option == "timm" and group == "model" else []),
        f"{group}={option}",
    )
    monkeypatch.setattr(foreign, "missing_option", lambda *_: None)
    extra = (
        "checkpoint_path",
        "cache_dir",
        "pretrained_cfg",
        "act_layer",
        "hook",
        "_target_",
        "_args_",
        "_partial_",
    )
    for value in HOSTILE:
        names = {*(base[group] or {}), *extra}
        if group == "model" and isinstance(value, str) and ":" not in value and "/" not in value:
            names.discard("name")  # of timm's registry
        for part in (
            [{name} for name in names] if group in ("model", "loss") else [names]
        ):  # they raise
            try:
                found, _ = accept_config(
                    {**base, group: {**(base[group] or {}), **dict.fromkeys(part, value)}},
                    RUN_ROOTS,
                    "It",
                )
            except UserError:
                continue
            assert not part & set(found.get(group, {})), value


def test_nor_does_any_other_key(composed_once):
    others = [key for key in RUN_ROOTS if key not in GROUPS]
    for value in [*HOSTILE, {"a": 1}, {"a": {"_target_": "os.system"}}]:
        found, _ = accept_config({**stored(), **dict.fromkeys(others, value)}, RUN_ROOTS, "It")
        assert not {*others} & {*found}, value


def test_a_foreign_config_chooses_no_peers_to_train_with():
    theirs = stored("trainer=hivemind", "trainer.initial_peers=[/ip4/1.2.3.4/tcp/1]")
    taken, rejected = accept_config(theirs, CHECKPOINT_ROOTS, "It")
    assert "trainer" not in taken["choices"] and "trainer" not in taken
    assert rejected["trainer"] == "hivemind"


def test_nothing_outside_the_roots_is_taken():
    before = stored(
        "s3.uri=s3://theirs/x", "paths.logbook_dir=/etc", "logger=wandb", "+callbacks.mine={_target_: os.system}",
        "data=cifar10", "data.root=/theirs", "model=vit_tiny_32", "model.weights=/x.pth",
    )  # fmt: skip
    before.update(
        task_name="../../..", extra={"_target_": "os.system"}, overrides=["paths.log_dir=/etc"]
    )
    found, rejected = accept_config(before, RUN_ROOTS, "It")
    assert set(found) == {"choices"} and {*rejected} == {
        "callbacks.mine",
        "data.root",
        "model.weights",
    }


@pytest.mark.parametrize(
    "words",
    [
        [
            "experiment=alexnet_cifar10",
            "optimizer.lr=0.0123",
            "tags=[night]",
            "trainer.max_epochs=77",
        ],
        ["experiment=deit3_imagenet"],
        ["experiment=quickstart", "loss=focal", "loss.gamma=1.5", "metrics=[f1,kappa]"],
    ],
)
def test_an_experiments_own_config_comes_back(words):
    before = stored(*words)
    found, rejected = accept_config(before, RUN_ROOTS, "It")
    now = plain(compose("train", [], found))
    parts = (
        "data",
        "augmentation",
        "model",
        "loss",
        "metrics",
        "optimizer",
        "scheduler",
        "trainer",
        "task",
        "tags",
    )
    assert {part: now[part] for part in parts} == {
        part: before[part] for part in parts
    } and not rejected


def test_every_seed_that_a_run_may_have_comes_back():
    found, rejected = accept_config(stored("seed=4294967295"), DATA_ROOTS, "It")
    assert found["seed"] == 4294967295 and not rejected


def test_a_net_that_cannot_be_built_here_is_refused():
    before = stored("model=small_cnn")
    for target in ("os.system", "models.alexnet.AlexNet", 7, ["models.small_cnn.SmallCNN"]):
        before["model"]["_target_"] = target
        with pytest.raises(UserError, match="It has model._target_=.*cannot be built here"):
            accept_config(before, CHECKPOINT_ROOTS, "It")
    for name in ("mine", "../train", "alexnet.yaml", "", 7, None, ["alexnet"], "/etc/passwd"):
        before["choices"]["model"] = name
        with pytest.raises(
            UserError, match="It names model=.*which is not here: this clone has airbench"
        ):
            accept_config(before, CHECKPOINT_ROOTS, "It")


@pytest.mark.parametrize(
    "nonsense", [None, [], "x", {}, {"choices": 3}, {"choices": {"data": "digits"}, "model": []}]
)
def test_nonsense_is_refused_in_a_sentence(nonsense):
    with pytest.raises(UserError, match="carries no config|which is not here"):
        accept_config(nonsense, CHECKPOINT_ROOTS, "It")


def test_a_run_below_the_log_folder_is_the_users_own(tmp_path):
    own, of_checkpoint = stored("data=cifar10", "data.root=/mine"), stored("data=digits")
    run = tmp_path / "train" / "runs" / "r"
    checkpoint = run / "checkpoints" / "best-step00000001.ckpt"
    (run / "from-bucket").mkdir(parents=True)
    (run / "from-bucket" / "config.yaml").write_text(yaml.safe_dump(own))
    assert config_of_checkpoint(checkpoint, of_checkpoint, tmp_path)["data"]["name"] == "digits"
    (run / "config.yaml").write_text(yaml.safe_dump(own))
    assert config_of_checkpoint(checkpoint, of_checkpoint, tmp_path)["data"]["root"] == "/mine"
    assert (
        config_of_checkpoint(checkpoint, of_checkpoint, tmp_path / "elsewhere")["data"]["name"]
        == "digits"
    )
