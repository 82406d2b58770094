"""A run beside its repetition: what counts as the same, and the spread of seeds."""

import numpy as np
import pytest

from example_runs import example_config, write_run
from lockstep.pages.difference import by_metrics, parting
from lockstep.pages.source import import_run
from lockstep.pages.verdict import columns_of, seeds_spread, side_by_side, verdict
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.step_hashes import Head, add_rows, begin_hashes, read_hashes

HEAD = Head(2, ("a",), ("a",))


@pytest.fixture
def run(tmp_path):
    def make(name, *, acc=0.8643, seed=42, loss=None, lr=0.0005, flipped=None, **changes):
        """A run folder whose metrics.csv has the loss `loss` at step 20, and hashes of 3 steps where `flipped` is given
        (0: none differs)."""
        config = example_config(seed=seed, optimizer={"lr": lr})
        changes["metrics"] = {"test/acc": acc, "test/correct": acc * 10_000, "val/acc": 0.8}
        folder = RunFolder(write_run(tmp_path, name, config=config, seed=seed, **changes))
        rows = [f"{step},{2.0 / step if step != 20 or loss is None else loss},{step * 3}" for step in (10, 20, 30)]
        folder.metrics.write_text("\n".join(["step,train/loss,time_s", *rows]) + "\n")
        if flipped is not None:
            begin_hashes(folder.hashes, HEAD, None)
            words = np.ones((3, HEAD.width), np.int64)
            words[:, 0] = range(3)
            words[flipped:, 4] += bool(flipped)
            add_rows(folder.hashes, words)
        return folder

    return make


def judged(one, other, known=(), *, in_logbook=False):
    sources = import_run(one.path), import_run(other.path)
    found = verdict(*sources, (None if in_logbook else one, other), [import_run(run.path) for run in known])
    return found.word, found.why


def test_equal_by_hashes_else_by_metrics_else_by_the_logbooks_digits(run):
    assert judged(run("a", flipped=0), run("b", flipped=0)) == (
        "bit-equal", "no difference in the images, losses, gradients and weights of 2 steps, nor in what was tested",
    )  # fmt: skip
    word, why = judged(run("c"), run("d", flipped=0))
    assert word == "bit-equal" and "the 1 metrics of 3 rows of metrics.csv" in why
    word, why = judged(run("e"), run("f", loss=0.1000001), in_logbook=True)
    assert word == "equal" and "to the five digits" in why


def test_the_first_step_that_differs_is_named(run):
    word, why = judged(run("a", flipped=0), run("b", flipped=2))
    assert word == "different" and why.startswith("first in step 2: image 0 of the batch")
    word, why = judged(run("c"), run("d", loss=0.1000001))
    assert word == "different" and why.startswith("first in step 20: train/loss is 0.1 and 0.1000001")
    word, why = judged(run("e"), run("f", acc=0.8644))
    assert word == "different" and why.startswith("first in test/acc: 0.8643 and 0.8644")


def test_other_data_are_another_run(run):
    assert judged(run("a"), run("b", data_hash="other")) == ("different", "the data are not the same (data_hash)")


def test_the_spread_is_of_runs_that_differ_in_the_seed_alone(run):
    a, near, far = run("a", acc=0.86), run("near", acc=0.865, loss=0.5), run("far", acc=0.9, loss=0.5)
    seeds = [run("b", acc=0.87, seed=1), run("c", acc=0.85, seed=2)]
    unlike = [run("d", acc=0.5, seed=3, lr=0.1)]
    assert seeds_spread(import_run(a.path), [import_run(x.path) for x in unlike]) is None
    low, high, count = seeds_spread(import_run(a.path), [import_run(x.path) for x in (*seeds, *unlike)])
    assert (round(low, 4), round(high, 4), count) == (0.84, 0.88, 3)
    word, why = judged(a, near, seeds)
    assert word == "within the seeds' spread" and "0.8650 lies in 0.8400 to 0.8800, two deviations of 3 seeds" in why
    word, why = judged(a, far, seeds)
    assert word == "different" and "0.9000 does not lie in 0.8400 to 0.8800" in why


def test_over_other_ranks_images_alone_are_not_bit_equal(run):
    one, other = run("a", flipped=0), run("b", flipped=0)
    rows = read_hashes(other.hashes).rows
    rows[:, 1] = 2
    other.hashes.write_bytes(HEAD.line() + rows.tobytes())
    found = parting(one, other)
    assert not found.where and not found.is_bit_exact and "images (alone" in found.compared
    other.metrics.write_text(other.metrics.read_text().replace("0.2,", "0.25,"))
    word, why = judged(one, other)
    assert word == "different" and why.startswith("first in step 10: train/loss is 0.2 and 0.25")


def test_curves_of_the_logbook_are_rows_again(run):
    columns = columns_of(import_run(run("a").path))
    assert columns["step"] == [10, 20, 30] and columns["train/loss"] == [0.2, 0.1, 0.066667]
    assert not by_metrics(columns, columns).where
    with pytest.raises(UserError, match="nothing to compare"):
        by_metrics(columns, {})


def test_both_stand_side_by_side(run):
    sources = [import_run(run("a").path), import_run(run("b", acc=0.9).path)]
    table = side_by_side(sources, ["a", "again"])
    line = next(line for line in table.split("\n") if line.startswith("Test accuracy"))
    assert "86.43\xa0%" in line and "90.00\xa0%" in line and "sha256" not in table
