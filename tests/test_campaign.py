"""The campaign of faults (benchmarks/faults.py) in small: the pieces that fit into a test run."""

import json
import os
import signal
import time

import pytest

import damage
import fuzz
import kills  # noqa: F401 its pieces
import store_campaign  # noqa: F401
import world_sizes
from campaign import PIECES, task
from kills import differences, each_image_once, history
from signals import no_store


def do(name, count, seed=3):
    piece = PIECES[name]
    if reason := piece.missing():
        pytest.skip(reason)
    with task(name, seed, count) as given:
        return piece.work(given)


@pytest.mark.slow
def test_four_kills_one_in_each_phase():
    [row] = do("kills", 4)
    assert row.wrong == [] and row.times == 4
    assert row.seen.startswith("1 in training, 1 in validation, 1 in checkpoint, 1 in epoch end")


@pytest.mark.slow
def test_four_kills_in_the_thread_that_writes_a_checkpoint():
    [row] = do("kills-writing", 4)
    assert row.wrong == [] and row.times == 4 and row.seen.startswith("4 in background write")


@pytest.mark.slow
def test_four_kills_with_sharded_checkpoints():
    [row] = do("kills-sharded", 4)
    assert row.wrong == [] and row.times == 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "in_bucket"), [("allreduce", False), ("hsdp, shards from the bucket", True)])
def test_three_changes_of_the_number_of_ranks(name, in_bucket):
    if in_bucket and (reason := no_store()):
        pytest.skip(reason)
    with task("world-sizes", 5, 3) as given:
        row = world_sizes.row_of(given, name, in_bucket)
    assert row.wrong == [] and row.times == 3


@pytest.mark.slow
@pytest.mark.skipif(no_store() is not None, reason=str(no_store()))
def test_ten_races_for_the_pointer():
    [row] = do("pointer-races", 10)
    assert row.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=[pytest.mark.slow] if "Hydra" in name else []) for name in fuzz.TARGETS]
)
def test_a_second_of_fuzzing(target):
    examples, _, _, wrong = fuzz.run_target(fuzz.TARGETS[target], 1.0, 11)
    assert wrong == [] and examples >= 300


def test_the_fuzzer_reports_what_raises():
    from hypothesis import strategies as st

    def check(number):
        assert number < 5

    *_, wrong = fuzz.run_target(lambda: (st.integers(0, 100), check), 1.0, 1)
    assert len(wrong) == 1 and "example=5" in wrong[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return damage.real_checkpoint(tmp_path_factory.mktemp("run"))


@pytest.mark.slow
@pytest.mark.parametrize("name", damage.KINDS)
def test_some_damaged_files_of_each_kind(name, checkpoint, tmp_path):
    seen = damage.damaged(name, checkpoint, 11, range(100), tmp_path)
    assert seen.wrong == [] and seen.read + seen.refused == 100
    assert seen.refused >= (0 if name in ("metrics.csv", "lines to node 0") else 10) and seen.read >= 5


def fault(number):
    """What a reader could do wrong, by the number of the file."""
    if number == 0:
        raise KeyError("state")
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        time.sleep(3)
    if number == 3:
        bytes(2 * 2**30)


def test_what_a_reader_does_wrong_is_seen(tmp_path, monkeypatch):
    """A traceback, a process that is gone, one that does not end, and memory without end."""
    numbers = iter([*[4] * 10, 0, 1, *[4] * 10, 2, 3, 4])
    monkeypatch.setitem(damage.KINDS, "faults", lambda *_: (lambda chance: next(numbers), fault))
    monkeypatch.setattr(damage, "LIMIT_S", 0.5)
    # The second process, which begins after the one that died, draws from the same list anew.
    first = damage.damaged("faults", tmp_path, 1, range(2), tmp_path)
    assert [wrong.split(": ")[1] for wrong in first.wrong] == ["KeyError", "the process ended with -9 or hung"]
    numbers = iter([*[4] * 10, 2, 3, 4])
    second = damage.damaged("faults", tmp_path, 1, range(3), tmp_path)
    assert [wrong.split(": ")[1] for wrong in second.wrong] == ["TooLong", "MemoryError"] and second.read == 1


def marks(folder, start, begun, lines):
    (folder / f"begun-{start}-rank0.json").write_text(json.dumps(begun))
    for rank, steps in enumerate(lines):
        (folder / f"seen-{start}-rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))


def test_the_history_that_counts(tmp_path):
    """What a killed start did after the step that the next one went on from is void; what it did before counts once."""
    marks(tmp_path, 1, 0, [[[0, 1, [1]], [0, 2, [3]]], [[0, 1, [2]]]])
    marks(tmp_path, 2, 1, [[[0, 2, [3]]], [[0, 2, [4]]]])
    found = history(tmp_path)
    assert found == {(0, 1): [[1], [2]], (0, 2): [[3], [4]]} and each_image_once(found) == []
    marks(tmp_path, 3, 2, [[[0, 3, [3]]], [[0, 3, [9]]]])
    assert each_image_once(history(tmp_path)) == ["epoch 0: an image 2 times"]
    marks(tmp_path, 4, 3, [[[0, 3, [5]]], []])
    with pytest.raises(AssertionError, match="done twice"):
        history(tmp_path)


def test_one_bit_is_a_difference():
    import torch

    a = {"x": [torch.zeros(3), {"y": 1}]}
    b = {"x": [torch.tensor([0.0, 0.0, 1e-45]), {"y": 1}]}
    assert differences(a, a) == [] and differences(a, b) == ["/x/0"]
