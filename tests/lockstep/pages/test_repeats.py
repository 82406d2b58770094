"""Folds and seeds of one configuration are averaged on their experiment's page."""

import pytest

from example_runs import example_config, write_run
from lockstep.pages.build import build

RUNS = [  # fold, seed, lr, val, test
    (0, 42, 0.1, 0.90, 0.85),
    (1, 42, 0.1, 0.92, 0.87),
    (2, 42, 0.1, 0.94, 0.89),
    (2, 42, 0.1, 0.50, 0.40),  # an earlier try of fold 2
    (0, 42, 0.2, 0.60, 0.50),  # no other fold of its own
]


def write(root, number, fold, seed, rate, val, test, **changes):
    config = example_config(data__fold=fold, data__num_folds=3, seed=seed, optimizer__lr=rate)
    config["data"]["seed"] = seed
    own = {"metrics": {"val/acc_best": val, "val/acc": val, "test/acc": test}, "monitor": "val/loss", "seed": seed}
    started = {"started_at": f"2026-11-20T{12 - number:02d}:00:00Z", "experiment": "kfold"}
    return write_run(root, f"k_{number}", config=config, **own, **started, **changes)


@pytest.fixture
def page(tmp_path):
    def built(**changes):
        folders = [write(tmp_path / "runs", number, *run, **changes) for number, run in enumerate(RUNS)]
        build(tmp_path / "logbook", folders, "2026-11-21T00:00:00Z")
        return (tmp_path / "logbook" / "kfold.md").read_text().replace("\N{NO-BREAK SPACE}", " ")

    return built


def test_the_folds_of_a_configuration_are_one_line(page):
    text = page()
    lines = text[text.index("## Folds and seeds together") :].split("\n## ")[0].splitlines()
    assert [line for line in lines if line.startswith("| ")][2:] == [
        "| kfold | 3 | 0, 1, 2 of 3 | 42 | 92.00 ± 2.00 % | 87.00 ± 2.00 % |"
    ]
    assert "fold 2 (counted from 0) of 3 validates" in text


def test_runs_that_did_not_finish_or_tested_a_part_are_not_averaged(page):
    assert "## Folds and seeds together" not in page(status="failed")


def test_configurations_are_told_apart_by_what_differs(tmp_path):
    runs = [*RUNS, (1, 42, 0.2, 0.70, 0.60), (0, 1, 0.2, 0.1, 0.1)]
    folders = [write(tmp_path / "runs", number, *run) for number, run in enumerate(runs)]
    build(tmp_path / "logbook", folders, "2026-11-21T00:00:00Z")
    text = (tmp_path / "logbook" / "kfold.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "| `optimizer.lr=0.1` | 3 | 0, 1, 2 of 3 | 42 | 92.00 ± 2.00 % | 87.00 ± 2.00 % |" in text
    assert "| `optimizer.lr=0.2` | 3 | 0, 1 of 3 | 1, 42 | 46.67 ± 32.15 % | 40.00 ± 26.46 % |" in text
