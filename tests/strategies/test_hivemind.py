"""Peers of a swarm find each other, take in a late one, survive a killed one, and learn
together.
"""

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.data.batches import TrainBatches
from lockstep.process.errors import UserError
from strategies import hivemind
from strategies.hivemind import Hivemind, choose_peer_device, clip_before_step, initialise_state

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 14  # of five steps of the swarm
missing = importlib.util.find_spec("hivemind") is None


def test_without_the_package_it_names_the_file_to_install(monkeypatch):
    monkeypatch.setattr(hivemind.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="requirements-hivemind.txt, or choose trainer=ddp_sim"):
        Hivemind()


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
    ],
)
def test_an_optimizers_state_appears_without_a_step(build):
    weights = [torch.nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)]
    kept, fresh = build(weights), build([torch.nn.Parameter(w.detach().clone()) for w in weights])
    initialise_state(kept)
    assert all(torch.equal(w, torch.tensor([1.0, -2.0])) and w.grad is None for w in weights)
    assert kept.param_groups[0]["lr"] == 0.1
    for optimizer in (kept, fresh):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(2)
        optimizer.step()
    for a, b in zip(weights, fresh.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("largest_norm", [0.5, 100.0])
def test_what_the_swarm_steps_on_is_clipped(largest_norm):
    """A hook that returned the norm let no step happen at all."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    clip_before_step(optimizer, largest_norm)
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    expected = torch.tensor([-3.0, -4.0]) * min(1.0, largest_norm / 5.0)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "has_gpu", "expected"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda:0"),
        ("cpu", True, "cpu"),
        ("gpu", True, "cuda:0"),
    ],
)
def test_a_peer_computes_where_the_trainers_accelerator_says(name, has_gpu, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert choose_peer_device(name) == torch.device(expected)


def test_each_peer_has_an_order_of_its_own(monkeypatch):
    monkeypatch.setattr(hivemind.importlib.util, "find_spec", lambda name: object())
    orders = []
    for _ in range(2):
        loader = TrainBatches(
            lambda selections: (each.positions.tolist() for each in selections), np.arange(64),
            lambda seed, epoch, count: (np.zeros((1, count), np.int64), None), global_batch_size=32,
        )  # fmt: skip
        orders.append(sum(Hivemind("cpu").process_dataloader(loader), []))
    assert orders[0] != orders[1] and sorted(orders[0]) == list(range(64))


class Peer:
    """A process of tests/harness/swarm_peer.py, its output in a file."""

    def __init__(self, folder, name, address=()):
        self.log = folder / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
        command = [
            sys.executable,
            str(ROOT / "tests/harness/swarm_peer.py"),
            str(EPOCHS),
            str(folder),
            *address,
        ]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def wait_for(self, pattern):
        deadline = time.monotonic() + 120
        while not (match := re.search(pattern, self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)
        return match

    def result(self):
        assert self.process.wait(300) == 0, self.log.read_text()
        return json.loads(
            [line for line in self.log.read_text().splitlines() if line.startswith("{")][-1]
        )


def test_the_dht_ends_in_silence_when_an_averager_has_ended():
    class DHT:
        def run(self):
            raise EOFError

    hivemind.make_quiet_dht(SimpleNamespace(DHT=DHT))().run()


@pytest.mark.parametrize(
    ("message", "error", "is_told"),
    [
        ("[Errno 2] No such file or directory", FileNotFoundError(2, "No such file"), False),
        ("Task was destroyed but it is pending!", None, False),
        ("a peer sent nonsense", ValueError("nonsense"), True),
        ("Task exception was never retrieved", None, True),
    ],
)
def test_what_hivemind_logs_at_its_end_is_not_told(message, error, is_told):
    exc_info = (type(error), error, None) if error else None
    record = logging.LogRecord("asyncio", logging.ERROR, "", 1, message, None, exc_info)
    assert hivemind.is_worth_telling(record) is is_told


@pytest.mark.skipif(
    missing, reason="hivemind is not installed: pip install -r requirements-hivemind.txt"
)
def test_two_peers_a_late_third_and_a_killed_one(tmp_path):
    first = Peer(tmp_path, "first")
    address = [first.wait_for(r"initial_peers=\[([^\],]+)")[1]]
    second = Peer(tmp_path, "second", address)
    peers = [first, second]
    try:
        first.wait_for("2 peers")
        peers.append(Peer(tmp_path, "third", address))
        first.wait_for("3 peers")
        second.process.kill()
        results = [peer.result() for peer in (first, peers[2])]
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.wait()
    for result in results:
        assert result["accuracy"] >= 0.97
        assert result["swarm"]["steps"] == EPOCHS * (1293 // 256)
    assert results[0]["weights"] == pytest.approx(results[1]["weights"], rel=0.02)


@pytest.mark.skipif(missing, reason="needs hivemind")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"automatic_optimization": False}, "makes the steps itself, and SimpleNamespace calls"),
        ({"gradient_clip_algorithm": "value"}, "clips the norm of the gradient"),
    ],
)
def test_options_that_a_swarm_would_ignore_are_refused(options, said):
    module = SimpleNamespace(automatic_optimization=options.get("automatic_optimization", True))
    trainer = SimpleNamespace(
        precision="32-true",
        lightning_module=module,
        gradient_clip_algorithm=options.get("gradient_clip_algorithm"),
    )
    with pytest.raises(UserError, match=said):
        Hivemind().setup(trainer)


@pytest.mark.skipif(missing, reason="needs hivemind")
def test_a_schedule_of_epochs_is_refused_in_a_swarm():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    peer = Hivemind()
    peer.optimizers = [optimizer]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    peer.lr_scheduler_configs = [SimpleNamespace(interval="epoch", scheduler=schedule)]
    data = SimpleNamespace(per_device_batch_size=4)
    peer.trainer = SimpleNamespace(
        datamodule=data, estimated_stepping_batches=9, gradient_clip_val=None
    )
    with pytest.raises(UserError, match="ExponentialLR counts epochs: give scheduler=cosine"):
        peer._join()
