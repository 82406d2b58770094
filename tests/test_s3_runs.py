"""Whole runs with a bucket: trained, evaluated elsewhere, interrupted, resumed on a fresh machine.

A real S3 server.
"""

import csv
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from faults import fail_at_step, signal_at_step
from lockstep.checkpoints.files import Sidecar
from lockstep.process.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_UPLOADED,
    EXIT_OK,
    EXIT_USER_ERROR,
)
from lockstep.records.folder import RunFolder, read_config
from lockstep.storage.pointers import read_pointer
from lockstep.storage.s3 import Bucket
from object_store import KEY_IDS, SECRETS, object_store, shared_store
from ranks import SRC, free_port
from runs import run_script, start_script

SMALL = [
    "experiment=quickstart",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=4",
    "run_id=the-run",
]
SHORT = ["trainer.max_epochs=2", "trainer.limit_train_batches=4", "trainer.log_every_n_steps=1"]
OUTAGE_S = 12


class Place:
    """A bucket of its own, and how a script is told of it."""

    def __init__(self, server=None):
        self.server = server or shared_store()
        self.bucket = Bucket(f"s3://{self.server.new_bucket()}/my rüns+", self.server.endpoint_url)
        self.run, self.environment = self.bucket.joinpath("the-run"), self.server.environment()
        self.arguments = [
            f"s3.uri='{self.bucket.uri}'",
            f"s3.endpoint_url={self.bucket.endpoint_url}",
        ]

    def train(self, *argv, logs, **options):
        return run_script(
            "train",
            *SMALL,
            *self.arguments,
            *argv,
            logs=logs,
            environment=self.environment,
            **options,
        )

    def checkpoint(self, kind: str = "best") -> Sidecar | None:
        """What the pointer says of its checkpoint, whose object is what was uploaded."""
        pointer = read_pointer(self.run, kind)
        if pointer.checkpoint is not None:
            found = self.server.client().get_object(
                Bucket=self.run.name, Key=self.run.prefix + pointer.key
            )
            assert hashlib.sha256(found["Body"].read()).hexdigest() == pointer.checkpoint.sha256
        return pointer.checkpoint


@pytest.fixture
def place(monkeypatch):
    made = Place()
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


def check_same_elsewhere(place, record, logs) -> None:
    """eval from the bucket alone, in another folder, counts what the run counted.

    The record names the object.
    """
    uri = f"{place.run.uri}/{read_pointer(place.run, 'best').key}"
    assert (record["upload"]["uri"], record["upload"]["error"]) == (uri, None)
    assert record["best_checkpoint"]["s3_uri"] == uri
    assert record["best_checkpoint"]["sha256"] == place.checkpoint().sha256
    arguments = [f"ckpt_path='{place.run.uri}'", f"s3.endpoint_url={place.run.endpoint_url}"]
    evaluated = run_script("eval", *arguments, logs=logs, environment=place.environment)
    assert evaluated.code == EXIT_OK, evaluated.output
    for name in ("test/correct", "test/images"):
        assert evaluated.record["metrics"][name] == record["metrics"][name], name


def check_tensorboard(place, monkeypatch) -> None:
    """`AWS_ENDPOINT_URL_S3=… tensorboard --logdir s3://bucket/prefix` reads what was uploaded."""
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", place.run.endpoint_url)
    board = EventMultiplexer()
    board.AddRunsFromDirectory(place.bucket.uri)
    board.Reload()
    assert any("val/acc" in str(board.Runs()[run]) for run in board.Runs()), board.Runs()


def check_no_secret(folder, output: str) -> None:
    text = output + "".join(
        path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file()
    )
    assert [
        word for word in [*SECRETS, *KEY_IDS, "X-Amz-Signature", "AWS4-HMAC"] if word in text
    ] == []


