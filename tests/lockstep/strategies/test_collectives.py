"""Strategy.broadcast, through which Lightning sends paths, words and flags."""

from pathlib import Path

import pytest

from local_ranks import meet, run_ranks
from lockstep.strategies.collectives import Ranks, broadcast
from lockstep.strategies.ddp import DDP

SENT = ["words", None, True, 3, 0.5, Path("a/b"), ["a", 1], {"a": 1}]


def said(here, method):
    meet(here)
    send = broadcast if method == "function" else {"Ranks": Ranks, "DDP": DDP}[method].broadcast
    own = () if method == "function" else (None,)
    return [send(*own, value if here.rank == 1 else "of another rank", 1) for value in SENT]


@pytest.mark.parametrize("method", ["function", "Ranks", "DDP"])
def test_plain_values_and_paths_arrive_as_they_were(method):
    assert run_ranks(said, 2, method) == [SENT] * 2
