"""What a checkpoint's or a bucket's config may say: options of this clone and plain values, and nothing else."""

import copy
import functools

import pytest

from lockstep.config import from_outside
from lockstep.config.compose import CONFIGS, chosen_options, compose, plain
from lockstep.config.from_outside import (
    GROUPS,
    OF_A_CHECKPOINT,
    OF_A_RUN,
    PLACE,
    WORDS_OF,
    config_of_checkpoint,
    config_of_words,
    words_from,
)
from lockstep.config.signatures import signature_of
from lockstep.runs.errors import UserError
from lockstep.runs.old_configs import today
from lockstep.runs.own_config import signed

MANY = pytest.mark.slow  # the others tell the same
EXPERIMENTS = [
    name if name in ("quickstart", "vit_hivemind") else pytest.param(name, marks=MANY)
    for name in sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
]
OFTEN = ("image_folder", "cifar10", "timm", "vit_tiny_32", "adamw", "focal", "rand_augment", "fsdp", "wsd")
OPTIONS = [
    pytest.param(group, path.stem, marks=() if path.stem in OFTEN else MANY)
    for group in GROUPS
    for path in sorted((CONFIGS / group).glob("*.yaml"))
]
HOSTILE = [
    "/etc/passwd", "../x", "x/../../y", "~/x", "x.pth", "s3://bucket/x", "http://host/x", "file:///etc/passwd",
    "host:80", "hf-hub:user/name", "local-dir:x", "${oc.env:HOME}", "${repository:}", "os.system", "posix.system",
    {"_target_": "os.system", "command": "true"}, [{"_target_": "os.system"}], ["/etc/passwd"], [["x.y"]], b"x",
    "x y", "x,y", "a=b", "{x:1}", "[1]", "x\n+a=1", "-x", "", 10**12, float("nan"), float("inf"), "x" * 101,
]  # fmt: skip


@functools.cache
def plain_once(words: tuple[str, ...]) -> dict:
    return plain(compose("train", list(words)))


@pytest.fixture
def each_composition_is_made_once(monkeypatch):
    """Thousands of configs come to the same few lists of options."""
    monkeypatch.setattr(from_outside, "compose", lambda name, words: tuple(words))
    monkeypatch.setattr(from_outside, "plain", plain_once)


def stored(*words: str) -> dict:
    """As a checkpoint holds it."""
    return copy.deepcopy(composed(words))


def test_a_loss_and_metrics_are_named_by_their_options():
    before = stored("loss=focal", "loss.gamma=1.5", "metrics=[f1,kappa]", "metrics.f1.average=weighted")
    del before["choices"]["loss"]
    taken = words_from(before, OF_A_CHECKPOINT, "It")
    now = plain(compose("train", taken.words))
    assert now["loss"] == before["loss"] and now["metrics"] == before["metrics"] and taken.left_out == []
    assert config_of_words(taken.words)["choices"]["loss"] == "focal"


def test_a_config_from_before_there_were_losses_is_one_of_cross_entropy():
    before = stored("classifier.label_smoothing=0.25")
    del before["loss"], before["metrics"], before["choices"]["loss"]
    loss = plain(compose("train", words_from(before, OF_A_CHECKPOINT, "It").words))["loss"]
    assert loss["label_smoothing"] == 0.25 and loss["_target_"].endswith("CrossEntropy")


def test_no_class_is_called_as_a_loss_or_a_metric():
    before = stored("loss=focal")
    before["loss"]["_target_"] = "os.system"
    with pytest.raises(UserError, match="It says loss._target_='os.system', which is nothing that this clone builds"):
        words_from(before, OF_A_CHECKPOINT, "It")
    before["choices"]["loss"] = "theirs"
    with pytest.raises(UserError, match="It names loss='theirs', which this clone does not have: it has bce"):
        words_from(before, OF_A_CHECKPOINT, "It")
    hostile = {"_target_": "os.system", "command": "true"}
    before = {**stored("metrics=f1"), "metrics": {"theirs": hostile, "f1": hostile, "../x": hostile}}
    taken = words_from(before, OF_A_RUN, "It")
    node = plain(compose("train", taken.words))["metrics"]
    assert node == stored("metrics=f1")["metrics"] and {"metrics.theirs", "metrics.f1.command"} <= set(taken.left_out)


