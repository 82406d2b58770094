"""logger=wandb, mlflow and trackio without a network: a resumed run is one run there, with the steps of both starts."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[3] / "src"
WORDS = ("experiment=quickstart", "trainer=cpu", "trainer.max_epochs=1", "trainer.num_threads=1", "test=false")

READ = {
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_run_records("lockstep")
steps = [log["step"] for run in runs for log in SQLiteStorage.get_logs("lockstep", run["name"], run_id=run["id"])]
""",
    "mlflow": """
from mlflow.tracking import MlflowClient
client = MlflowClient(f"sqlite:///{logs}/mlflow.db")
runs = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
steps = [metric.step for run in runs for metric in client.get_metric_history(run.info.run_id, "train/loss")]
""",
    "wandb": """
from pathlib import Path
files = list(Path(logs).rglob("*.wandb"))  # one for each start: `wandb sync` makes them one run by its id
runs = {path.stem.removeprefix("run-") for path in files}
steps = [20 * (n + 1) for n, path in enumerate(files) if b"train/loss" in path.read_bytes()]
""",
}


@pytest.fixture(params=READ)
def python(request, tmp_path_factory):
    """The name of a package, and the Python of an environment that has it beside all packages of this one."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "project.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run(
        [*install[:3], "--python", python, *install[3:], request.param], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{request.param} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return request.param, python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resumed_run_is_one_run_of_the_tracker(python, tmp_path):
    name, python = python
    own = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    environment = {**{key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}, **own}
    for words in ((*WORDS, f"logger={name}", "run_id=r"), ("resume=r", "trainer.max_epochs=2")):
        command = [python, SRC / "train.py", *words, f"paths.log_dir={tmp_path}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    code = (
        f"import json, sys\nlogs = {str(tmp_path)!r}\n{READ[name]}\nprint(json.dumps([len(runs), sorted(set(steps))]))"
    )
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number, steps = json.loads(done.stdout.splitlines()[-1])
    assert number == 1 and min(steps) <= 20 < max(steps) == 40
