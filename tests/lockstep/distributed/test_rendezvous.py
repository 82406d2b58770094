"""Nodes meeting, each in a thread of this process."""

import json
import socket
import threading
import time
from dataclasses import asdict, replace

import pytest

from lockstep.distributed import rendezvous
from lockstep.distributed.cluster import Cluster
from lockstep.distributed.rendezvous import agree
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import Fingerprint
from ranks import free_port

SAME = Fingerprint("t", "c", {"torch": "2"})


def ask(place, timeout_s, say, run_id=None, **other):
    return agree(place, replace(SAME, **other), run_id, timeout_s, say, f"host{place.node_rank}")


def hello(**other):
    """A well-formed one, as JSON's values."""
    own = {"run_id": None, "host": "host1", "node_rank": 1, "num_nodes": 3, "time": time.time()}
    return {**asdict(SAME), **own, **other}


def say_hello(port, values):
    """A node that says these values; its connection."""
    connection = socket.create_connection(("127.0.0.1", port))
    mine, body = b"0" * 32, values if isinstance(values, bytes) else json.dumps(values).encode()
    connection.sendall(b"%s - %s\n" % (mine, body))
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
