"""Nodes meeting, each in a thread of this process."""

import contextlib
import json
import socket
import threading
import time
from dataclasses import asdict, replace

import pytest

from lockstep.distributed import rendezvous
from lockstep.distributed.cluster import Cluster
from lockstep.distributed.rendezvous import agree
from lockstep.distributed.secret import Secret
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import Fingerprint
from ranks import free_port

SAME = Fingerprint("t", "c", {"torch": "2"})


SECRET = Secret("a secret of all nodes")
OTHER = Secret("a secret of another run")


def ask(place, timeout_s, say, run_id=None, secret=SECRET, **other):
    return agree(place, replace(SAME, **other), run_id, timeout_s, say, f"host{place.node_rank}", secret)


def hello(**other):
    """A well-formed one, as JSON's values."""
    own = {"run_id": None, "host": "host1", "node_rank": 1, "num_nodes": 3, "time": time.time()}
    return {**asdict(SAME), **own, **other}


def say_hello(port, values, secret=SECRET):
    """A node that says these values and the right proof; its connection."""
    connection = socket.create_connection(("127.0.0.1", port))
    nonce = connection.makefile("rb").readline().split()[0]
    mine, body = b"0" * 32, values if isinstance(values, bytes) else json.dumps(values).encode()
    proof = secret.tag(b"hello", nonce, mine, body) if secret else b"-"
    connection.sendall(b"%s %s %s\n" % (mine, proof, body))
    return connection


class Nodes:
    """Starts nodes in threads and keeps what each was told."""

    def __init__(self, num_nodes, timeout_s=5.0):
        self.num_nodes, self.timeout_s, self.port = num_nodes, timeout_s, free_port()
        self.answers, self.said, self.threads = {}, [], []

    def start(self, rank, port=None, num_nodes=None, name=None, **other):
        place = Cluster("nodes", num_nodes or self.num_nodes, 1, rank, None, "127.0.0.1", port or self.port)

        def run():
            try:
                self.answers[name or rank] = ask(place, self.timeout_s, self.said.append, **other)
            except UserError as error:
                self.answers[name or rank] = str(error)

        thread = threading.Thread(target=run)
        self.threads.append(thread)
        thread.start()
        return self

    def end(self):
        for thread in self.threads:
            thread.join(30)
        return self.answers


def test_all_get_node_zeros_run_id_in_whatever_order_they_come():
    nodes = Nodes(3).start(2).start(1)
    time.sleep(0.3)
    answers = nodes.start(0, run_id="r").end()
    assert [answers[rank].run_id for rank in range(3)] == ["r", "r", "r"]
    assert [node.host for node in answers[1].nodes] == ["host0", "host1", "host2"]


def test_the_port_is_free_again_for_the_ranks():
    nodes = Nodes(2).start(0, run_id="r").start(1)
    nodes.end()
    with socket.create_server(("", nodes.port)):
        pass


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"tree_hash": "x"}, "node 1 (host1) runs with other code"),
        ({"config_hash": "x"}, "node 1 (host1) runs with other options"),
        ({"versions": {"torch": "3"}}, "node 1 (host1) has torch 3, node 0 (host0) has 2: run make install"),
        ({"run_id": "other"}, "was given run_id=other, node 0 r"),
        ({"num_nodes": 3}, "waits for 2 nodes"),
    ],
)
def test_what_differs_is_named_on_every_node(other, said):
    answers = Nodes(2).start(0, run_id="r").start(1, **other).end()
    assert said in answers[0] and answers[0] == answers[1]


def test_two_nodes_of_one_rank():
    answers = Nodes(3).start(0).start(1, name="first").start(1, name="second").end()
    assert all("two nodes say NODE_RANK=1" in answer for answer in answers.values())


def test_a_node_that_never_comes_is_named_while_one_waits_and_at_the_end(monkeypatch):
    monkeypatch.setattr(rendezvous, "SPEAK_INTERVAL_S", 0.5)
    began = time.monotonic()
    nodes = Nodes(3, timeout_s=2.0).start(0).start(1)
    answers = nodes.end()
    assert time.monotonic() - began < 5
    assert answers[0] == answers[1] and answers[0].startswith("node rank 2 did not arrive at 127.0.0.1:")
    assert "within 2 s" in answers[0]
    assert any(line.startswith("Waiting for node rank 2 of 3") for line in nodes.said)


def test_a_wrong_port_is_named_on_both_sides(monkeypatch):
    monkeypatch.setattr(rendezvous, "SPEAK_INTERVAL_S", 0.5)
    wrong = free_port()
    nodes = Nodes(2, timeout_s=2.0).start(0).start(1, port=wrong)
    answers = nodes.end()
    assert "node rank 1 did not arrive" in answers[0]
    assert f"node 0 did not answer at 127.0.0.1:{wrong}" in answers[1] and "MASTER_PORT" in answers[1]
    assert any("waits for node 0" in line for line in nodes.said)


NO_NODES = [
    b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b'{"error": "ha"}\n', b"[1]\n", b"\xff\n", b"x" * 200_000,
    b"%s - {}\n" % (b"0" * 32), b"%s %s {}\n" % (b"0" * 32, b"0" * 64), b"%s - %s\n" % (b"0" * 32, b"[" * 60_000),
    b"%s refused {}\n" % (b"0" * 32), b"%s - {}" % (b"0" * 32),
]  # fmt: skip


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "none"])
def test_strangers_at_the_port_do_no_harm_and_hold_nobody_up(secret):
    nodes = Nodes(2, timeout_s=20.0).start(0, run_id="r", secret=secret)
    time.sleep(0.3)
    silent = [socket.create_connection(("127.0.0.1", nodes.port)) for _ in range(20)]
    for words in NO_NODES:
        stranger = socket.create_connection(("127.0.0.1", nodes.port))
        with contextlib.suppress(OSError):
            stranger.sendall(words)
        silent.append(stranger)
    began = time.monotonic()
    answers = nodes.start(1, secret=secret).end()
    for stranger in silent:
        stranger.close()
    assert answers[1].run_id == "r" and time.monotonic() - began < 3, answers
    assert sum("Refused 127.0.0.1" in line for line in nodes.said) <= 1