def test_a_pattern_of_frozen_names_is_no_place():
    before = stored("model.freeze=[stem,'blocks.[0-5].*']")
    words = words_from(before, OF_A_RUN, "It").words
    assert plain(compose("train", words))["model"]["freeze"] == ["stem", "blocks.[0-5].*"]
    before["model"]["freeze"] = ["/etc/passwd"]
    with pytest.raises(UserError, match="It says model.freeze="):
        words_from(before, OF_A_RUN, "It")


def test_a_pattern_of_shards_is_no_place():
    before = stored("data=webdataset", "data.test='*val*'", "data.val=null")
    data = plain(compose("train", words_from(before, OF_A_RUN, "It").words))["data"]
    assert (data["train"], data["val"], data["test"]) == ("*train*", None, "*val*")


@functools.cache
def composed(words: tuple[str, ...]) -> dict:
    cfg = compose("train", list(words))
    return {**plain(cfg), "choices": dict(chosen_options(cfg)), "overrides": list(words)}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiments_own_config_comes_back_from_its_words(experiment):
    before = stored(
        f"experiment={experiment}",
        "augmentation=rand_augment",
        "augmentation.scale=[0.3,1]",
        "optimizer.lr=0.0123",
        "tags=[night]",
        "trainer.max_epochs=77",
    )
    taken = words_from(before, OF_A_RUN, "It")
    now = plain(compose("train", taken.words))
    hivemind = before["choices"]["trainer"] == "hivemind"
    for part in (
        "data",
        "augmentation",
        "model",
        "loss",
        "metrics",
        "optimizer",
        "scheduler",
        "classifier",
        "seed",
        "tags",
        "experiment_name",
    ):
        assert now[part] == before[part], part
    assert (now["trainer"] == before["trainer"]) != hivemind
    assert taken.left_out == (["trainer"] if hivemind else [])
    of_checkpoint = config_of_words(words_from(before, OF_A_CHECKPOINT, "It").words)
    assert all(of_checkpoint[part] == before[part] for part in ("data", "model", "loss", "metrics", "classifier"))
    assert of_checkpoint["choices"]["model"] == before["choices"]["model"]


def test_the_class_is_this_clones_whatever_the_config_says():
    for target in ("os.system", "models.alexnet.AlexNet", "torch.nn.Linear", None, 7, ["models.small_cnn.SmallCNN"]):
        before = stored("model=small_cnn")
        before["model"]["_target_"] = target
        with pytest.raises(UserError, match="It says model._target_=.*nothing that this clone builds"):
            words_from(before, OF_A_CHECKPOINT, "It")


def test_a_part_that_names_no_option_is_found_by_its_class_and_an_unknown_name_is_refused():
    before = stored("model=alexnet", "data=cifar10")
    before["choices"] = {}
    assert words_from(before, OF_A_CHECKPOINT, "It").words[:2] == ["data=cifar10", "model=alexnet"]
    for name in ("mine", "../train", "alexnet.yaml", "alexnet@x", "", 7, None, ["alexnet"], "a" * 1000, "/etc/passwd"):
        before["choices"] = {"model": name, "data": "cifar10"}
        before["model"]["_target_"] = "mine.Net"
        with pytest.raises(UserError, match="It names model=.*which this clone does not have: it has airbench"):
            words_from(before, OF_A_CHECKPOINT, "It")


def parameters(group: str, node: dict) -> set[str]:
    """All that the option's class declares, and names that a class which hands any on could get."""
    signature = signature_of(str(node.get("_target_"))) if "_target_" in node else None
    extra = ("checkpoint_path", "cache_dir", "pretrained_cfg", "pretrained_cfg_overlay", "act_layer", "act_fn", "hook")
    return {*node, *(signature.names if signature else ()), *extra} - {"_target_", "_partial_"}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
@pytest.mark.usefixtures("each_composition_is_made_once")
def test_no_parameter_of_any_class_names_a_place_an_address_or_something_to_call(group, option):
    if group == "metrics":
        return  # entries, looked at above
    base = stored(*(["model.name=resnet18"] if (group, option) == ("model", "timm") else []), f"{group}={option}")
    node = base[group]
    if node is None or option == "hivemind":
        return
    for name in sorted(parameters(group, node)):
        for value in HOSTILE:
            before = copy.deepcopy(base)
            before[group][name] = value
            names = WORDS_OF.get(f"{group}.{name}")
            if isinstance(node.get(name), dict) or (names and isinstance(value, str) and names.fullmatch(value)):
                continue
            try:
                words = words_from(before, OF_A_RUN, "It").words
            except UserError:
                continue
            assert not [word for word in words if word.lstrip("+").startswith(f"{group}.{name}=")], (name, value)
        if PLACE.fullmatch(name):
            before = copy.deepcopy(base)
            before[group][name] = "plain"
            assert not [word for word in words_from(before, OF_A_RUN, "It").words if f".{name}=" in word], name


