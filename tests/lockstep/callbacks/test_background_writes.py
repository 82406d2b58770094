"""What is written beside the training: in order, looked after by who began it, its error raised there once."""

import threading

import pytest
import torch

from lockstep.callbacks.background_writes import BackgroundWrites
from lockstep.callbacks.checkpoint_io import on_host
from lockstep.runs.full_disk import NoRoom


def test_writes_follow_each_other_and_end_in_the_callers_thread():
    writes, done, go = BackgroundWrites(), [], threading.Event()
    writes.begin(8, lambda: (go.wait(5), done.append("best")), lambda: done.append(threading.current_thread()))
    writes.begin(8, lambda: done.append("last"), lambda: done.append("then"))
    writes.look()
    writes.wait(but_of_step=8)
    assert done == [] and writes.are_open
    go.set()
    writes.wait()
    assert [one for one in done if isinstance(one, str)] == ["best", "last", "then"] and not writes.are_open
    assert threading.main_thread() in done


def test_a_full_disk_is_raised_once_and_nothing_is_written_after_it():
    writes, done = BackgroundWrites(), []

    def full():
        raise NoRoom("no room on /x")

    writes.begin(8, full, lambda: done.append("then"))
    writes.begin(8, lambda: done.append("next"), lambda: done.append("then"))
    with pytest.raises(NoRoom, match="no room on /x"):
        writes.wait()
    writes.wait()
    assert done == []


def test_the_copy_is_not_what_training_goes_on_changing():
    weights = torch.arange(4.0)
    state = {"w": weights, "tied": weights[1:], "plain": [1, {"a": 2}]}
    copied = on_host(state, always=True)
    weights.zero_()
    state["plain"][1]["a"] = 3
    assert copied["w"].tolist() == [0, 1, 2, 3] and copied["plain"] == [1, {"a": 2}]
    assert copied["tied"].untyped_storage().data_ptr() == copied["w"].untyped_storage().data_ptr()
