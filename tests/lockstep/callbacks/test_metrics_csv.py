"""metrics.csv over restarts: no row lost, none twice, whenever a start was killed."""

import csv

import pytest

from lockstep.callbacks.metrics_csv import MetricsCsv, read_rows
from lockstep.callbacks.training_log import last_time_s


def rows(path):
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def written(path):
    log = MetricsCsv(path)
    for step in (4, 8):
        log.log_metrics({"epoch": 0, "train/loss": step}, step)
        log.log_metrics({"val/acc": step / 10}, step)
    log.finalize("")
    return rows(path)


def test_a_start_that_is_killed_at_once_loses_no_row(tmp_path):
    """It takes the last row up again, whose validation may be still to come; the row stays in the file meanwhile."""
    before = written(tmp_path / "m.csv")
    MetricsCsv(tmp_path / "m.csv", resume_step=8)
    assert rows(tmp_path / "m.csv") == before
    MetricsCsv(tmp_path / "m.csv", resume_step=8).log_metrics({"val/loss": 1}, 8)
    assert rows(tmp_path / "m.csv") == before


def test_the_row_that_a_start_goes_on_from_is_completed_once(tmp_path):
    first, last = written(tmp_path / "m.csv")
    log = MetricsCsv(tmp_path / "m.csv", resume_step=8)
    log.log_metrics({"val/acc": 0.9}, 8)
    log.log_metrics({"train/loss": 3}, 12)
    log.finalize("")
    assert rows(tmp_path / "m.csv") == [first, {**last, "val/acc": "0.9"}, {"step": "12", "train/loss": "3"}]


def test_rows_of_a_past_that_no_longer_counts_go(tmp_path):
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
        log.end_row()
        log.log_metrics({"epoch": 0, "of_epoch": 100 * step}, step - 1)
    log.finalize("")
    common = [{"epoch": "0", "time_s": str(step), "train/loss": str(step)} for step in (1, 2)]
    assert rows(tmp_path / "m.csv") == [
        {"step": "1", **common[0], "own": "10", "of_epoch": "100"},
        {"step": "2", **common[1], "own": "20", "of_epoch": "200"},
    ]


@pytest.mark.parametrize(
    "damage",
    [b"5,0,1.0,7,8,9,10", b"5,\xff,1.0", b'5,"0,1.0', b"\xff\xfe", "²,0,1".encode(), b"9" * 5000, b"x" * 200_000,
     b"-1,0,1", b"5.5,0,1"],
)  # fmt: skip
def test_a_damaged_row_costs_itself_only(damage, tmp_path, capsys):
    """A cell too many, bytes that are no text, a quote without its end, no step: said once, and the run goes on."""
    path = tmp_path / "m.csv"
    first, last = written(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\r\n".join([*lines[:2], damage, *lines[2:]]) + b"\r\n")
    log = MetricsCsv(path, resume_step=8)
    log.log_metrics({"epoch": 1, "time_s": 3.0, "train/loss": 3}, 12)
    log.finalize("")
    assert rows(path) == [first, last, {"step": "12", "epoch": "1", "time_s": "3.0", "train/loss": "3"}]
    said = capsys.readouterr().err
    too_long = len(damage) > 100_000 or b'"' in damage  # such a line is none at all
    assert said.count("damaged rows are left out") == (0 if too_long else 1)
    assert last_time_s(path) == 3.0


@pytest.mark.parametrize("head", [b"", b"\xff\xff", b"a,b,c", b'"step'])
def test_a_table_whose_head_is_damaged_begins_anew(head, tmp_path):
    path = tmp_path / "m.csv"
    written(path)
    path.write_bytes(b"\n".join([head, *path.read_bytes().splitlines()[1:]]) + b"\n")
    assert last_time_s(path) == 0.0
    log = MetricsCsv(path, resume_step=8)
    log.log_metrics({"train/loss": 3}, 12)
    log.finalize("")
    assert rows(path) == [{"step": "12", "train/loss": "3"}]


def test_a_metric_that_a_spreadsheet_would_compute(tmp_path):
    path = tmp_path / "m.csv"
    for resume_step in (None, 2):
        log = MetricsCsv(path, resume_step=resume_step)
        for step in (1, 2) if resume_step is None else (3,):
            log.log_metrics({"=cmd|x": step, "word": "+1+1", "number": -0.5}, step)
        log.finalize("")
    assert read_rows(path)[0] == ["step", "epoch", "time_s", "'=cmd|x", "word", "number"]
    assert [(row["'=cmd|x"], row["word"], row["number"]) for row in read_rows(path)[1]] == [
        (str(step), "'+1+1", "-0.5") for step in (1, 2, 3)
    ]
