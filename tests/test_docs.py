"""The documents name every option, and what they show composes."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from lockstep.config.compose import compose, plain
from lockstep.config.help import groups, help_text, keys
from lockstep.config.instantiate import build

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs"
README = (REPOSITORY / "README.md").read_text()
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def test_options_page_is_up_to_date():
    page = runpy.run_path(str(REPOSITORY / "docs" / "make_options.py"))["options_page"](CONFIGS)
    assert (REPOSITORY / "docs" / "options.md").read_text() == page, "make docs"


def test_every_option_has_a_description_and_every_key_a_comment():
    for group, options in groups(CONFIGS).items():
        for option in options:
            assert option.description, f"{group}={option.name}"
    named = {key.name for key in keys(CONFIGS / "trainer" / "default.yaml", "trainer")}
    assert {"trainer.max_epochs", "trainer.devices", "trainer.accumulate_grad_batches"} <= named


def test_help_lists_every_option():
    text = help_text(CONFIGS, "train", "what it does")
    for group, options in groups(CONFIGS).items():
        if group not in ("hydra", "paths"):
            assert f"{group}=" in text
            assert all(f" {option.name} " in text for option in options)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    config = plain(compose("train", [f"experiment={experiment}"]))
    assert config["experiment_name"] == experiment
    text = (CONFIGS / "experiment" / f"{experiment}.yaml").read_text()
    assert "Source" in text and "Command" in text
    shape = {"num_classes": 10, "image_size": config["data"]["image_size"], "channels": 3}
    own = dict(config["model"])
    own |= {key: value for key, value in {"pretrained": False, "weights": None}.items() if key in own}
    with torch.device("meta"):
        build(own, shape)


def readme_commands() -> list[str]:
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if "src/train.py" in line]


@pytest.mark.parametrize("command", readme_commands())
def test_every_train_command_of_the_readme_composes(command):
    words = command.split("src/train.py", 1)[1].split()
    overrides = [word.strip("'\"") for word in words if "=" in word and "hydra" not in word and "(" not in word]
    overrides = [re.sub(r"<[^>]*>", "x", word).split(",")[0] if "[" not in word else word for word in overrides]
    plain(compose("train", overrides))


def test_readme_is_short():
    assert len(README.splitlines()) <= 250


def test_torchrun_on_several_nodes_names_a_rendezvous():
    """Without a backend, torchrun takes every node for node 0 of a static rendezvous."""
    several = [line for line in readme_commands() if line.startswith("torchrun --nnodes=")]
    assert several and all("--rdzv-backend=c10d" in line and "--rdzv-endpoint=" in line for line in several)
