"""What docs/howto.md shows runs as it stands there."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
TEXT = (REPOSITORY / "docs" / "howto.md").read_text()
SMALL = ["data.image_size=16", "data.global_batch_size=4", "model=small_cnn", "trainer=cpu"]
FILES = dict(re.findall(r"^`((?:src|configs)/\S+)`\n\n```\w+\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository with the files that the page tells to write."""
    root = tmp_path_factory.mktemp("howto")
    for folder in ("src", "configs"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, content in FILES.items():
        assert not (root / name).exists(), f"{name} is there already"
        (root / name).write_text(content)
    return root


def run_in(folder, *words):
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_a_model_a_data_set_an_augmentation_a_loss_a_metric_a_callback_and_a_recipe_of_ones_own(copy):
    assert len(FILES) == 14
    (early,) = re.findall(r"`(\+callbacks\.early=\{.*?\})`", TEXT)
    command = re.search(r"`python (src/train.py experiment=squares)`", TEXT)[1].split()
    more = ["trainer=fsdp_sim", early, "run_id=r", "trainer.log_every_n_steps=3"]
    run_in(copy, *command, *more)
    folder = copy / "logs" / "train" / "runs" / "r"
    record = json.loads((folder / "run.json").read_text())
    assert (record["model"], record["data"], record["experiment"]) == ("mlp", "squares", "squares")
    assert (record["images"]["augmentation"], record["images"]["path"]) == ("coarse", "array")
    assert record["metrics"]["test/images"] == 100 and record["metrics"]["test/acc"] > 0.95
    assert record["metrics"]["test/worst_class"] > 0.9
    said = (folder / "config.yaml").read_text()
    assert "losses.logit_adjusted.LogitAdjusted" in said and "metrics.worst_class.WorstClass" in said
    assert record["num_parameters"] == 64 * 16 + 16 + 16 * 2 + 2
    assert "train/weight_norm" in (folder / "metrics.csv").read_text().splitlines()[0]
    evaluated = run_in(copy, "src/eval.py", "ckpt_path=r")
    assert "test/worst_class" in evaluated.stdout
    assert f"test/acc {record['metrics']['test/acc']:.10g}" in evaluated.stdout


@pytest.mark.slow
def test_a_data_config_that_only_names_its_class_is_trained_and_tested(copy):
    config = "# Squares\n_target_: data.squares.SquaresDataModule\n"
    (copy / "configs/data/bare_squares.yaml").write_text(config)
    words = ["data=bare_squares", "model=small_cnn", "trainer=cpu", "trainer.max_steps=2", "run_id=bare"]
    trained = run_in(copy, "src/train.py", *words)
    assert "bare_squares" in trained.stdout and "global batch 128" in trained.stdout
    evaluated = run_in(copy, "src/eval.py", "ckpt_path=bare")
    assert "batches of 512" in evaluated.stdout and "test/images 100" in evaluated.stdout


def photographs(folder):
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (20, 16), (level + number,) * 3).save(folder / name / f"{number}.png")


@pytest.mark.slow
def test_photographs_that_a_yaml_names_and_a_recipe_of_two_metrics(copy):
    (metrics,) = re.findall(r"`(- override /metrics: \[.*?\])`", TEXT)
    recipe = f"# @package _global_\n# Mine\ndefaults:\n  - override /data: photos\n  {metrics}\n"
    (copy / "configs/experiment/two.yaml").write_text(recipe)
    photographs(copy / "data/photos")
    run_in(copy, "src/train.py", "experiment=two", *SMALL, "trainer.max_epochs=1", "run_id=two")
    record = json.loads((copy / "logs/train/runs/two/run.json").read_text())
    assert (record["data"], record["num_train"] + record["num_val"] + record["num_test"]) == ("photos", 24)
    assert {"val/f1", "val/kappa", "test/f1", "test/kappa"} <= record["metrics"].keys()
    assert any(path.name.startswith("photos-") for path in (copy / "data/cache").iterdir())
    assert "test/kappa" in run_in(copy, "src/eval.py", "ckpt_path=two").stdout


@pytest.mark.slow
def test_the_lines_that_pack_a_folder_into_shards(copy, tmp_path):
    (lines,) = re.findall(r"```python\n(import io\n.*?)```", TEXT, re.DOTALL)
    photographs(tmp_path / "photos")
    run_in(tmp_path, "-c", lines)
    words = ["data=webdataset", f"data.root={tmp_path / 'shards'}", *SMALL, "trainer.max_steps=1", "run_id=packed"]
    assert "2 classes: dark, light" in run_in(copy, "src/train.py", *words).stdout


@pytest.mark.slow
def test_the_notebook_runs_after_a_quickstart_and_leaves_nothing_where_it_is(copy, tmp_path):
    words = ["src/train.py", "experiment=quickstart", "trainer.max_epochs=1", "run_id=quickstart", "logbook=keep"]
    run_in(copy, *words)
    cells = json.loads((REPOSITORY / "docs" / "notebook.ipynb").read_text())["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code += "\nprint(*map(tuple, (images.shape, labels.shape, logits.shape)), len(model.facts['class_names']))"
    code += "\nprint(metrics.num_rows, metrics['step'].to_pylist(), accuracy['quickstart'] > 0)"
    path = {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=path, capture_output=True, text=True, timeout=100
    )
    assert not any(tmp_path.iterdir())
    assert done.stdout == "(64, 1, 8, 8) (64,) (64, 10) 10\n1 [20] True\n", done.stdout + done.stderr


@pytest.mark.slow
def test_they_pass_the_checks_of_a_project(copy):
    """`make check` of whoever copies them."""
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    written = [name for name in FILES if name.endswith(".py")]
    for tool in (["mypy"], ["ruff", "check"], ["ruff", "format", "--check"]):
        run_in(copy, "-m", *tool, *written)
