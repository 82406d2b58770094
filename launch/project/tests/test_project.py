"""Every option of configs/ composes, every model learns, and a run goes from start to test."""

import json
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.process.output import configure_logging
from lockstep.training.build_module import build_module

SRC = Path(__file__).resolve().parents[1] / "src"
GROUPS = {}
for folder in sorted(CONFIGS.iterdir()):
    GROUPS[folder.name] = sorted(option.stem for option in folder.glob("*.yaml"))
RECIPES = [[f"experiment={name}"] for name in GROUPS.pop("experiment")]
# The first option of every group together, then the second of each, and so on.
ROUNDS = []
for names in zip_longest(*GROUPS.values()):
    ROUNDS.append([f"{group}={name}" for group, name in zip(GROUPS, names) if name])
DEFAULT_SIZE = 64  # pixels
SIZES = {"vit": 224}  # pixels
MORE = {"timm": ["model.name=resnet18"]}
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


@pytest.fixture(autouse=True)
def console():
    configure_logging()


@pytest.mark.parametrize("options", [*RECIPES, *ROUNDS], ids=" ".join)
def test_options_compose(options):
    assert compose("train", options).seed == 42


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_outputs_and_every_parameter_learns(name):
    config = plain(compose("train", [f"model={name}", *MORE.get(name, ())]))
    size = SIZES.get(name, DEFAULT_SIZE)
    facts = {"num_classes": 7, "image_size": size, "channels": 3}
    # On this device there are shapes and gradients without values, so a large model is quick too.
    with torch.device("meta"):
        net = build_module(config, facts, trainable=False).net
        outputs = as_list(net(torch.empty(2, 3, size, size)))
        sum(output.logsumexp(1).sum() for output in outputs).backward()
    assert outputs[0].shape[:2] == (2, 7)
    trained = [(key, tensor) for key, tensor in net.named_parameters() if tensor.requires_grad]
    assert [key for key, tensor in trained if tensor.grad is None] == []


def as_list(outputs):
    """Return logits, or the several outputs that a net for a task of your own may have."""
    if torch.is_tensor(outputs):
        return [outputs]
    return list(outputs.values()) if isinstance(outputs, dict) else list(outputs)


def test_a_run_trains_tests_and_leaves_its_page(tmp_path):
    command = [sys.executable, str(SRC / "train.py"), "experiment=quickstart", "run_id=r"]
    command += ["trainer.max_epochs=4", f"paths.log_dir={tmp_path}"]
    command += [f"paths.data_dir={tmp_path}/data", f"paths.logbook_dir={tmp_path}/logbook"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "train/runs/r"
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "finished" and record["metrics"]["test/acc"] > 0.7
    assert (folder / "page.md").exists() and list((folder / "checkpoints").glob("best-*.ckpt"))
