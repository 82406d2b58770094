"""reproduce: a real run of a small repository, trained once more from its commit and diff, bit for bit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.runs.record import read_json

TREE = Path(__file__).resolve().parents[1]
TINY = ("model=small_cnn", "data=synthetic", "data.num_images=74", "data.num_val=10", "data.num_test_images=10",
        "data.image_size=16", "data.global_batch_size=16", "trainer=cpu", "trainer.max_epochs=1",
        "trainer.record_hashes=true")  # fmt: skip


def run(repository: Path, script: str, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, repository / "src" / script, *words]
    environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path):
    """A clone of this code with a commit of its own, and a change that no commit holds."""
    path = tmp_path / "repository"
    without = shutil.ignore_patterns("__pycache__")
    for name in ("src", "configs"):
        shutil.copytree(TREE / name, path / name, ignore=without)
    shutil.copy(TREE / "requirements.txt", path)
    (path / ".gitignore").write_text("__pycache__\n/logs\n/data\n")
    own = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "one")):
        subprocess.run(["git", "-C", path, *own, *words], check=True)
    train = path / "configs" / "train.yaml"
    train.write_text(train.read_text().replace("seed: 42", "seed: 7"))
    return path


@pytest.mark.slow
def test_a_run_is_trained_again_bit_for_bit_and_one_of_another_seed_is_not(repository):
    done = [
        run(repository, "train.py", *TINY, "run_id=one"),
        run(repository, "train.py", *TINY, "seed=8", "run_id=other"),
    ]
    assert [each.returncode for each in done] == [0, 0], done[0].stdout + done[0].stderr
    (repository / "configs" / "train.yaml").unlink()  # what the tree has become since does not count
    again = run(repository, "logbook.py", "reproduce", "one")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "with a diff of" in again.stdout
    assert again.stdout.splitlines()[-1] == (
        "bit-equal: no difference in the images, losses, gradients and weights of 4 steps, nor in what was tested"
    )
    runs = repository / "logs" / "train" / "runs"
    assert read_json(next(repository.glob("logs/reproduced/*/logs/train/runs/again/run.json")))["seed"] == 7
    for name in ("run.json", "metrics.csv", "hashes.bin"):
        shutil.copy(runs / "other" / name, runs / "one" / name)
    again = run(repository, "logbook.py", "reproduce", "one")
    assert again.returncode == 1, again.stdout + again.stderr
    said = again.stdout.splitlines()[-1]
    assert said.startswith("different: first before the first step: the weight of features.0.weight and 7 more of 9")
