"""Which checkpoints are complete and whole."""

import json

import pytest

from lockstep.runs.files import checksum_of
from lockstep.storage import checkpoint_files as files
from lockstep.storage.checkpoint_files import Sidecar, complete, fault_of, newest_whole, read_sidecar, sidecar_path


def make(folder, kind, step, data=b"weights"):
    path = files.new_path(folder, kind, step)
    path.write_bytes(data)
    files.write_sidecar(path, Sidecar(step, **vars(checksum_of(path))))
    return path


def test_the_newest_whole_one_is_taken_and_a_torn_or_flipped_one_passed_over_with_a_line(tmp_path, caplog):
    good, torn, flipped = make(tmp_path, "last", 10), make(tmp_path, "best", 30), make(tmp_path, "last", 30)
    make(tmp_path, "best", 5)
    (tmp_path / "last-step00000040.ckpt").write_bytes(b"no sidecar")
    assert [path for path, _ in complete(tmp_path)] == [flipped, torn, good, tmp_path / "best-step00000005.ckpt"]
    torn.write_bytes(b"weigh")
    flipped.write_bytes(b"weighty")
    assert newest_whole(tmp_path) == good
    assert ["sha256" in line for line in caplog.messages] == [True, True]
    assert flipped.name in caplog.messages[0] and torn.name in caplog.messages[1]


def test_a_link_has_its_own_life_and_leftovers_of_a_killed_process_go(tmp_path):
    best, last = make(tmp_path, "best", 7), tmp_path / "last-step00000007.ckpt"
    files.link(best, last)
    files.remove(best)
    (tmp_path / ".last-step00000002.ckpt.x.part").write_bytes(b"half")
    (tmp_path / "last-step00000002.ckpt").write_bytes(b"no sidecar")
    files.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {last.name, sidecar_path(last).name} and not fault_of(last)


def test_a_step_that_is_saved_again_leaves_the_first_one_as_it_is(tmp_path):
    """A run that stopped in the validation of a step saves that step a second time."""
    first = make(tmp_path, "last", 30, b"the first")
    again = files.new_path(tmp_path, "last", 30)
    again.write_bytes(b"half of")
    assert again.name == "last-step00000030-2.ckpt" and newest_whole(tmp_path) == first
    third = make(tmp_path, "last", 30, b"the third")
    assert [found for found, _ in complete(tmp_path, "last")] == [third, first]


def test_a_sidecar_that_an_older_version_wrote(tmp_path):
    held = {"bytes": 3, "sha256": "cd" * 32, "epoch": 1, "batches_done": 10, "batches_per_epoch": 10,
            "phase": "epoch_end", "step": 20, "world_size": 2, "metric": {"val/acc": 0.5}}  # fmt: skip
    sidecar_path(tmp_path / "x.ckpt").write_text(json.dumps(held))
    assert read_sidecar(tmp_path / "x.ckpt") == Sidecar(20, 3, "cd" * 32, 1, {"val/acc": 0.5})


@pytest.mark.parametrize(
    "change",
    [{"step": "x"}, {"step": -1}, {"sha256": "x"}, {"metric": {"a": "b"}}, None],
)
def test_a_sidecar_with_nonsense_in_it_makes_no_checkpoint(tmp_path, change):
    path = make(tmp_path, "last", 1)
    held = json.loads(sidecar_path(path).read_text())
    sidecar_path(path).write_text(json.dumps({**held, **change} if change else held)[: None if change else -2])
    assert "no readable" in fault_of(path) and newest_whole(tmp_path) is None and list(complete(tmp_path)) == []
