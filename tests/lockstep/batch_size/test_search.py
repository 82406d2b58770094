"""The search for the largest batch: which batches it tries, and whole searches by runs of train.py."""

import math
import re
import signal

import psutil
import pytest

import runs
from lockstep.batch_size.search import fitting, next_batch
from lockstep.runs.errors import UserError
from runs import run_door, start_door

SMALL = ["data=synthetic", "data.num_images=20000", "data.num_test_images=20", "model=small_cnn", "optimizer=sgd",
         "data.eval_batch_size=4", "trainer.num_threads=1"]  # fmt: skip


def searched(memory, limit=16.0, bound=100_000, unit=1):
    """The batches that are tried where `memory` is the peak of a batch, or None where it runs out."""
    tried, batch = {}, 8
    while batch is not None:
        tried[batch] = memory(batch)
        batch = next_batch(tried, limit, bound, unit)
    return tried


CURVES = {
    **{f"a line from {held} by {each}": lambda batch, held=held, each=each: held + each * batch
       for held, each in ((0.5, 0.02), (2.0, 0.2), (0.1, 0.001), (3.0, 1.0), (6.0, 4.0))},
    "bends upwards": lambda batch: 1 + 0.01 * batch + 0.00001 * batch**2,
    "a floor, then less for each image": lambda batch: max(3.0, 1.7 + 0.0047 * batch - 4e-7 * batch**2),
    "in steps": lambda batch: 0.4 + math.ceil(0.1 * batch) / 8,
    "a jump": lambda batch: 0.4 + 0.01 * batch + 2 * (batch > 600),
}  # fmt: skip


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("runs_out", [True, False])
def test_it_ends_within_a_tenth_of_the_largest_on_any_curve_and_in_few_runs_on_a_line(name, runs_out):
    def memory(batch):
        return None if runs_out and CURVES[name](batch) > 16.2 else CURVES[name](batch)

    tried = searched(memory)
    largest = max(batch for batch in range(1, 20000) if CURVES[name](batch) <= 16)
    assert fitting(tried, 16.0) > 0.9 * largest and len(tried) <= (5 if "line" in name else 8), tried


def test_the_data_set_ends_the_search_every_batch_is_a_multiple_of_the_unit_and_a_small_device_is_refused():
    assert fitting(searched(lambda batch: 0.001 * batch, bound=777), 16.0) == 777
    assert all(batch % 6 == 0 for batch in list(searched(lambda batch: 0.1 * batch, unit=6))[1:])
    with pytest.raises(UserError, match="Not even 1 images per device fit into 16 GiB"):
        fitting(searched(lambda batch: None), 16.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_batch_that_is_found_trains_within_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "TIMEOUT_S", 500.0)  # each run that is tried imports torch
    limit = ["trainer=ddp_sim", "trainer.memory_limit_gib=1.2", "data.global_batch_size=max", "test=false"]
    done = run_door("train", *SMALL, *limit, "trainer.max_steps=3", "run_id=r", logs=tmp_path)
    assert done.code == 0, done.output
    found = done.record["largest_batch"]
    assert done.record["global_batch_size"] == found["global"] == 2 * found["per_device"]
    assert found["bounded_by"] == "memory" and found["probes"] <= 8 and found["limit_gib"] == 1.2
    assert 0.7 < done.record["peak_memory_gib"] < 1.25
    again = run_door("train", "resume=r", "trainer.max_steps=4", logs=tmp_path)
    assert again.code == 0 and again.record["largest_batch"] == found, again.output


@pytest.mark.slow
def test_a_wrong_option_is_told_in_the_words_of_train(tmp_path):
    done = run_door("find_batch_size", *SMALL, "trainer=cpu", "trainer.precision=bf17", logs=tmp_path)
    assert done.code == 2 and re.search(r"^error: .*bf17", done.output, re.MULTILINE), done.output


@pytest.mark.slow
def test_a_signal_ends_the_run_that_is_tried(tmp_path):
    started = start_door("find_batch_size", *SMALL, "trainer=cpu", logs=tmp_path)
    own = psutil.Process(started.process.pid)
    started.wait_for(lambda: len(own.children()) == 1)
    children = own.children()
    own.send_signal(signal.SIGTERM)
    assert started.done(30).code == 128 + signal.SIGTERM
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
