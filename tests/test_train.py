"""train.py from the command line: what it writes, how it resumes, what it refuses."""

import csv
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from faults import signal_at_step
from kills import differences, weights
from lockstep.checkpoints.files import complete_checkpoints, fault_of
from runs import run_script, succeed

ROOT = Path(__file__).resolve().parents[1]
SOAK = pytest.mark.slow
SMALL = ["experiment=quickstart", "trainer.max_epochs=3", "trainer.log_every_n_steps=4"]


def rows(folder):
    with folder.metrics.open(newline="") as file:
        return list(csv.DictReader(file))


def quickstart(logs, *words, **options):
    return succeed("train", "experiment=quickstart", *words, logs=logs, **options)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return succeed("train", *SMALL, logs=tmp_path_factory.mktemp("uninterrupted"))


def test_a_run_leaves_its_whole_folder(uninterrupted):
    folder, record = uninterrupted.folder, uninterrupted.record
    facts = {"status": "finished", "exit_code": 0, "error": None, "model": "small_cnn", "data": "digits",
             "trainer": "cpu", "global_batch_size": 64, "per_device_batch_size": 64, "num_test": 360,
             "epochs": 3}  # fmt: skip
    assert {name: record[name] for name in facts} == facts
    assert record["num_train"] + record["num_val"] == 1437 and record["steps"] == 3 * (
        record["num_train"] // 64
    )
    images = record["images"]
    assert (images["path"], images["why"], images["augmentation"]) == (
        "array",
        "they fit in memory",
        "crop_flip",
    )
    assert len(images["mean"]) == len(images["std"]) == 1 and images["from_weights"] == []
    assert record["left_out_per_epoch"] == record["num_train"] % 64
    assert record["metrics"]["test/images"] == 360
    assert record["metrics"]["test/acc"] == record["metrics"]["test/correct"] / 360 > 0.85
    best = record["best_checkpoint"]
    assert fault_of(folder.path / best["path"]) is None
    assert best["bytes"] == (folder.path / best["path"]).stat().st_size
    assert {
        "code",
        "versions",
        "hosts",
        "command",
        "overrides",
        "seed",
        "fit_seconds",
    } <= record.keys()
    assert folder.page.exists() and (folder.path / "curves.svg").stat().st_size > 1000
    counts = [
        list(map(int, line.split(",")[1:]))
        for line in (folder.path / "confusion_matrix.csv").read_text().splitlines()[1:]
    ]
    assert sum(map(sum, counts)) == 360 and record["summary"]["confusion"]["counts"] == counts
    assert sum(counts[i][i] for i in range(10)) == record["metrics"]["test/correct"]
    assert list(folder.tensorboard.glob("events*")) and not list(folder.path.rglob("*.part"))
    steps = [int(row["step"]) for row in rows(folder)]
    assert steps == sorted(set(steps)) and steps[-1] == record["steps"]
    lines = uninterrupted.output.strip().splitlines()
    assert lines[0].endswith(
        "small_cnn · digits · cpu · global batch 64 = 64 × 1 × 1 · resume exact in mid-epoch"
    )
    assert lines[-1].startswith("finished") and folder.run_id in lines[-1]


@pytest.mark.slow
def test_the_test_is_in_metrics_csv_and_in_tensorboard(uninterrupted):
    folder, tested = uninterrupted.folder, uninterrupted.record["metrics"]
    with folder.metrics.open(newline="") as file:
        table = [row["test/acc"] for row in csv.DictReader(file)]
    assert table == [""] * (len(table) - 1) + [str(tested["test/acc"])]
    [event] = EventAccumulator(str(folder.tensorboard)).Reload().Scalars("test/acc")
    assert event.value == pytest.approx(tested["test/acc"])
    assert event.step == uninterrupted.record["steps"]


def test_overfit_learns_a_few_batches_by_heart(tmp_path):
    done = quickstart(
        tmp_path, "debug=overfit", "trainer.max_epochs=20", "trainer.check_val_every_n_epoch=20"
    )
    losses = [float(row["train/loss"]) for row in rows(done.folder) if row["train/loss"]]
    assert losses[-1] < 0.5 * losses[0] and done.record["tags"] == ["debug"]


