"""Every option of configs/ composes, every model learns, and a run goes from start to test."""

import json
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.process.output import set_up
from lockstep.training.build_module import build_module

SRC = Path(__file__).resolve().parents[1] / "src"
GROUPS = {
    path.name: sorted(option.stem for option in path.glob("*.yaml"))
    for path in sorted(CONFIGS.iterdir())
}
RECIPES = [[f"experiment={name}"] for name in GROUPS.pop("experiment")]
ROUNDS = [  # the first option of every group together, then the second of each, …
    [f"{group}={name}" for group, name in zip(GROUPS, names) if name]
    for names in zip_longest(*GROUPS.values())
]
SIZES = {"vit": 224}  # what a model wants; else 64
MORE = {"timm": ["model.name=resnet18"]}
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


@pytest.fixture(autouse=True)
def console():
    set_up()


@pytest.mark.parametrize("options", [*RECIPES, *ROUNDS], ids=" ".join)
def test_options_compose(options):
    assert compose("train", options).seed == 42


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_outputs_for_each_class_and_every_parameter_learns(name):
    config = plain(compose("train", [f"model={name}", *MORE.get(name, ())]))
    size = SIZES.get(name, 64)
    facts = {"num_classes": 7, "image_size": size, "channels": 3}
    with torch.device("meta"):  # shapes and gradients without values, at once for a large model too
        net = build_module(config, facts, trainable=False).net
        found = net(
            torch.empty(2, 3, size, size)
        )  # logits, or several outputs for a task of your own
        outputs = (
            list(found.values())
            if isinstance(found, dict)
            else [found]
            if torch.is_tensor(found)
            else list(found)
        )
        sum(output.logsumexp(1).sum() for output in outputs).backward()
    assert outputs[0].shape[:2] == (2, 7)
    assert [key for key, p in net.named_parameters() if p.requires_grad and p.grad is None] == []


def test_a_run_trains_tests_and_leaves_its_page(tmp_path):
    words = ["experiment=quickstart", "trainer.max_epochs=4", "run_id=r", f"paths.log_dir={tmp_path}",
             f"paths.data_dir={tmp_path}/data", f"paths.logbook_dir={tmp_path}/logbook"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SRC / "train.py"), *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "train/runs/r"
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "finished" and record["metrics"]["test/acc"] > 0.7
    assert (folder / "page.md").exists() and list((folder / "checkpoints").glob("best-*.ckpt"))
