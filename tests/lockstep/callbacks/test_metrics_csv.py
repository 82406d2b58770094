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


@pytest.mark.parametrize(
    ("resume_step", "steps", "after"),
    [
        (8, {8: {"val/acc": 0.9}, 12: {"train/loss": 3}}, [{"val/acc": "0.9"}, {"step": "12", "train/loss": "3"}]),
        (6, {7: {"new": 1}, 8: {"val/acc": 8}}, [None, {"step": "7", "new": "1"}, {"step": "8", "val/acc": "8"}]),
    ],
    ids=["its row is completed once", "rows after it are removed"],
)
def test_a_resumed_run_goes_on_from_the_row_of_its_step(tmp_path, resume_step, steps, after):
    first, last = written(tmp_path / "m.csv")
    log = MetricsCsv(tmp_path / "m.csv", resume_step)
    for step, values in steps.items():
        log.log_metrics(values, step)
    log.finalize("")
    completed, *more = after
    assert rows(tmp_path / "m.csv") == [first, *([{**last, **completed}] if completed else []), *more]


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


@pytest.mark.parametrize("damage", [b"5,0,1.0,7,8,9,10", b"5,\xff", b"\0\0,1", None])
def test_a_damaged_line_is_skipped_and_without_a_head_the_table_begins_anew(damage, tmp_path):
    path = tmp_path / "m.csv"
    first, last = written(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\r\n".join([*lines[:2], damage, *lines[2:]] if damage else lines[1:]) + b"\r\n")
    MetricsCsv(path, resume_step=8).finalize("")
    found = rows(path)
    assert [found[0], found[-1]] == [first, last] if damage else found == []