def test_a_checkpoint_is_plain_and_eval_counts_the_same(
    uninterrupted,
):
    path, _ = next(complete_checkpoints(uninterrupted.folder.checkpoints, "best"))
    own = torch.load(path, weights_only=True)["lockstep"]
    assert own["config"]["model"]["_target_"] == "models.small_cnn.SmallCNN"
    assert own["data"]["class_names"] == [str(i) for i in range(10)]
    assert (
        own["data"]["image_size"] == 8
        and own["data"]["channels"] == 1
        and len(own["data"]["mean"]) == 1
    )
    done = succeed(
        "eval",
        f"ckpt_path={path}",
        "tags=[night,null]",
        logs=uninterrupted.logs.parent / "evaluated",
    )
    wanted = {
        name: value
        for name, value in uninterrupted.record["metrics"].items()
        if name.startswith("test/")
    }
    assert {name: done.record["metrics"][name] for name in wanted} == wanted
    assert "trained on some of this test" not in done.output and done.record["tags"] == ["night"]


@pytest.mark.parametrize("stop_after", [3, *(pytest.param(step, marks=SOAK) for step in (20, 21))])
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(
    uninterrupted, tmp_path, stop_after
):
    """Mid-epoch, at an epoch's last step (20 of 20), just after it, and later.

    Dropout and shuffling on.
    """
    done = run_script(
        "train", *SMALL, "run_id=r", logs=tmp_path, before=partial(signal_at_step, stop_after)
    )
    assert done.code == 75, done.output
    assert done.record["status"] == "interrupted" and done.record["steps"] == stop_after
    done = succeed("train", "resume=r", logs=tmp_path)  # with the options that it was started with
    assert differences(weights(done.folder), weights(uninterrupted.folder)) == []
    assert differences(weights(done.folder, "best"), weights(uninterrupted.folder, "best")) == []
    kept, wanted = rows(done.folder), rows(uninterrupted.folder)
    assert [r["step"] for r in kept] == sorted({r["step"] for r in kept}, key=int)
    validated = [
        [(r["step"], r["val/acc"], r["val/loss"]) for r in each if r["val/acc"]]
        for each in (kept, wanted)
    ]
    assert validated[0] == validated[1]
    assert done.record["restarts"][0]["resumed_step"] == stop_after
    assert done.record["restarts"][0]["lost_steps"] == 0
    assert done.record["metrics"]["test/correct"] == uninterrupted.record["metrics"]["test/correct"]


@pytest.mark.slow
def test_a_sweep_of_two_rank_jobs_survives_a_failure(tmp_path):
    sweep = f"hydra.sweep.dir={tmp_path}/train/multiruns/s"
    words = [
        "experiment=quickstart",
        "trainer=ddp_sim",
        "trainer.max_epochs=1",
        "optimizer.lr=0.001,1e30",
        "seed=1,2",
    ]
    done = run_script("train", "-m", *words, sweep, logs=tmp_path)
    records = {
        path.parent.name: json.loads(path.read_text())
        for path in tmp_path.glob("train/multiruns/s/*/run.json")
    }
    assert sorted(records) == ["s_0", "s_1", "s_2", "s_3"], done.output
    assert [records[f"s_{i}"]["status"] for i in range(4)] == [
        "finished",
        "finished",
        "failed",
        "failed",
    ], done.output
    assert {r["world_size"] for r in records.values()} == {2}
    assert (
        "\njob 3: experiment=quickstart" in done.output and "\n4 jobs by val/acc:\n" in done.output
    ), done.output
    assert (
        "nan" in records["s_2"]["error"]["message"] or "inf" in records["s_2"]["error"]["message"]
    )
    assert done.code == 1


BAD = {  # the first four of them in make test
    "data.global_batch_size=0": "from 1 on",
    "data.global_batch_size=5000": "5000",
    "trainer=ddp": "trainer=ddp_sim works here",
    "optimizer.learning_rate=1": "optimizer.learning_rate",
    "model=alexnett": "alexnet",
    "ckpt_path=nowhere.ckpt": "nowhere.ckpt",
    "resume=nothing": "No run 'nothing'",
    "callbacks=0": "callbacks=0",
    "resume=auto": "run_id=",
    "model=alexnet": "image",
    "seed=-1": "from 0 to 4294967295",
    "seed=null": "from 0 to 4294967295",
    "data.resize=0": "image_size is from 1 to resize",
    "data=synthetic data.image_size=32 model=airbench trainer=cpu data.global_batch_size=1": "size=2 or more",
    "experiment=quickstart trainer.precision=16-true": "optimizer.eps=1e-4",
    "+callbacks.x._target_=lockstep.checkpoints.io.write_checkpoint": "'checkpoint' and 'path'",
    "+callbacks.x._target_=collections.Counter": "Counter is not a Lightning callback",
    "+callbacks.x={_target_:lightning.pytorch.callbacks.StochasticWeightAveraging,swa_lrs:0.1}": "trainer.ema_decay",
    "task=simclr data.views=2 loss=focal": "SimCLR does not take loss=: remove loss=focal",
}
FIRST = [pytest.param(words, marks=[SOAK] * (place >= 4)) for place, words in enumerate(BAD)]


