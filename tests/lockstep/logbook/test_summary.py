"""What a run's end derives from its files."""

import json

import pytest

from example_runs import write_run
from lockstep.logbook.summary import summarise


def test_the_summary_is_written_into_the_record_and_comes_out_the_same_again(folders):
    record = summarise(folders[0]).record
    path = folders[0] / "run.json"
    text = path.read_text()
    assert json.loads(text)["summary"] == record.summary
    summarise(folders[0])
    assert path.read_text() == text


def test_metrics_of_the_best_checkpoint_are_those_of_its_step(folders):
    lines = (folders[0] / "metrics.csv").read_text().splitlines()
    at_best = next(line for line in lines if line.startswith("1925,")).split(",")
    best = summarise(folders[0]).record.summary["best"]
    assert best == {"val/loss": float(at_best[8]), "val/acc": 0.871}


def test_a_share_of_counted_images_has_its_standard_error(tmp_path):
    monitored = {"monitor": "val/f1", "metrics": {"val/acc": 0.5, "val/images": 400, "val/f1": 0.4, "val/f1_best": 0.7}}
    record = summarise(write_run(tmp_path, "r", best_checkpoint={"epoch": 1}, **monitored)).record
    assert record.summary["errors"] == {"val/acc": 0.024876}, "not that of F1"
    assert record.summary["best"]["val/f1"] == 0.7


def test_each_class_has_its_scores(folders):
    (folders[0] / "confusion_matrix.csv").write_text("true \\ predicted,a,b\na,3,1\nb,0,4\n")
    summary = summarise(folders[0]).record.summary
    assert summary["classes"] == [["a", 4, 1.0, 0.75, pytest.approx(6 / 7)], ["b", 4, 0.8, 1.0, pytest.approx(8 / 9)]]
    assert summary["confusion"] == {"names": ["a", "b"], "counts": [[3, 1], [0, 4]]}
