"""metrics.csv over restarts: no row lost, none twice, whenever a start was killed."""

import csv

import pytest

from lockstep.callbacks.metrics_csv import MetricsCsv


def rows(path):
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def written(path):
    log = MetricsCsv(path)
    for step in (4, 8):
        log.log_metrics({"epoch": 0, "train/loss": step}, step)
        log.log_metrics({"val/acc": step / 10}, step)
        log.save()
    log.finalize("")
    return rows(path)


def test_a_start_that_is_killed_at_once_loses_no_row(tmp_path):
    before = written(tmp_path / "m.csv")
    assert [row["step"] for row in before] == ["4", "8"]
    MetricsCsv(tmp_path / "m.csv", resume_step=8).log_metrics({"val/loss": 1}, 8)
    assert rows(tmp_path / "m.csv") == before


def test_the_row_that_a_start_goes_on_from_is_completed_once(tmp_path):
    first, last = written(tmp_path / "m.csv")
    log = MetricsCsv(tmp_path / "m.csv", resume_step=8)
    log.log_metrics({"val/acc": 0.9}, 8)
    log.log_metrics({"train/loss": 3}, 12)
    log.finalize("")
    assert rows(tmp_path / "m.csv") == [first, {**last, "val/acc": "0.9"}, {"step": "12", "train/loss": "3"}]


def test_rows_after_the_step_that_training_resumes_from_are_removed(tmp_path):
    first, _ = written(tmp_path / "m.csv")
    log = MetricsCsv(tmp_path / "m.csv", resume_step=6)
    log.log_metrics({"train/loss": 7, "new": 1}, 7)
    log.log_metrics({"train/loss": 8}, 8)
    log.finalize("")
    assert rows(tmp_path / "m.csv") == [
        first, {"step": "7", "train/loss": "7", "new": "1"}, {"step": "8", "train/loss": "8"}
    ]  # fmt: skip


def test_what_lightning_logs_counted_from_0_shares_the_row_of_its_step(tmp_path):
    """Its values come after ours: those of a step at once, those of an epoch when the row is written already."""
    log = MetricsCsv(tmp_path / "m.csv")
    for step in (1, 2):
        log.log_metrics({"epoch": 0, "time_s": step, "train/loss": step}, step)
        log.log_metrics({"epoch": 0, "own": 10 * step}, step - 1)
        log.save()
        log.log_metrics({"epoch": 0, "of_epoch": 100 * step}, step - 1)
    log.finalize("")
    common = [{"epoch": "0", "time_s": str(step), "train/loss": str(step)} for step in (1, 2)]
    assert rows(tmp_path / "m.csv") == [
        {"step": "1", **common[0], "own": "10", "of_epoch": "100"},
        {"step": "2", **common[1], "own": "20", "of_epoch": "200"},
    ]


@pytest.mark.parametrize("damage", [b"5,0,1.0,7,8,9,10", b"5,\xff", b"-1,0,1", b"\0\0,1"])
def test_a_line_that_is_cut_short_or_overwritten_is_read_as_far_as_it_goes(damage, tmp_path):
    path = tmp_path / "m.csv"
    first, last = written(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\r\n".join([*lines[:2], damage, *lines[2:]]) + b"\r\n")
    log = MetricsCsv(path, resume_step=8)
    log.log_metrics({"train/loss": 3}, 12)
    log.finalize("")
    found = rows(path)
    assert [found[0], found[-2], found[-1]] == [first, last, {"step": "12", "train/loss": "3"}] and len(found) <= 4


@pytest.mark.parametrize("head", [b"", b"\xff\xff", b"a,b,c"])
def test_a_table_whose_head_is_damaged_begins_anew(head, tmp_path):
    path = tmp_path / "m.csv"
    written(path)
    path.write_bytes(b"\n".join([head, *path.read_bytes().splitlines()[1:]]) + b"\n")
    log = MetricsCsv(path, resume_step=8)
    log.log_metrics({"train/loss": 3}, 12)
    log.finalize("")
    assert rows(path) == [{"step": "12", "train/loss": "3"}]
