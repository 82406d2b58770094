"""Which checkpoints are complete and whole."""

import json

import pytest

from lockstep.runs.files import checksum_of
from lockstep.storage.checkpoint_files import (
    Sidecar,
    checkpoint_name,
    complete,
    fault_of,
    link,
    new_path,
    newest_whole,
    read_sidecar,
    remove,
    remove_leftovers,
    sidecar_path,
    write_sidecar,
)


def make(folder, kind, step, data=b"weights"):
    path = folder / checkpoint_name(kind, step)
    path.write_bytes(data)
    write_sidecar(path, Sidecar(step, **vars(checksum_of(path))))
    return path


def test_newest_complete_comes_first_and_last_before_best(tmp_path):
    make(tmp_path, "best", 10)
    make(tmp_path, "last", 30)
    make(tmp_path, "best", 30)
    (tmp_path / checkpoint_name("last", 40)).write_bytes(b"no sidecar")
    assert [path.name for path, _ in complete(tmp_path)] == [
        "last-step00000030.ckpt", "best-step00000030.ckpt", "best-step00000010.ckpt"
    ]  # fmt: skip


def test_a_torn_and_a_flipped_one_are_passed_over_with_a_line(tmp_path, caplog):
    good = make(tmp_path, "last", 10)
    torn, flipped = make(tmp_path, "last", 20), make(tmp_path, "best", 30)
    torn.write_bytes(b"weigh")
    flipped.write_bytes(b"weighty")
    assert newest_whole(tmp_path) == good
    said = caplog.messages
    assert ["sha256" in line for line in said] == [True, True] and flipped.name in said[0] and torn.name in said[1]


def test_a_link_has_its_own_life(tmp_path):
    best = make(tmp_path, "best", 7)
    last = tmp_path / checkpoint_name("last", 7)
    link(best, last)
    remove(best)
    assert not best.exists() and not sidecar_path(best).exists()
    assert fault_of(last) is None


def test_leftovers_of_a_killed_process_go_and_complete_ones_stay(tmp_path):
    kept = make(tmp_path, "last", 1)
    (tmp_path / ".last-step00000002.ckpt.x.part").write_bytes(b"half")
    (tmp_path / checkpoint_name("last", 2)).write_bytes(b"no sidecar")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept.name, sidecar_path(kept).name]


def test_a_step_that_is_saved_again_leaves_the_first_one_as_it_is(tmp_path):
    """A run that stopped in the validation of a step saves that step a second time."""
    first = make(tmp_path, "last", 30, b"the first")
    again = new_path(tmp_path, "last", 30)
    again.write_bytes(b"half of")
    assert again.name == "last-step00000030-2.ckpt" and newest_whole(tmp_path) == first
    more = [again, *(again.with_stem(f"{first.stem}-{number}") for number in (5, 3, 4))]
    for path in more:
        path.write_bytes(b"whole")
        write_sidecar(path, Sidecar(30, **vars(checksum_of(path))))
    assert [found for found, _ in complete(tmp_path, "last")] == [*sorted(more, reverse=True), first]


def test_a_sidecar_that_an_older_version_wrote(tmp_path):
    path = tmp_path / checkpoint_name("best", 20)
    held = {"bytes": 3, "sha256": "cd" * 32, "epoch": 1, "batches_done": 10, "batches_per_epoch": 10,
            "phase": "epoch_end", "step": 20, "world_size": 2, "metric": {"val/acc": 0.5}}  # fmt: skip
    sidecar_path(path).write_text(json.dumps(held))
    assert read_sidecar(path) == Sidecar(20, 3, "cd" * 32, 1, {"val/acc": 0.5})


@pytest.mark.parametrize(
    "change",
    [{"step": "x"}, {"step": -1}, {"bytes": []}, {"sha256": None}, {"sha256": "x"}, {"metric": {"a": "b"}}, None],
)
def test_a_sidecar_with_nonsense_in_it_makes_no_checkpoint(tmp_path, change):
    path = make(tmp_path, "last", 1)
    held = json.loads(sidecar_path(path).read_text())
    sidecar_path(path).write_text(json.dumps({**held, **change} if change else held)[: None if change else -2])
    assert "no readable" in fault_of(path) and newest_whole(tmp_path) is None and list(complete(tmp_path)) == []
