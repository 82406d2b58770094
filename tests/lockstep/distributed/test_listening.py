"""Where a run's own sockets listen."""

import socket

import pytest

from lockstep.distributed import listening
from lockstep.distributed.cluster import Cluster
from lockstep.distributed.listening import listen, own_address


def node(address, num_nodes=2, port=0):
    return Cluster("nodes", num_nodes, 1, 0, None, address, port)


@pytest.fixture
def resolves(monkeypatch):
    def to(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(listening.socket, "getaddrinfo", lambda *_, **__: found)

    return to


def test_an_address_of_this_machine_is_the_only_one():
    with listen(node("127.0.0.1")) as server:
        assert server.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.getsockname()[1]), timeout=2)


def test_an_address_that_is_translated_leaves_all_interfaces():
    assert own_address(node("203.0.113.7")) is None
    with listen(node("203.0.113.7")) as server:
        assert server.getsockname()[0] == "0.0.0.0"


def test_a_name_stands_for_its_one_address(resolves):
    resolves("127.0.0.3")
    assert own_address(node("a", num_nodes=1)) == "127.0.0.3"
    assert own_address(node("a")) is None, "Debian's own name of a machine: no other node reaches it there"
    resolves("127.0.0.3", "127.0.0.4")
    assert own_address(node("a", num_nodes=1)) is None


def test_a_name_that_nobody_knows_leaves_all_interfaces(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(listening.socket, "getaddrinfo", unknown)
    assert own_address(node("nowhere")) is None