# A run that has finished, and what other machines do with its place


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A place whose run has finished, and how it ended."""
    with pytest.MonkeyPatch.context() as patch:
        place = Place()
        for name, value in place.environment.items():
            patch.setenv(name, value)
        done = place.train("trainer=cpu", *SHORT, logs=tmp_path_factory.mktemp("first"))
        assert done.code == EXIT_OK, done.output
        yield place, done


def test_a_finished_run_leaves_its_page_in_the_bucket(finished):
    place, done = finished
    for name in ("page.md", "curves.svg", "run.json", "config.yaml", "metrics.csv"):
        assert place.run.read(name)[0] == (done.path / name).read_bytes(), name
    assert b"finished" in place.run.read("page.md")[0]
    assert json.loads(place.run.read("run.json")[0])["summary"]["best"]


def test_another_runs_id_in_the_bucket_is_refused(finished, tmp_path):
    place, _ = finished
    objects = list(place.bucket.list())
    other = place.train("trainer=cpu", *SHORT, logs=tmp_path)
    assert other.code == EXIT_USER_ERROR, other.output
    assert "run_id=the-run resume=auto" in other.output and "another run_id=" in other.output
    assert list(place.bucket.list()) == objects
    assert other.path is None


@pytest.mark.slow
def test_another_trained_run_of_the_id_is_not_resumed_there(finished, tmp_path):
    place, _ = finished
    objects = list(place.bucket.list())
    local = run_script("train", *SMALL, *SHORT, "trainer=cpu", logs=tmp_path)
    assert local.code == EXIT_OK, local.output
    record = local.record
    for resume in ("resume=auto", "resume=the-run"):
        words = [resume, *place.arguments, "trainer.max_epochs=3"]
        if resume == "resume=auto":
            words.append("run_id=the-run")
        again = run_script("train", *words, logs=tmp_path, environment=place.environment)
        assert again.code == EXIT_USER_ERROR and "another s3.uri=" in again.output, again.output
    assert list(place.bucket.list()) == objects
    assert local.record["metrics"] == record["metrics"]


def test_a_finished_run_of_the_bucket_is_not_fetched_whole(finished, tmp_path):
    place, done = finished
    words = ["run_id=the-run", "resume=auto", *place.arguments]
    again = run_script("train", *words, logs=tmp_path, environment=place.environment)
    assert again.code == EXIT_OK and "The run the-run has finished." in again.output, again.output
    assert not list(tmp_path.rglob("*.ckpt"))
    assert again.record["metrics"] == done.record["metrics"]


def test_a_machine_that_is_behind_overwrites_nothing_newer(finished, tmp_path):
    place, done = finished
    objects = list(place.bucket.list())
    folder = tmp_path / "train/runs/the-run"
    shutil.copytree(done.path, folder)
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    # The start that the bucket knows was on another machine, and later.
    (folder / "upload/start").write_text("1.0")
    words = ["resume=the-run", "trainer.max_epochs=3", *place.arguments]
    again = run_script("train", *words, logs=tmp_path, environment=place.environment)
    assert again.code == EXIT_USER_ERROR, again.output
    assert "from step 8, which is newer than those in" in again.output
    assert "run_id=the-run resume=auto goes on from it" in again.output
    assert list(place.bucket.list()) == objects


@pytest.mark.slow
def test_a_failed_run_leaves_its_page_in_the_bucket(place, tmp_path):
    done = place.train("trainer=cpu", *SHORT, logs=tmp_path, before=partial(fail_at_step, 6))
    assert done.code == EXIT_FAILED and "this step is unhappy" in done.output, done.output
    for name in ("page.md", "run.json"):
        assert place.run.read(name)[0] == (done.path / name).read_bytes(), name
    assert json.loads(place.run.read("run.json")[0])["status"] == "failed"


@pytest.mark.slow
def test_refused_input_leaves_its_id_free(place, tmp_path):
    wrong = place.train("trainer=cpu", "task.monitor=val/nothing", *SHORT, logs=tmp_path / "wrong")
    assert wrong.code == EXIT_USER_ERROR and "val/nothing" in wrong.output, wrong.output
    done = place.train("trainer=cpu", *SHORT, logs=tmp_path / "right")
    assert done.code == EXIT_OK, done.output


@pytest.mark.slow
def test_a_run_of_two_ranks_and_eval_from_the_bucket(place, tmp_path, monkeypatch):
    done = place.train("trainer=ddp_sim", logs=tmp_path / "here")
    assert done.code == EXIT_OK, done.output
    check_same_elsewhere(place, done.record, tmp_path / "there")
    check_no_secret(tmp_path / "here", done.output)
    check_tensorboard(place, monkeypatch)


@pytest.mark.slow
def test_a_fresh_machine_resumes_from_the_bucket_alone(place, tmp_path):
    stop = partial(signal_at_step, 30, signal.SIGTERM)
    first = place.train("trainer=fsdp_sim", logs=tmp_path / "first", before=stop)
    assert first.code == EXIT_INTERRUPTED, first.output
    for name in ("page.md", "curves.svg", "run.json", "metrics.csv"):
        assert place.run.read(name)[0] == (first.path / name).read_bytes(), name
    assert first.record["status"] == "interrupted" and first.record["summary"]["folder"]
    last = place.checkpoint("last")
    assert last.step == first.record["steps"] >= 30
    bucket_alone = ["run_id=the-run", "resume=auto", *place.arguments]
    again = run_script(
        "train", *bucket_alone, logs=tmp_path / "second", environment=place.environment
    )
    assert again.code == EXIT_OK, again.output
    assert place.run.read("page.md")[0] == again.folder.page.read_bytes()
    assert place.run.read("run.json")[0] == again.folder.record_path.read_bytes()
    restart = again.record["restarts"][-1]
    assert (restart["resumed_step"], restart["lost_steps"]) == (last.step, 0)
    assert again.record["steps"] == 2 * (again.record["num_train"] // 64)
    with again.folder.metrics.open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == sorted(set(steps)) and steps[0] < last.step < steps[-1], (
        "one curve over both machines"
    )
    check_same_elsewhere(place, again.record, tmp_path / "third")
    check_no_secret(tmp_path, first.output + again.output)


def test_a_missing_bucket_ends_the_run_before_training(place, tmp_path):
    done = place.train("trainer=cpu", "s3.uri=s3://no-such-bucket/x", logs=tmp_path)
    assert done.code == EXIT_USER_ERROR
    assert (
        "the bucket no-such-bucket does not exist" in done.output and "Traceback" not in done.output
    )
    assert done.path is None, "refused input leaves no folder"
    check_no_secret(tmp_path, done.output)


@pytest.mark.slow
def test_a_best_that_never_arrived_is_the_last_line(place, tmp_path):
    away = ["s3.endpoint_url=http://127.0.0.1:9", "s3.required=false", "s3.flush_timeout_s=4"]
    done = place.train("trainer=cpu", *away, logs=tmp_path)
    assert done.code == EXIT_NOT_UPLOADED, done.output
    last_line = done.output.splitlines()[-1]
    assert (
        last_line.startswith("The best checkpoint is NOT in the bucket: ")
        and "src/upload.py the-run" in last_line
    )
    assert "cannot be reached" in done.record["upload"]["error"]
    check_no_secret(tmp_path, done.output)
    again = place.train(
        "trainer=cpu", "resume=auto", logs=tmp_path
    )  # as systemd does after an exit code that is not 0
    assert again.code == EXIT_OK and "The run the-run has finished." in again.output, again.output
    assert again.record["restarts"] == [] and again.record["upload"]["error"] is None
    assert place.checkpoint().sha256 == again.record["best_checkpoint"]["sha256"]
    third = place.train("trainer=cpu", "resume=auto", logs=tmp_path)  # with nothing left to send
    assert third.code == EXIT_OK and third.record["upload"] == again.record["upload"]


@pytest.mark.slow
def test_a_store_that_is_away_while_it_trains(tmp_path, monkeypatch):
    """Training goes on meanwhile, it says when it tries next, and the last best is in the bucket at
    the end.
    """
    with object_store(tmp_path / "store") as server:
        place = Place(server)
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        arguments = [*SMALL, *place.arguments, "trainer=cpu", "trainer.max_epochs=40", "trainer.limit_train_batches=5",
                     "optimizer.lr=1e-4"]  # fmt: skip
        run = start_script(
            "train", *arguments, logs=tmp_path / "here", environment=place.environment
        )
        folder = RunFolder(tmp_path / "here/train/runs/the-run")
        run.wait_for(
            lambda: folder.record_path.exists() and read_pointer(place.run, "best").checkpoint
        )
        server.kill()
        before = json.loads(folder.record_path.read_text())["steps"]
        time.sleep(OUTAGE_S)
        assert (
            run.process.is_alive() and json.loads(folder.record_path.read_text())["steps"] > before
        ), run.text()
        server.start()
        done = run.done(250)
        assert done.code == EXIT_OK and "next try in" in done.output, done.output
        assert place.checkpoint().sha256 == done.record["best_checkpoint"]["sha256"]
        uploads = server.client().list_multipart_uploads(Bucket=place.run.name)
        assert not uploads.get("Uploads") and done.record["upload"]["error"] is None
        check_no_secret(tmp_path / "here", done.output)


@pytest.mark.slow
def test_torchruns_ranks_go_on_from_the_bucket_alone(place, tmp_path):
    """None of them knows the run's options but from there; all wait until they are."""
    stop = partial(signal_at_step, 30, signal.SIGTERM)
    first = place.train(
        "trainer=ddp_sim", "optimizer.lr=0.002", logs=tmp_path / "first", before=stop
    )
    assert first.code == EXIT_INTERRUPTED, first.output
    paths = [
        f"paths.{name}_dir={tmp_path / 'second' / name}" for name in ("log", "data", "logbook")
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    command += [str(SRC / "train.py"), "trainer=ddp", "trainer.accelerator=cpu", "run_id=the-run", "resume=auto",
                *place.arguments, *paths]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **place.environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "second/log/train/runs/the-run/run.json").read_text())
    assert (
        record["status"] == "finished"
        and record["restarts"][-1]["resumed_step"] == first.record["steps"]
    )
    assert record["steps"] == 2 * (record["num_train"] // 64)
    assert (
        read_config(RunFolder(tmp_path / "second/log/train/runs/the-run").config_path)["optimizer"][
            "lr"
        ]
        == 0.002
    )
