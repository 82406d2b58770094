"""Traces of two runs are compared step by step."""

import copy
import json

import pytest

from lockstep.runs.proof_causes import cause_of_metric, cause_of_parts, cause_of_resume
from lockstep.runs.step_trace import (
    find_changed_attributes,
    find_first_difference,
    find_metric_difference,
    read_trace,
)

STATE = {
    "weights": {"net.weight": ["a", 2.0, 1.0], "net.bias": ["b", 1e-9, 1e-9]},
    "optimizer": {"net.weight/exp_avg": ["c", 0.5, 0.1]},
    "attributes": {"seen": 1},
}


def step(number: int, **changes):
    row = {
        "kind": "step",
        "step": number,
        "epoch": (number - 1) // 2,
        "images": [["i1", "t1"], ["i2", "t2"]],
        "draws": False,
        "loss": [2.0],
        "learning_rates": [0.1],
        **copy.deepcopy(STATE),
    }
    return {**row, **changes}


def trace_of(folder, *rows, rank=0):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"steps-rank{rank}.jsonl").write_text(text)
    return read_trace(folder)


@pytest.fixture
def reference(tmp_path):
    return trace_of(tmp_path / "reference", step(1), step(2))


def metrics(value: float, stage: str = "validation"):
    return {"kind": "metrics", "stage": stage, "step": 2, "values": {"val_loss": value}}


CHANGES = {
    "the images": ({"images": [["i1", "t1"], ["i3", "t2"]]}, "images number 1 of the batch"),
    "a learning rate": ({"learning_rates": [0.2]}, "learning rate of group 0 by 1.0e+00"),
    "the loss": ({"loss": [1.0]}, "loss by 5.0e-01"),
    "a weight": (
        {"weights": {**STATE["weights"], "net.weight": ["x", 3.0, 1.0]}},
        "weights net.weight by 5.0e-01",
    ),
    "a moment": (
        {"optimizer": {"net.weight/exp_avg": ["x", 0.5, 0.2]}},
        "optimizer net.weight/exp_avg by 2.0e-01",
    ),
    "a lost moment": ({"optimizer": {}}, "optimizer net.weight/exp_avg (is missing)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_difference_has_its_step_and_size(name, reference, tmp_path):
    changes, text = CHANGES[name]
    run = trace_of(tmp_path / "run", step(1), step(2, **changes))
    difference = find_first_difference(run, reference, 1e-9)
    assert (difference.step, str(difference)) == (2, text)


def test_equal_runs_have_no_difference(reference, tmp_path):
    run = trace_of(tmp_path / "run", step(1), step(2))
    assert find_first_difference(run, reference, 0.0) is None


def test_a_hash_alone_differs_only_to_the_bit(reference, tmp_path):
    weights = {**STATE["weights"], "net.weight": ["x", 2.0, 1.0]}
    run = trace_of(tmp_path / "run", step(1, weights=weights), step(2, weights=weights))
    assert find_first_difference(run, reference, 0.0).name == "net.weight"
    assert find_first_difference(run, reference, 1e-12) is None


def test_a_small_tensor_counts_relative_to_the_largest(reference, tmp_path):
    weights = {**STATE["weights"], "net.bias": ["x", 2e-9, 2e-9]}
    run = trace_of(tmp_path / "run", step(1, weights=weights), step(2))
    assert find_first_difference(run, reference, 1e-9) is None


def test_a_run_that_ends_early_differs(reference, tmp_path):
    run = trace_of(tmp_path / "run", step(1))
    assert str(find_first_difference(run, reference, 0.0)) == "steps end at 1"


def test_a_repeated_step_counts_as_it_was_last(reference, tmp_path):
    run = trace_of(tmp_path / "run", step(1), step(2, loss=[9.0]), step(2))
    assert find_first_difference(run, reference, 0.0) is None


def test_ranks_add_their_images_and_average_their_losses(reference, tmp_path):
    trace_of(tmp_path / "run", *(step(n, images=[["i1", "t1"]], loss=[1.0]) for n in (1, 2)))
    rows = [step(n, images=[["i2", "t2"]], loss=[3.0]) for n in (1, 2)]
    run = trace_of(tmp_path / "run", *rows, rank=1)
    assert find_first_difference(run, reference, 0.0) is None


def test_a_repeated_step_counts_once_on_each_rank(reference, tmp_path):
    first = [step(n, images=[["i1", "t1"]], loss=[1.0]) for n in (1, 2, 2)]
    second = [step(n, images=[["i2", "t2"]], loss=[3.0]) for n in (1, 2, 2)]
    trace_of(tmp_path / "run", *first)
    assert (
        find_first_difference(trace_of(tmp_path / "run", *second, rank=1), reference, 0.0) is None
    )


def test_rank_2_comes_before_rank_10(tmp_path):
    for rank in (0, 10, 2):
        run = trace_of(tmp_path / "run", step(1, images=[[f"i{rank}"]]), rank=rank)
    assert run.steps[1].images == [["i0"], ["i2"], ["i10"]]


def test_a_smaller_last_batch_is_found(tmp_path):
    run = trace_of(tmp_path / "run", step(1), step(2, images=[["i1", "t1"]]), step(3))
    assert run.whole_batches == 1


def test_a_metric_differs_by_its_name(tmp_path):
    reference = trace_of(tmp_path / "a", metrics(1.0), metrics(1.0, "sanity"))
    run = trace_of(tmp_path / "b", metrics(1.5))
    assert str(find_metric_difference(run, reference, 1e-9)) == "metric val_loss by 5.0e-01"
    assert find_metric_difference(run, reference, 1e-9, ["val_acc"]) is None


def test_ranks_with_other_metrics_lack_sync_dist(tmp_path):
    trace_of(tmp_path / "a", metrics(1.0))
    run = trace_of(tmp_path / "a", metrics(1.5), rank=1)
    assert "sync_dist=True" in cause_of_metric(run, "val_loss")
    same = trace_of(tmp_path / "a", metrics(1.0), rank=1)
    assert "sync_dist" not in cause_of_metric(same, "val_loss")


def test_a_loss_of_half_the_size_is_a_sum(reference, tmp_path):
    run = trace_of(tmp_path / "run", step(1, loss=[1.0]), step(2))
    difference = find_first_difference(run, reference, 1e-9)
    assert "a sum" in cause_of_parts(difference, reference, run)


def test_an_attribute_that_a_resume_lost_is_named(reference, tmp_path):
    start = {"kind": "start", "step": 1, **STATE, "attributes": {"seen": 0}}
    run = trace_of(tmp_path / "run", step(1), start, step(2, loss=[9.0]))
    difference = find_first_difference(run, reference, 0.0)
    assert find_changed_attributes(run.starts[0], reference.steps[1]) == ["seen"]
    assert "self.seen" in cause_of_resume(run, reference, difference)
