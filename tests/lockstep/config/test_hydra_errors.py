"""What a yaml of one's own is answered where Hydra or YAML refuse it."""

import shutil

import pytest

from lockstep.config import compose
from lockstep.runs.errors import UserError

GLOBAL = "# @package _global_\n"
YAMLS = {
    "a model that is not there": (
        f"{GLOBAL}defaults:\n  - override /model: birdnet\n",
        "There is no model=birdnet: .*vit_tiny_32. It stands in the defaults of a yaml.",
    ),
    "a group that is not there": (
        f"{GLOBAL}defaults:\n  - override /modl: vit\n",
        "experiment/mine.yaml: there is no group /modl to override: did you mean /model?",
    ),
    "a group like no other": (
        f"{GLOBAL}defaults:\n  - override /zzz: vit\n",
        "there is no group /zzz to override: there is augmentation, callbacks",
    ),
    "override misspelt": (
        f"{GLOBAL}defaults:\n  - overide /model: vit\n",
        "model is chosen twice: .*`- override /model: NAME`",
    ),
    "without its first line": (
        "defaults:\n  - override /model: vit\n",
        "experiment/mine.yaml: its first line has to be `# @package _global_`.",
    ),
    "indented unevenly": (
        f"{GLOBAL}trainer:\n   max_epochs: 3\n  precision: 16\n",
        "mine.yaml is no YAML: .* in line 4, column 3.",
    ),
    "with a tab": (f"{GLOBAL}trainer:\n\tmax_epochs: 3\n", r"mine.yaml is no YAML: .*'\\t'.* in line 3, column 1."),
    "override without the slash": (
        f"{GLOBAL}defaults:\n  - override data: digits\n",
        "experiment/mine.yaml: its defaults choose another data by `- override /data: NAME`, with the slash.",
    ),
    "neither override nor slash": (
        f"{GLOBAL}defaults:\n  - model: alexnet\n",
        "experiment/….yaml: its defaults choose another model by `- override /model: NAME`, with the slash.",
    ),
    "a slash alone, twice": (
        f"{GLOBAL}defaults:\n  - /data: digits\n  - /model: alexnet\n",
        "(data|model) is chosen twice: .*`- override /(data|model): NAME`",
    ),
    "an option beside the defaults": (
        f"{GLOBAL}model: small_cnn\n",
        "a yaml's defaults choose one by `- override /model: small_cnn`.",
    ),
    "a word for a number": (f"{GLOBAL}optimizer: {{lr: fast}}\n", "optimizer.lr='fast': give a number"),
    "a word for a seed": (f"{GLOBAL}seed: abc\n", "seed='abc': give a whole number"),
    "a list where keys stand": (f"{GLOBAL}trainer:\n  - max_epochs\n", "In 'experiment/mine': ConfigTypeError"),
}


@pytest.mark.parametrize("case", YAMLS)
def test_what_an_experiments_yaml_has_wrong_is_said_in_one_sentence(case, tmp_path, monkeypatch):
    text, says = YAMLS[case]
    shutil.copytree(compose.CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=says) as raised:
        compose.compose("train", ["experiment=mine"])
    assert "\n" not in str(raised.value) and "pkg://" not in str(raised.value)


@pytest.mark.parametrize(
    ("group", "text", "says"),
    [
        ("model", "target: models.small_cnn.SmallCNN\n", "model has no _target_ .*`_target_: models.FILE.CLASS`"),
        ("metrics", "mine: {target: x}\n", "metrics.mine has no .*`mine: {_target_: metrics.FILE.CLASS}`"),
        ("callbacks", "_target_: callbacks.x.X\n", "callbacks has no .*`NAME: {_target_: callbacks.FILE.CLASS}`"),
    ],
)
def test_a_component_without_a_class_is_refused(group, text, says, tmp_path, monkeypatch):
    shutil.copytree(compose.CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs" / group / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=says):
        compose.compose("train", [f"{group}=mine"])


def test_a_missing_option_that_was_typed_is_in_no_yaml():
    with pytest.raises(UserError, match=r"There is no model=x/y: .*vit_tiny_32\.$"):
        compose.compose("train", ["model=x/y"])


def test_a_value_behind_a_blank_is_named():
    with pytest.raises(UserError, match="trainer.max_epochs has no value: write trainer.max_epochs=3."):
        compose.compose("train", ["trainer.max_epochs", "3"])