@pytest.mark.parametrize("overrides", FIRST, ids=BAD)
def test_bad_input_ends_with_one_sentence_and_exit_code_2(overrides, tmp_path):
    done = run_script("train", *overrides.split(), logs=tmp_path)
    assert done.code == 2, done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("error: ") and BAD[overrides] in last, done.output
    assert "Traceback" not in done.output


def test_a_file_that_is_no_checkpoint_is_refused(uninterrupted, tmp_path):
    rubbish = tmp_path / "rubbish.ckpt"
    rubbish.write_bytes(b"not a checkpoint")
    done = run_script("train", f"ckpt_path={rubbish}", logs=tmp_path)
    assert (
        done.code == 2 and "not a checkpoint" in done.output and "weights_only" not in done.output
    ), done.output
    other = uninterrupted.folder.path / uninterrupted.record["best_checkpoint"]["path"]
    done = run_script("train", f"ckpt_path={other}", "model.width=7", logs=tmp_path)
    assert done.code == 2, done.output


@pytest.mark.slow
def test_a_new_run_starts_from_the_weights_of_another(uninterrupted):
    best, logs = (
        weights(uninterrupted.folder, "best"),
        uninterrupted.logs,
    )  # a run id is looked up among the runs
    still = [
        f"ckpt_path={uninterrupted.folder.run_id}",
        "optimizer.lr=1e-30",
        "optimizer.weight_decay=0",
    ]
    done = quickstart(logs, *still, "trainer.max_epochs=1", "run_id=still")
    assert "Starting from the weights of " in done.output
    assert done.record["steps"] == 20 and done.record["epochs"] == 1
    assert differences(weights(done.folder, "best"), best) == []
    assert done.record["metrics"]["test/correct"] == uninterrupted.record["metrics"]["test/correct"]
    assert done.record["restarts"] == [] and "/best-step" in done.record["initial_weights"]


@pytest.mark.slow
def test_max_steps_in_mid_epoch_validates_tests_and_resumes(tmp_path):
    words = ["scheduler=none", "trainer.log_every_n_steps=4"]
    whole = quickstart(tmp_path / "whole", *words, "trainer.max_steps=30")
    short = quickstart(tmp_path, *words, "trainer.max_steps=7", "run_id=r")
    assert (
        short.record["best_checkpoint"]["step"] == 7
        and short.record["metrics"]["test/images"] == 360
    )
    again = succeed("train", "resume=r", "trainer.max_steps=30", logs=tmp_path)
    assert differences(weights(again.folder), weights(whole.folder)) == []
    assert again.record["steps"] == 30
    assert {row["step"] for row in rows(again.folder) if row["val/acc"]} == {"7", "20", "30"}


def breaks_before_the_first_step():
    from lockstep.callbacks.training_log import TrainingLog

    def fails(self, *_):
        raise RuntimeError("no step")

    TrainingLog.on_train_start = fails


@pytest.mark.slow
def test_a_run_that_never_stepped_leaves_its_id_free(tmp_path):
    words = [
        "experiment=quickstart",
        "trainer=cpu",
        "trainer.max_steps=2",
        "test=false",
        "run_id=r",
    ]
    died = run_script(
        "train", *words, "optimizer.lr=7", logs=tmp_path, before=breaks_before_the_first_step
    )
    assert died.code == 1 and died.record["status"] == "failed", died.output
    again = succeed("train", *words, "model=alexnet", "data.image_size=64", logs=tmp_path)
    assert again.record["steps"] == 2 and again.record["restarts"] == [], again.output
    assert again.record["error"] is None and "lr: 0.003" in again.folder.config_path.read_text()
    assert "exists already" in run_script("train", *words, logs=tmp_path).output
    before = again.folder.config_path.read_text()
    longer = ["resume=r", "trainer.max_steps=4", "seed=42"]
    died = run_script("train", *longer, logs=tmp_path, before=breaks_before_the_first_step)
    assert died.code == 1 and again.folder.config_path.read_text() == before, (
        "its options do not stick"
    )


