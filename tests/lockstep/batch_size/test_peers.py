"""What a rank of the batch search makes of another one's end, over a store as the ranks share it."""

import pytest
import torch.distributed as dist

from lockstep.batch_size import peers
from lockstep.batch_size.peers import Peers
from lockstep.batch_size.sessions import EXIT_OUT_OF_MEMORY, EXIT_PEER_ENDED, EXIT_PEER_FAILED

CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4242")


class GoneStore:
    def check(self, keys):
        raise dist.DistNetworkError("failed to recv")

    compare_set = check


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(peers, "INTERVAL_S", 0.0)
    store = dist.HashStore()
    return Peers(store, 0), Peers(store, 1)


@pytest.mark.parametrize(
    ("announced", "mine"), [(EXIT_OUT_OF_MEMORY, EXIT_PEER_ENDED), (1, EXIT_PEER_FAILED), (2, EXIT_PEER_FAILED)]
)
def test_what_a_peer_said_decides(two, announced, mine):
    first, second = two
    assert first.code_of_peer() is None and first.code_of_peer(ValueError("my own")) is None
    second.announce(announced)
    assert first.code_of_peer() == first.code_of_peer(CLOSED) == first.code_of_peer(ValueError("a consequence")) == mine


def test_the_first_word_stays(two):
    first, second = two
    second.announce(1)
    first.announce(EXIT_OUT_OF_MEMORY)
    assert first.code_of_peer() == second.code_of_peer() == EXIT_PEER_FAILED


def test_a_peer_without_a_word_may_have_been_killed_for_memory(two):
    assert two[0].code_of_peer(CLOSED) == EXIT_PEER_ENDED
    assert Peers(GoneStore(), 1).code_of_peer(ValueError("any")) == EXIT_PEER_ENDED
    Peers(GoneStore(), 1).announce(1)


def test_alone_nobody_else_is_to_blame():
    alone = Peers(None, 0)
    alone.announce(1)
    assert alone.code_of_peer(CLOSED) is None
