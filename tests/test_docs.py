"""The documents name every option, and what they show composes."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from lockstep.config.compose import compose, plain
from lockstep.config.help import groups, help_text, keys
from lockstep.config.instantiate import build

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


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


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    config = plain(compose("train", [f"experiment={experiment}"]))
    assert config["experiment_name"] == experiment
    text = (CONFIGS / "experiment" / f"{experiment}.yaml").read_text()
    assert "Source" in text and f"experiment={experiment}" in text.partition("Command")[2]
    shape = {"num_classes": 10, "image_size": config["data"]["image_size"], "channels": 3}
    own = dict(config["model"])
    own |= {key: value for key, value in {"pretrained": False, "weights": None}.items() if key in own}
    own.pop("freeze")  # said of every model, and not to the model
    with torch.device("meta"):
        build(own, shape)


def shown_commands(*pages: Path) -> list[str]:
    """Return the trainings in code blocks of pages."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", "\n".join(path.read_text() for path in pages), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.split(" #")[0].strip() for line in lines]
    for path in (path for path in pages if path.name in ("recipes.md", "coming_from.md")):
        found += re.findall(r"`([^`]+)`", path.read_text())
    return trainings(found)


def trainings(lines) -> list[str]:
    return sorted({line for line in lines if re.search(r"(src/train\.py|train\.sbatch) ", line)})


def config_of(command: str):
    words = re.split(r"src/train\.py|train\.sbatch", command, maxsplit=1)[1].split()
    overrides = [word.strip("'\"") for word in words if "=" in word and "hydra" not in word and "(" not in word]
    overrides = [re.sub(r"<[^>]*>", "x", word).split(",")[0] if "[" not in word else word for word in overrides]
    return plain(compose("train", [re.sub(r"<[^>]*>", "x", word) for word in overrides]))


QUICK = shown_commands(REPOSITORY / "README.md", REPOSITORY / "docs" / "strategies.md")
EVERY = shown_commands(REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))
SLOW = [pytest.param(command, marks=pytest.mark.slow) for command in EVERY if command not in QUICK]


@pytest.mark.parametrize("command", [*QUICK, *SLOW])
def test_every_command_that_is_shown_composes_and_says_what_its_launcher_needs(command):
    config = config_of(re.sub(r"<[^>]*>", "x", command))
    trainer = config["trainer"]
    if "sbatch" in command and trainer["accelerator"] == "gpu":
        assert "--gpus-per-node=" in command and "--ntasks-per-node=" in command and "--nodes=" in command
    if "host_maddrs" in trainer:
        assert trainer["host_maddrs"], "on loopback nobody can join"
    several = isinstance(trainer["num_nodes"], int) and trainer["num_nodes"] > 1
    if several and not re.search("sbatch|torchrun|nodes.py", command):
        assert all(f"{name}=" in command for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"))


def test_torchrun_on_several_nodes_names_a_rendezvous():
    """Without a backend, torchrun takes every node for node 0 of a static rendezvous."""
    several = [line for line in EVERY if line.startswith("torchrun --nnodes=")]
    assert several and all("--rdzv-backend=c10d" in line and "--rdzv-endpoint=" in line for line in several)


def test_every_link_of_a_page_leads_to_a_file_and_its_anchor():
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *REPOSITORY.glob("benchmarks/*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            name, _, anchor = link.partition("#")
            if "://" in link or not name:
                continue
            target = path.parent / name
            assert target.exists(), f"{path.name}: {link}"
            assert not anchor or f'id="{anchor}"' in target.read_text() or anchor in headings(target), link


def headings(path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    lines = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_strategies_md_names_every_trainer_that_there_is():
    text = (REPOSITORY / "docs" / "strategies.md").read_text()
    trainers = {path.stem for path in (CONFIGS / "trainer").glob("*.yaml")} - {"default"}
    assert {name for name in trainers if f"trainer={name}" not in text and f"={name}`" not in text} == set()


# Tests of their own run these
ELSEWHERE = ("s3://", "push_to", "nodes.py", "rehearse.py", "upload.py", "--estimate", "…")


@pytest.mark.slow
def test_the_other_commands_that_are_shown_run_as_printed(tmp_path):
    text = "\n".join(path.read_text() for path in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
    found = re.findall(r"python (src/(?!train)\w+\.py [^`#|\n]*)", text)
    lines = [line.strip() for line in found if not any(word in line for word in ELSEWHERE)]
    commands = sorted({line.replace("<run_id>", "faster", 1).replace("<run_id>", "two") for line in lines})
    assert len(commands) > 11
    commands.sort(key=lambda line: (" remove " in line, " keep " not in line))  # a run is kept before it is removed
    for folder in ("src", "configs"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("DIR", "photos"):
        for number in range(24):
            path = tmp_path / name / f"{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 16), (10 * number, 99, 40)).save(path)
    training = "src/train.py experiment=quickstart trainer.max_epochs=1 trainer.limit_train_batches=2 run_id="
    for command in [training + "faster", training + "two", *commands]:
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} {command}"], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_the_page_of_options_has_each_key_once_and_at_most_250_rows():
    spec = importlib.util.spec_from_file_location("make_options", REPOSITORY / "docs" / "make_options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [line for line in module.options_page(CONFIGS).splitlines() if line.startswith("| `")]
    assert len(rows) <= 250 and len(rows) == len(set(rows))
    assert sum("`optimizer.lr`" in row for row in rows) == 2  # Muon's is another
    assert any("`data.train, data.val, data.test` | parquet, webdataset" in row for row in rows)
