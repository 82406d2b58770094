"""Who keeps the others waiting, from what each rank says of itself."""

import threading
import time

import pytest

from lockstep.callbacks import beats as module
from lockstep.callbacks.beats import Beat, Beats
from lockstep.callbacks.whereabouts import place


class Store(dict):
    def check(self, keys):
        return all(key in self for key in keys)

    set, get = dict.__setitem__, dict.__getitem__


def beat(batches=7, waits=True, phase="training", at=0.0):
    return Beat(at, "host", phase, batches, "own.py:12 in slow", waits)


def watched(world_size=3):
    return Beats(Store(), 0, world_size)


@pytest.mark.parametrize(
    ("ranks", "culprit"),
    [
        ([beat(), beat(waits=False), beat()], 1),
        ([beat(), beat(waits=False), beat(waits=False)], 1),  # and rank 2, which the sentence names
        ([beat(), beat(), beat(batches=6)], 2),
        ([beat(waits=False), beat(batches=6, waits=False), beat(waits=False)], 1),
        ([beat(), beat(), beat()], None),
        ([beat(waits=False)] * 3, None),  # all compute, as in a compilation
    ],
)
def test_who_computes_while_others_wait_or_is_behind_them_is_named(ranks, culprit):
    found = watched().holds_up(dict(enumerate(ranks)), 30.0)
    assert (found and found["rank"]) == culprit
    if found:
        assert found["message"].startswith("the others have waited for it for 30 s; it is at own.py:12 in slow")
        assert ("(as are ranks 2)" in found["message"]) == (ranks[2].waits is False and culprit == 1 and ranks[0].waits)


def test_a_rank_that_is_known_to_wait_is_not_blamed():
    ranks = {0: beat(waits=False), 1: beat(waits=False)}
    assert Beats(Store(), 0, 2).holds_up(ranks, 30.0, but=0)["rank"] == 1


def test_a_standstill_begins_when_no_rank_moves_and_ends_when_one_does(monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    beats, ranks = watched(2), {0: beat(), 1: beat()}
    assert beats.unmoved_s(ranks) == 0
    now = 130.0
    assert beats.unmoved_s(ranks) == 30
    assert beats.unmoved_s({**ranks, 1: beat(batches=8)}) == 0
    now = 190.0
    assert beats.unmoved_s({0: beat(phase="start"), 1: beat(batches=8)}) == 0  # others wait for it as long as it takes
    assert beats.unmoved_s({0: beat()}) == 0  # the others have not begun


def test_each_reads_what_the_others_show():
    store = Store()
    Beats(store, 1, 2).show("training", 3)
    [(rank, found)] = Beats(store, 0, 2).latest().items()
    assert (rank, found.phase, found.batches) == (1, "training", 3)
    assert abs(found.time - time.time()) < 5


def test_the_innermost_line_that_no_library_holds():
    found = {}

    def look():
        found["here"] = place()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    text, waits = found["here"]
    assert text.startswith("test_beats.py:") and text.endswith("in test_the_innermost_line_that_no_library_holds")
    assert not waits


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        (module.__file__, True),
        (pytest.importorskip("torch").autograd.__file__, True),
        (pytest.importorskip("torch").utils.data.__file__, False),
        (pytest.importorskip("lockstep.data.image_set").__file__, False),
        (__file__, False),
    ],
)
def test_a_line_of_torch_may_wait_for_other_ranks_and_one_that_reads_images_does_not(file, waits):
    code = compile("def inner(place):\n    return place()", file, "exec")
    names = {}
    exec(code, names)
    assert names["inner"](place_seen_from_outside).waits == waits


def place_seen_from_outside():
    """As a thread beside it sees the function that called this one."""
    import sys
    from unittest import mock

    caller = sys._getframe(1)
    with mock.patch("sys._current_frames", lambda: {threading.main_thread().ident: caller}):
        return place()
