"""The record on disk: what is kept, what is derived, what is refused, and how a restart goes on
with it.
"""

import json
import time

import pytest

from lockstep.process.errors import UserError
from lockstep.records.record import (
    SCHEMA_VERSION,
    JsonObject,
    RunRecord,
    locked_record,
    merge_restart,
    read_record,
    status_of,
    update_record,
    write_record,
)
from ranks import new_process


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.json"


def test_an_update_keeps_unknown_fields(path):
    path.write_text(
        json.dumps(
            {"status": "running", "own": [1], "code": {"commit": "a", "branch": "b"}, "error": {}}
        )
    )
    with update_record(path) as record:
        record.status, record.steps = "finished", 3
    held = json.loads(path.read_text())
    assert (held["own"], held["code"]["branch"], held["steps"], held["status"]) == (
        [1],
        "b",
        3,
        "finished",
    )
    assert held["updated_at"].endswith("Z") and held["error"] is None and "other" not in held
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), update_record(path) as record:
        record.status = "failed"
        raise ZeroDivisionError
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("price", "restarts", "usd"),
    [
        (
            0.526,
            [
                JsonObject(lost_steps=60, downtime_s=1200.0),
                JsonObject(lost_steps=40, downtime_s=600.0),
            ],
            3.156,
        ),
        (None, [], None),
    ],
)
def test_the_cost_is_that_of_the_time_of_running(price, restarts, usd, path):
    times = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T02:00:00Z"}
    cost = {"price_per_hour": price}
    write_record(
        path, RunRecord(num_nodes=4, epochs=5, steps=900, cost=cost, restarts=restarts, **times)
    )
    found = read_record(path).cost
    assert found == (
        cost if usd is None else {"usd": usd, "usd_per_epoch": round(usd / 5, 4), **cost}
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "run.json is not a run record: "), ("null", "is not a run record"), ("[" * 99_999, "is not a run record"),
        ('{"code": "a"}', "its code is a str"), ('{"error": "a"}', "is not a run record"),
        ('{"restarts": [1]}', "is not a run record"),
        (f'{{"schema_version": {SCHEMA_VERSION + 1}, "steps": []}}', "schema version 3 but this code reads"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_an_error_in_one_sentence(text, said, path):
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_record(path)


def test_a_record_of_version_1_is_read_with_nulls(path):
    old = {
        "schema_version": 1,
        "cost": None,
        "goodput": {"wall": 0.9},
        "hosts": [{"host": "a"}],
        "restarts": None,
    }
    path.write_text(json.dumps(old))
    record = read_record(path)
    assert (record.cost, record.hosts, record.restarts) == ({}, [{"host": "a"}], [])
    assert record.other == {"goodput": {"wall": 0.9}}


def count_up(path, field, times):
    for _ in range(times):
        with update_record(path) as record:
            record.other[field] = record.other.get(field, 0) + 1
            time.sleep(0.001)


def test_writers_at_the_same_time_lose_no_update(path):
    write_record(path, RunRecord())
    writers = [new_process(target=count_up, args=(path, name, 40)) for name in ("a", "b", "c")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert read_record(path).other == {"a": 40, "b": 40, "c": 40}


def test_a_writer_that_hangs_stops_no_training(path, monkeypatch):
    write_record(path, RunRecord())
    monkeypatch.setattr("lockstep.records.record.LOCK_WAIT_S", 0.1)
    with locked_record(path), update_record(path) as record:
        record.steps = 3
    assert read_record(path).steps == 3


def test_a_running_record_without_a_heartbeat_is_lost():
    record = RunRecord(status="running", updated_at="2026-01-01T00:00:00Z")
    assert status_of(record, "2026-01-01T00:01:00Z") == "running"
    assert status_of(record, "2026-01-01T00:30:00Z") == "lost" == status_of(RunRecord())
    record.phase = "start"  # it may still prepare its images
    assert status_of(record, "2026-01-01T00:30:00Z") == "running"
    assert status_of(record, "2026-01-01T01:30:00Z") == "lost"
    assert status_of(RunRecord(status="finished", updated_at="2020-01-01T00:00:00Z")) == "finished"


def test_a_resumed_run_does_not_claim_its_old_test():
    def begun():
        return RunRecord(
            started_at="2026-01-02T00:00:00Z",
            command="again",
            code={"commit": "b", "tree_hash": "2"},
        )

    before = RunRecord(
        status="finished", updated_at="2026-01-01T00:00:00Z", steps=10, other={"own": 1},
        metrics={"val/acc_best": 0.9, "test/acc": 0.8}, code={"commit": "a", "tree_hash": "1"},
    )  # fmt: skip
    found = merge_restart(before, begun(), step=10)
    [entry] = found.restarts
    assert found.metrics == {"val/acc_best": 0.9} and found.other == {"own": 1}
    assert found.code["commit"] == "a" and entry.code["commit"] == "b"
    assert entry.downtime_s is None and entry.idle_s == 86_400
    assert found.steps == 10
    before.status, before.code = "failed", begun().code
    [entry] = merge_restart(before, begun(), step=0).restarts
    assert not entry.code and entry.downtime_s == 86_400 and entry.lost_steps == 10


def test_a_restart_tells_the_ranks_of_both_starts():
    def of(ranks, size, *words):
        sizes = {"per_device_batch_size": size, "per_device_batch_limit": size}
        return RunRecord(world_size=ranks, overrides=list(words), **sizes)

    more = merge_restart(of(2, 32), of(4, 16), step=3)
    [entry] = more.restarts
    assert (entry.previous_world_size, entry.world_size) == (2, 4)
    assert (more.world_size, more.per_device_batch_size, more.per_device_batch_limit) == (4, 16, 32)
    again = merge_restart(more, of(1, 8, "trainer.accumulate_grad_batches=8"), step=5)
    assert [each.world_size for each in again.restarts] == [
        4,
        1,
    ] and again.per_device_batch_limit == 8
    older = RunRecord(per_device_batch_size=32)  # of a version that knew no limit
    assert merge_restart(older, of(4, 16), step=3).per_device_batch_limit == 32


@pytest.mark.parametrize(("price", "usd"), [(1.0, 801.0), (None, 800.0)])
def test_an_earlier_start_cost_what_its_nodes_cost(price, usd, path):
    before = RunRecord(
        updated_at="2026-01-01T10:00:00Z",
        started_at="2026-01-01T00:00:00Z",
        num_nodes=8,
        cost=JsonObject(usd=800.0, price_per_hour=10.0),
    )
    now = RunRecord(
        started_at="2026-01-02T00:00:00Z",
        finished_at="2026-01-02T01:00:00Z",
        num_nodes=1,
        cost=JsonObject(price_per_hour=price),
    )
    write_record(path, merge_restart(before, now, step=1))
    assert read_record(path).cost["usd"] == usd


def test_a_resumed_run_claims_no_test_of_any_name():
    before = RunRecord(metrics={"test_acc": 0.5, "val_acc": 0.4})
    assert merge_restart(before, RunRecord(), step=5).metrics == {"val_acc": 0.4}


def test_a_start_that_trains_nothing_keeps_what_was_measured():
    measured = {"images_per_s": 5.0, "throughput": {"images_per_s": 5.0}, "peak_memory_gib": 4.0}
    record = merge_restart(RunRecord(**measured), RunRecord(), step=3)
    assert {name: getattr(record, name) for name in measured} == measured