@pytest.mark.parametrize("key", ["seed", "tags", "experiment_name", "test", "callbacks.checkpoints.monitor"])
@pytest.mark.usefixtures("each_composition_is_made_once")
def test_nor_does_any_other_key(key):
    for value in [*HOSTILE, {"a": 1}]:
        before = stored()
        *parents, last = key.split(".")
        node = before
        for parent in parents:
            node = node[parent]
        node[last] = value
        words = words_from(before, OF_A_RUN, "It").words
        assert not [word for word in words if key in word] or (key in ("tags", "experiment_name") and "." in value), (
            value
        )


def test_what_this_machine_decides_is_not_looked_at_and_a_place_that_was_stated_is_named():
    before = stored("data=cifar10", "data.root=/theirs", "s3.uri=s3://theirs/x", "paths.logbook_dir=/etc",
                    "logger=wandb", "callbacks=spot", "callbacks.spot.address=http://host", "ckpt_path=/x",
                    "hardware=p3.2xlarge", "model=vit_tiny_32", "model.weights=/x.pth", "model.pretrained=true",
                    "+callbacks.mine={_target_: os.system}")  # fmt: skip
    before.update(task_name="../../..", extra={"_target_": "os.system"})
    taken = words_from(before, OF_A_RUN, "It")
    assert taken.words == [
        "data=cifar10",
        "augmentation=crop_flip",
        "model=vit_tiny_32",
        "loss=cross_entropy",
        "optimizer=adamw",
        "scheduler=cosine",
        "trainer=default",
    ]
    assert taken.left_out == ["data.root", "model.weights"]


def test_a_checkpoint_of_before_keeps_its_squashed_images():
    before = stored("data=image_folder", "data.std=0.5")
    del before["augmentation"], before["choices"]["augmentation"]
    for key in ("fit", "crop_pct", "interpolation", "path", "max_pixels"):
        del before["data"][key]
    before["data"]["mean"] = None
    found = config_of_words(words_from(today(before), OF_A_CHECKPOINT, "It").words)["data"]
    assert (found["fit"], found["crop_pct"], found["interpolation"]) == ("squash", 1.0, "bilinear")
    assert found["mean"] is None and found["std"] == 0.5


def test_values_stay_what_they_were():
    values = {"lr": 1e-5, "betas": [0.5, 0.25], "weight_decay": 0}
    before = stored("optimizer=adam")
    before["optimizer"].update(values)
    before["data"]["flip"], before["data"]["resize"] = True, 9
    now = plain(compose("train", words_from(before, OF_A_RUN, "It").words))
    assert {name: now["optimizer"][name] for name in values} == values
    assert now["data"]["flip"] is True and now["data"]["resize"] == 9


@pytest.mark.parametrize("nonsense", [None, [], "x", {}, {"choices": 3}, {"choices": {"data": "digits"}, "model": []}])
def test_nonsense_is_refused_in_a_sentence(nonsense):
    with pytest.raises(UserError, match="carries no config|which this clone does not have"):
        words_from(nonsense, OF_A_CHECKPOINT, "It")


def test_a_run_of_this_machine_is_believed_and_what_only_lies_under_logs_is_not(tmp_path):
    import yaml

    own, data = stored("data=cifar10", "data.root=/mine"), stored("data=digits")
    checkpoint = tmp_path / "train" / "runs" / "r" / "checkpoints" / "best-step00000001.ckpt"
    config = checkpoint.parents[1] / "config.yaml"
    checkpoint.parent.mkdir(parents=True)
    assert config_of_checkpoint(checkpoint, data, tmp_path)["data"]["name"] == "digits"
    (checkpoint.parents[1] / "from-bucket").mkdir()
    (checkpoint.parents[1] / "from-bucket" / "config.yaml").write_text(yaml.safe_dump(own))
    assert config_of_checkpoint(checkpoint, data, tmp_path)["data"]["name"] == "digits"
    config.write_text(yaml.safe_dump(own))
    assert config_of_checkpoint(checkpoint, data, tmp_path)["data"]["name"] == "digits"
    config.write_text(signed(yaml.safe_dump(own), config, tmp_path))
    assert config_of_checkpoint(checkpoint, data, tmp_path)["data"]["root"] == "/mine"
    assert config_of_checkpoint(checkpoint, data, tmp_path / "elsewhere")["data"]["name"] == "digits"
