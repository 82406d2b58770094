"""The record while a run lives, dies and goes on, with a trainer that stands where it is told to."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.trainer.states import RunningStage

from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.runs.record import RunRecord, continued, read_record, update_record, write_record
from lockstep.storage.checkpoint_files import Sidecar


def trainer_at(step, fn="fit"):
    return SimpleNamespace(
        is_global_zero=True, global_step=step, current_epoch=0, callback_metrics={}, callbacks=[], strategy=None,
        sanity_checking=False,
        state=SimpleNamespace(fn=fn, stage=RunningStage.TRAINING if fn == "fit" else RunningStage.TESTING),
    )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    write_record(tmp_path / "run.json", RunRecord(started_at="2026-01-01T00:00:00Z", steps=0))
    return tmp_path / "run.json"


def restart(path, resumed_step):
    """What a start of the same run makes of the record."""
    fresh = RunRecord(started_at="2026-01-01T01:00:00Z", steps=0, command="again")
    write_record(path, continued(read_record(path), fresh, step=resumed_step, checkpoint="last.ckpt"))
    return RunRecorder(path)


def test_steps_that_a_crash_undid_count_once(path):
    recorder = RunRecorder(path)
    recorder.on_fit_start(trainer_at(0), None)
    recorder.on_train_batch_start(trainer_at(0), None)
    recorder.write(trainer_at(900), phase="training")  # killed here, with a checkpoint of step 800
    for last in (805, 803):
        recorder = restart(path, 800)
        recorder.on_fit_start(trainer_at(0), None)  # Lightning has not read the step of the checkpoint yet
        recorder.on_exception(trainer_at(0), None, ValueError("before the first step"))
        assert read_record(path).steps == 800
        recorder.on_train_batch_start(trainer_at(800), None)
        recorder.write(trainer_at(last), phase="training")
        assert read_record(path).steps == last
    recorder = restart(path, 800)
    assert [entry.lost_steps for entry in read_record(path).restarts] == [100, 5, 3]
    recorder.on_fit_start(trainer_at(0), None)
    recorder.on_train_batch_start(trainer_at(800), None)
    recorder.on_fit_end(trainer_at(1000), None)
    recorder.on_test_batch_start(trainer_at(0, fn="test"), None)
    assert read_record(path).steps == 1000


def test_the_best_is_that_of_the_best_checkpoint(path):
    with update_record(path) as record:
        record.monitor, record.monitor_mode = "val/loss", "min"
    recorder = RunRecorder(path)
    recorder.on_fit_start(trainer_at(0), None)
    metric = {"val/loss": 0.4, "val/acc": 0.7, "val/f1": 0.5, "val/auroc": float("nan")}
    recorder.on_checkpoint_complete(path.parent / "checkpoints/best.ckpt", Sidecar(7, metric=metric), "best")
    recorder.write(trainer_at(9))
    record = read_record(path)
    assert record.metrics == {"val/loss_best": 0.4, "val/acc_best": 0.7}
    assert record.best_checkpoint.metric == {"val/loss": 0.4, "val/acc": 0.7, "val/f1": 0.5}
