"""metrics.csv over restarts: no row lost, none twice, whenever a start was killed."""

import csv

from lockstep.callbacks.metrics_csv import MetricsCsv


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