def test_more_silent_strangers_than_it_keeps_hold_nobody_up(monkeypatch):
    monkeypatch.setattr(rendezvous, "MOST_CALLERS", 5)
    nodes = Nodes(2, timeout_s=20.0).start(0, run_id="r")
    time.sleep(0.3)
    silent = [socket.create_connection(("127.0.0.1", nodes.port), timeout=0.3) for _ in range(50)]
    assert sum(was_closed(stranger) for stranger in silent) == 45
    assert nodes.start(1).end()[1].run_id == "r"
    for stranger in silent:
        stranger.close()


def was_closed(connection):
    """After node 0's greeting."""
    try:
        return connection.makefile("rb").read() is not None
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


ODD_VALUES = [
    {"time": "now"}, {"time": None}, {"time": [1]}, {"node_rank": "1"}, {"node_rank": [1]}, {"node_rank": 1.0},
    {"node_rank": True}, {"versions": [1]}, {"versions": {"torch": 2}}, {"host": None}, {"run_id": {}},
    {"num_nodes": None}, {"tree_hash": 7},
]  # fmt: skip


def test_hellos_of_another_form_are_strangers():
    """Between nodes without a secret anybody can send one."""
    nodes = Nodes(2, timeout_s=20.0).start(0, run_id="r", secret=None)
    time.sleep(0.3)
    whole = hello(num_nodes=2)
    odd = [whole | values for values in ODD_VALUES] + [{k: v for k, v in whole.items() if k != name} for name in whole]
    strangers = [say_hello(nodes.port, values, None) for values in [*odd, b"[" * 60_000, b"[]", b"1", b"\xff"]]
    answers = nodes.start(1, secret=None).end()
    for stranger in strangers:
        stranger.close()
    assert answers[0].run_id == "r" and answers[0].nodes[1].tree_hash == "t", answers


@pytest.mark.parametrize(("node_zero", "node_one"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
def test_another_secret_is_named_on_both_nodes(node_zero, node_one):
    nodes = Nodes(2, timeout_s=2.0).start(0, secret=node_zero).start(1, secret=node_one)
    answers = nodes.end()
    assert "its LOCKSTEP_SECRET is another than this node's" in answers[1]
    assert answers[0].startswith("node rank 1 did not arrive") and "the same LOCKSTEP_SECRET" in answers[0]
    assert sum("Refused 127.0.0.1: it has not this node's LOCKSTEP_SECRET" in line for line in nodes.said) == 1


def test_a_proof_holds_for_one_connection_only():
    """What one node said, said again by somebody who heard it."""
    nodes = Nodes(3, timeout_s=2.0).start(0, run_id="r")
    time.sleep(0.3)
    heard = b"%s %s %s\n" % (b"0" * 32, SECRET.tag(b"hello", b"1" * 32, b"0" * 32, b"{}"), b"{}")
    with socket.create_connection(("127.0.0.1", nodes.port)) as stranger:
        stranger.makefile("rb").readline()
        stranger.sendall(heard)
        assert b" refused " in stranger.makefile("rb").readline()
    assert "node rank 1, 2 did not arrive" in nodes.end()[0]


@pytest.mark.parametrize("words", [b"", b"\n", NO_NODES[6], NO_NODES[7]], ids=["silent", "empty", "long", "unproved"])
def test_somebody_else_at_node_zeros_port_is_not_believed(words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        nodes = Nodes(2, timeout_s=1.0).start(1, port=server.getsockname()[1])
        connection, _ = server.accept()
        with contextlib.suppress(OSError):
            connection.sendall(b"%s - {}\n" % (b"1" * 32) + words)
        connection.close()
        assert "node 0 did not answer" in nodes.end()[1]


def test_a_node_that_was_stopped_while_it_waited_may_come_again():
    nodes = Nodes(3, timeout_s=20.0).start(0, run_id="r")
    time.sleep(0.3)
    gone = say_hello(nodes.port, hello())
    time.sleep(0.5)
    gone.shutdown(socket.SHUT_RDWR)
    gone.close()
    time.sleep(1.0)
    answers = nodes.start(1).start(2).end()
    assert answers[2].run_id == "r", answers
    assert any("Node 1 (host1) went away" in line for line in nodes.said)


def test_a_clock_that_is_off_is_said():
    nodes = Nodes(2).start(0, run_id="r")
    time.sleep(0.3)
    late = say_hello(nodes.port, hello(num_nodes=2, time=time.time() - 900))
    nodes.end()
    late.close()
    assert any("clock of node 1 (host1) is 900 s off" in line for line in nodes.said)


def test_the_name_of_a_host_goes_to_the_screen_without_what_moves_the_cursor():
    nodes = Nodes(2).start(0, run_id="r")
    time.sleep(0.3)
    node = say_hello(nodes.port, hello(num_nodes=2, host="\x1b[2Ja\nb"))
    assert nodes.end()[0].nodes[1].host == "??2Ja?b"
    node.close()


def test_a_port_in_use_on_node_zero():
    with socket.create_server(("", 0)) as taken:
        answers = Nodes(2).start(0, port=taken.getsockname()[1]).end()
    assert "cannot be used on node 0" in answers[0]
