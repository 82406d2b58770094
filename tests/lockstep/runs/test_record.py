"""The record on disk: what is kept, what is derived, what is refused, and how a restart goes on with it."""

import json

import pytest

from lockstep.runs.errors import UserError
from lockstep.runs.record import (
    LOST_AFTER_S,
    SCHEMA_VERSION,
    Restart,
    RunRecord,
    continued,
    read_record,
    status_of,
    update_record,
    write_record,
)


def run(**changes) -> RunRecord:
    """Two hours on four nodes with two restarts."""
    fields = {
        "started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T02:00:00Z", "num_nodes": 4, "epochs": 5,
        "steps": 900, "cost": {"price_per_hour": 0.526},
        "restarts": [Restart(lost_steps=60, downtime_s=1200.0), Restart(lost_steps=40, downtime_s=600.0)],
    }  # fmt: skip
    return RunRecord(**{**fields, **changes})


def test_an_update_keeps_what_this_version_does_not_know_and_stamps_the_time(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"status": "running", "own": [1], "code": {"commit": "a", "branch": "b"}, "error": {}}))
    with update_record(path) as record:
        record.status, record.steps = "finished", 3
    held = json.loads(path.read_text())
    assert (held["own"], held["code"]["branch"], held["steps"], held["status"]) == ([1], "b", 3, "finished")
    assert held["updated_at"].endswith("Z") and held["error"] is None and "other" not in held


def test_an_update_that_fails_writes_nothing(tmp_path):
    path = tmp_path / "run.json"
    write_record(path, RunRecord(status="running"))
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), update_record(path) as record:
        record.status = "finished"
        raise ZeroDivisionError
    assert path.read_bytes() == before


def test_the_cost_is_that_of_the_time_in_which_the_run_ran(tmp_path):
    write_record(tmp_path / "run.json", run())
    assert read_record(tmp_path / "run.json").cost == {"usd": 3.156, "usd_per_epoch": 0.6312, "price_per_hour": 0.526}
    write_record(tmp_path / "run.json", run(restarts=[Restart(lost_steps=0, idle_s=1800.0)]))
    assert read_record(tmp_path / "run.json").cost["usd"] == 3.156, "the time after a finished run costs nothing"
    for price in (None, 0.0):
        write_record(tmp_path / "run.json", run(cost={"price_per_hour": price}))
        assert read_record(tmp_path / "run.json").cost.get("usd") == price


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "run.json is not a run record: "), ("null", "it holds no JSON object"),
        ("[" * 99_999, "is not a run record"),
        ('{"code": "a"}', "its code is a str"), ('{"error": "a"}', "is not a run record"),
        ('{"restarts": [1]}', "is not a run record"),
        (f'{{"schema_version": {SCHEMA_VERSION + 1}, "steps": []}}', "schema version 3 but this code reads"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_an_error_in_one_sentence(tmp_path, text, said):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=said):
        read_record(tmp_path / "run.json")


def test_a_record_of_version_1_is_read_with_null_for_what_it_does_not_know(tmp_path):
    old = {"schema_version": 1, "cost": None, "goodput": {"wall": 0.9}, "hosts": [{"host": "a"}], "restarts": None}
    (tmp_path / "run.json").write_text(json.dumps(old))
    record = read_record(tmp_path / "run.json")
    assert (record.cost, record.hosts, record.restarts) == ({}, [{"host": "a"}], [])
    assert record.other == {"goodput": {"wall": 0.9}}


def test_a_running_record_without_a_heartbeat_is_lost():
    record = RunRecord(status="running", updated_at="2026-01-01T00:00:00Z")
    assert status_of(record, "2026-01-01T00:01:00Z") == "running"
    assert LOST_AFTER_S < 3600 and status_of(record, "2026-01-01T01:00:00Z") == "lost"
    assert status_of(RunRecord(status="finished", updated_at="2020-01-01T00:00:00Z")) == "finished"
    assert status_of(RunRecord()) == "lost"
    record.phase = "start"  # it may still prepare its images
    assert status_of(record, "2026-01-01T00:30:00Z") == "running"
    assert status_of(record, "2026-01-01T01:30:00Z") == "lost"


def test_a_run_that_goes_on_claims_neither_its_old_test_nor_its_first_code_alone():
    def begun():
        return RunRecord(started_at="2026-01-02T00:00:00Z", command="again", code={"commit": "b", "tree_hash": "2"})

    before = RunRecord(
        status="finished", updated_at="2026-01-01T00:00:00Z", steps=10, other={"own": 1},
        metrics={"val/acc_best": 0.9, "test/acc": 0.8}, code={"commit": "a", "tree_hash": "1"},
    )  # fmt: skip
    found = continued(before, begun(), step=10, checkpoint="last.ckpt")
    [entry] = found.restarts
    assert found.metrics == {"val/acc_best": 0.9} and found.other == {"own": 1}
    assert found.code["commit"] == "a" and entry.code["commit"] == "b"
    assert entry.downtime_s is None and entry.idle_s == 86_400
    assert (found.resumed_from, found.steps) == ("last.ckpt", 10)
    before.status, before.code = "failed", begun().code
    [entry] = continued(before, begun(), step=0, checkpoint="first.ckpt").restarts
    assert not entry.code and entry.downtime_s == 86_400 and entry.lost_steps == 10


def test_a_restart_tells_the_ranks_of_then_and_now_and_the_limit_is_that_of_the_first_start_or_of_what_was_stated():
    def of(ranks, per_device, *words):
        return RunRecord(
            world_size=ranks, num_nodes=1, per_device_batch_size=per_device, per_device_batch_limit=per_device,
            overrides=list(words),
        )  # fmt: skip

    more = continued(of(2, 32), of(4, 16), step=3, checkpoint="a")
    [entry] = more.restarts
    assert (entry.previous_world_size, entry.world_size) == (2, 4)
    assert (more.world_size, more.per_device_batch_size, more.per_device_batch_limit) == (4, 16, 32)
    again = continued(more, of(1, 8, "trainer.accumulate_grad_batches=8"), step=5, checkpoint="b")
    assert [each.world_size for each in again.restarts] == [4, 1] and again.per_device_batch_limit == 8
    older = RunRecord(per_device_batch_size=32)  # of a version that knew no limit
    assert continued(older, of(4, 16), step=3, checkpoint="a").per_device_batch_limit == 32
