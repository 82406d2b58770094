"""The record while a run lives, dies and goes on, with a trainer that stands where it is told to."""

from types import SimpleNamespace

import pytest

from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.runs.costs import goodput
from lockstep.runs.record import continued, read_record, write_record
from lockstep.storage.checkpoint_files import Sidecar


def trainer_at(step, fn="fit"):
    return SimpleNamespace(
        is_global_zero=True, global_step=step, current_epoch=0, callback_metrics={}, callbacks=[], strategy=None,
        state=SimpleNamespace(fn=fn),
    )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    write_record(tmp_path / "run.json", {"started_at": "2026-01-01T00:00:00Z", "steps": 0, "restarts": []})
    return tmp_path / "run.json"


def restart(path, resumed_step):
    """What a start of the same run makes of the record."""
    fresh = {"started_at": "2026-01-01T01:00:00Z", "steps": 0, "command": "again", "restarts": []}
    write_record(path, continued(read_record(path), fresh, {"resume_step": resumed_step}))
    return RunRecorder(path, 8)


def test_steps_that_a_crash_undid_count_once(path):
    recorder = RunRecorder(path, 8)
    recorder.on_fit_start(trainer_at(0), None)
    recorder.on_train_start(trainer_at(0), None)
    recorder.write(trainer_at(900), phase="training")  # killed here, with a checkpoint of step 800
    for last in (805, 803):
        recorder = restart(path, 800)
        recorder.on_fit_start(trainer_at(0), None)  # Lightning has not read the step of the checkpoint yet
        assert read_record(path)["steps"] == 800
        recorder.on_train_start(trainer_at(800), None)
        recorder.write(trainer_at(last), phase="training")
        assert read_record(path)["steps"] == last
    recorder = restart(path, 800)
    record = read_record(path)
    assert [entry["lost_steps"] for entry in record["restarts"]] == [100, 5, 3]
    recorder.on_fit_start(trainer_at(0), None)
    recorder.on_train_start(trainer_at(800), None)
    recorder.on_fit_end(trainer_at(1000), None)
    recorder.on_test_start(trainer_at(0, fn="test"), None)
    record = read_record(path)
    assert record["steps"] == 1000 and goodput(record)["steps"] == round(1000 / 1108, 4)


def test_a_run_that_goes_on_claims_neither_its_old_test_nor_its_first_code_alone():
    before = {"status": "finished", "updated_at": "2026-01-01T00:00:00Z", "steps": 10, "restarts": [],
              "metrics": {"val/acc_best": 0.9, "test/acc": 0.8}, "code": {"commit": "a", "tree_hash": "1"}}  # fmt: skip
    fresh = {"started_at": "2026-01-02T00:00:00Z", "command": "again", "code": {"commit": "b", "tree_hash": "2"}}
    found = continued(before, fresh, {"resume_step": 10})
    [entry] = found["restarts"]
    assert found["metrics"] == {"val/acc_best": 0.9}
    assert found["code"]["commit"] == "a" and entry["code"]["commit"] == "b"
    assert entry["downtime_s"] is None and entry["idle_s"] == 86_400
    same = continued({**before, "status": "failed"}, {**fresh, "code": before["code"]}, {"resume_step": 10})
    assert "code" not in same["restarts"][0] and same["restarts"][0]["downtime_s"] == 86_400


def test_a_failure_before_the_first_step_takes_no_steps_away(path):
    write_record(path, {**read_record(path), "steps": 700})
    recorder = restart(path, 600)
    recorder.on_fit_start(trainer_at(0), None)
    recorder.on_exception(trainer_at(0), None, ValueError("a damaged checkpoint"))
    assert read_record(path)["steps"] == 600


def test_a_checkpoint_that_is_complete_late_takes_no_steps_away(tmp_path, path):
    recorder = RunRecorder(path, 8)
    recorder.on_train_start(trainer_at(0), None)
    recorder.write(trainer_at(50), phase="training")
    recorder.on_checkpoint_complete(tmp_path / "checkpoints/last.ckpt", Sidecar(40), "last")
    assert read_record(path)["steps"] == 50
    recorder.on_checkpoint_complete(tmp_path / "checkpoints/last.ckpt", Sidecar(60), "last")
    assert read_record(path)["steps"] == 60