@pytest.mark.slow
def test_a_finished_run_and_another_config_are_not_overwritten(uninterrupted, tmp_path):
    run_id, logs = uninterrupted.folder.run_id, uninterrupted.logs
    assert "exists already" in run_script("train", *SMALL, f"run_id={run_id}", logs=logs).output
    assert "is finished" in run_script("train", *SMALL, f"resume={run_id}", logs=logs).output
    done = run_script(
        "train", *SMALL, f"resume={run_id}", "trainer.max_epochs=4", "optimizer.lr=1", logs=logs
    )
    assert done.code == 2 and "lr was 0.003, now 1" in done.output
    assert uninterrupted.record["status"] == "finished"


@pytest.mark.slow
def test_max_steps_alone_can_end_a_training(tmp_path):
    done = quickstart(
        tmp_path, "trainer=cpu", "trainer.max_epochs=null", "trainer.max_steps=25", "test=false"
    )
    assert done.record["steps"] == 25 and done.record["epochs"] == 2, done.output


@pytest.mark.slow
def test_overfitting_goes_on_with_the_same_batches(tmp_path):
    words = ["debug=overfit", "scheduler=none", "run_id=r", "test=false"]
    whole = quickstart(tmp_path / "whole", *words, "trainer.max_epochs=4")
    quickstart(tmp_path, *words, "trainer.max_epochs=2")
    again = succeed("train", "resume=r", "trainer.max_epochs=4", logs=tmp_path)
    assert differences(weights(again.folder), weights(whole.folder)) == []


@pytest.mark.slow
def test_without_validation_the_last_checkpoint_is_the_best(tmp_path):
    words = [
        "trainer=ddp_sim",
        "data.val_fraction=0",
        "callbacks.checkpoints.every_n_epochs=2",
        "run_id=r",
    ]
    quickstart(tmp_path, *words, "trainer.max_epochs=1")
    done = succeed("train", "resume=r", "trainer.max_epochs=3", logs=tmp_path)
    record, best = done.record, done.record["best_checkpoint"]
    assert (record["num_train"], record["num_val"], record["steps"]) == (1437, 0, 66)
    assert (best["step"], best["epoch"], best["metric"]) == (66, 2, {})
    assert differences(weights(done.folder, "best"), weights(done.folder, "last")) == []
    assert fault_of(done.folder.path / best["path"]) is None
    assert not [name for name in record["metrics"] if name.startswith("val/")]
    assert "1,437 to train, 0 to validate, 360 to test" in done.folder.page.read_text()
    tested = succeed("eval", "ckpt_path=r", logs=tmp_path).record
    assert tested["metrics"]["test/acc"] == record["metrics"]["test/acc"] > 0.8


@pytest.mark.slow
def test_early_stopping_ends_a_run_for_every_further_start(tmp_path):
    stopping = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, min_delta: 100, patience: 1}"
    words = [
        "trainer.limit_train_batches=2",
        f"+callbacks.early={stopping}",
        "run_id=r",
        "resume=auto",
    ]
    assert quickstart(tmp_path, *words).record["epochs"] == 2
    again = quickstart(tmp_path, *words)
    assert again.record["epochs"] == 2 and "has finished" in again.output, again.output
    assert quickstart(tmp_path, *words, "trainer.max_epochs=21").record["epochs"] == 3


@pytest.mark.slow
def test_a_resume_that_fails_changes_nothing_of_the_run(tmp_path):
    words = [
        "trainer.limit_train_batches=2",
        "trainer.max_epochs=1",
        "optimizer.lr=0.5",
        "run_id=r",
    ]
    path = quickstart(tmp_path, *words).folder.path
    config = path.rename(path.with_name("renamed")) / "config.yaml"
    before, more = config.read_text(), ["resume=renamed", "trainer.max_epochs=2"]
    failed = run_script("train", *more, "+callbacks.x={_target_: no.Such}", logs=tmp_path)
    assert failed.code == 2 and config.read_text() == before, failed.output
    assert succeed("train", *more, logs=tmp_path).record["epochs"] == 2
    assert yaml.safe_load(config.read_text())["optimizer"]["lr"] == 0.5


# What a newcomer types first, as they type it.


@pytest.mark.parametrize("script", ["src/train.py", "src/eval.py", "src/find_batch_size.py"])
def test_without_the_environment_the_line_that_works_is_said(script):
    # -S: no site-packages, so neither Hydra nor yaml
    command = [sys.executable, "-S", script, "experiment=quickstart"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "make install, then .venv/bin/python" in done.stderr, (
        done.stderr
    )


def test_train_runs_as_a_module():
    command = [sys.executable, "-m", "src.train", "seeed=1"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert done.returncode == 2 and "There is no seeed: use seed." in done.stderr, done.stderr
