"""The progress line and the trackers: what somebody sees while a run trains."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.callbacks import progress as module
from lockstep.callbacks.progress import Progress
from lockstep.loggers.trackers import Trackio


def trainer_at(batch: int, epochs: int) -> SimpleNamespace:
    """A trainer that has done so many of an epoch's 20 batches."""
    loop = SimpleNamespace(batch_progress=SimpleNamespace(current=SimpleNamespace(ready=batch)))
    return SimpleNamespace(
        is_global_zero=True, max_epochs=epochs, current_epoch=1, callbacks=[], callback_metrics={"val/acc": 0.5},
        should_stop=False, sanity_checking=False, num_training_batches=20, state=SimpleNamespace(fn="fit"),
        fit_loop=SimpleNamespace(epoch_loop=loop), num_val_batches=[9], num_test_batches=[7],
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch, caplog):
    """A list with the time in seconds."""
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    caplog.set_level("INFO", logger=module.__name__)
    return clock


@pytest.mark.parametrize(
    ("epoch_s", "epochs", "shown"),
    [
        (6.0, 4, [1, 2, 3, 4]),  # long enough for a line each
        (1.0, 50, [20, 40, 50]),  # a quickstart on a slow machine
        (0.1, 10, [10]),
    ],
)
def test_which_epochs_have_a_line(clock, caplog, epoch_s, epochs, shown):
    trainer = trainer_at(20, epochs)
    callback = Progress()
    for trainer.current_epoch in range(epochs):
        callback.on_train_epoch_start(trainer, None)
        clock[0] += epoch_s
        callback.on_train_epoch_end(trainer, None)
    assert caplog.messages == [
        f"epoch {number}/{epochs} · done · val acc 50.00%" for number in shown
    ]


def test_validations_and_ends_within_an_epoch_have_a_line(clock, caplog):
    trainer, callback = trainer_at(8, 3), Progress()
    for passed in (4.0, 4.0):  # the first is too soon after the start
        clock[0] += passed
        callback.on_validation_end(trainer, None)
    trainer.should_stop = True
    callback.on_train_epoch_end(trainer, None)
    assert caplog.messages == [
        "epoch 2/3 · batch 8/20 · validated · val acc 50.00%",
        "epoch 2/3 · batch 8/20 · val acc 50.00%",
    ]


# logger=wandb, mlflow and trackio without a network: a resumed run is one run there, with the steps
# of both starts.

SRC = Path(__file__).resolve().parents[3] / "src"
WORDS = (
    "experiment=quickstart",
    "trainer=cpu",
    "trainer.max_epochs=1",
    "trainer.num_threads=1",
    "test=false",
)

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
    """The name of a package, and the Python of an environment that has it beside all packages of
    this one.
    """
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "project.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run(
        [*install[:3], "--python", python, *install[3:], request.param],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"{request.param} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return request.param, python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resumed_run_is_one_run_of_the_tracker(python, tmp_path):
    name, python = python
    own = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    environment = {
        **{key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"},
        **own,
    }
    for words in ((*WORDS, f"logger={name}", "run_id=r"), ("resume=r", "trainer.max_epochs=2")):
        command = [python, SRC / "train.py", *words, f"paths.log_dir={tmp_path}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    code = f"import json, sys\nlogs = {str(tmp_path)!r}\n{READ[name]}\nprint(json.dumps([len(runs), sorted(set(steps))]))"
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number, steps = json.loads(done.stdout.splitlines()[-1])
    assert number == 1 and min(steps) <= 20 < max(steps) == 40


def test_trackio_gets_the_test_after_the_training(monkeypatch):
    logged, begun = [], []

    class Run:
        def log(self, metrics, step):
            logged.append((metrics, step))

        def finish(self):
            logged.append("finished")

    def init(*names, **options):
        begun.append((*names, options["resume"]))
        return Run()

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    logger = Trackio("r", "lockstep")
    logger.log_metrics({"val/acc": 0.5}, 4)
    logger.finalize("success")
    logger.log_metrics({"test/acc": 0.75}, 4)
    logger.finalize("success")
    assert begun == [("lockstep", "r", "allow")] * 2
    assert logged == [({"val/acc": 0.5}, 4), "finished", ({"test/acc": 0.75}, 4), "finished"]


def test_every_rank_reads_the_metrics_of_an_epoch():
    """Lightning computes them then, which is a collective."""
    reads = []

    class Trainer(SimpleNamespace):
        @property
        def callback_metrics(self):
            reads.append(self.is_global_zero)
            return {}

    values = vars(trainer_at(20, 4))
    del values["callback_metrics"]
    for is_global_zero in (True, False):
        trainer = Trainer(**{**values, "is_global_zero": is_global_zero})
        Progress().on_train_epoch_end(trainer, None)
    assert reads == [True, False]
