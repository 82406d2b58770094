"""launch/ray_train.py on a real Ray cluster of two nodes on this machine: a stop, a lost node, a refused option."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = ["experiment=quickstart", "trainer=ddp_sim", "trainer.devices=1", "trainer.num_threads=1",
         "trainer.timeout_s=30", "trainer.max_epochs=60", "test=false",
         "callbacks.checkpoints.every_minutes=0.05"]  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray's raylet beside ours"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Two nodes of one CPU each; gone afterwards with everything that ran on them."""
    pytest.importorskip("ray", reason="Ray is not installed (requirements-ray.txt)")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.other = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        [process.kill() for process in trainers(tmp_path)]


class Driver:
    """launch/ray_train.py in a process of its own."""

    def __init__(self, cluster, logs, *words, nodes=2):
        self.logs, self.output = logs, logs / "output.txt"
        paths = [f"paths.log_dir={logs}", f"paths.data_dir={logs / 'data'}", f"paths.logbook_dir={logs / 'logbook'}"]
        command = [sys.executable, "launch/ray_train.py", "--nodes", str(nodes), "--", *SMALL, *paths, *words]
        environ = {**os.environ, "RAY_ADDRESS": cluster.address, "RUN_ID": "night", "MASTER_PORT": "29731"}
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def record(self):
        return json.loads((self.logs / "train/runs/night/run.json").read_text())

    def wait_for(self, condition, timeout_s=150):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()[-4000:]
            time.sleep(0.1)

    def has_checkpoint(self, beside=()):
        kept = {*self.logs.glob("train/runs/night/checkpoints/last-*.json")}
        return bool(kept - {*beside}) and self.record["status"] == "running"

    def ends_with(self, code):
        assert self.process.wait(250) == code, self.output.read_text()[-4000:]
        return [line.split("exit codes ")[1] for line in self.output.read_text().splitlines() if "exit codes" in line]


def trainers(logs):
    """The processes of src/train.py that write below `logs`."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "src/train.py" in words and f"paths.log_dir={logs}" in words:
            found.append(process)
    return found


def test_a_stopped_node_and_a_lost_node_start_the_run_again_until_it_has_finished(cluster, tmp_path):
    driver = Driver(cluster, tmp_path)
    driver.wait_for(driver.has_checkpoint)
    trainers(tmp_path)[0].send_signal(signal.SIGTERM)  # what a spot notice leads to
    driver.wait_for(lambda: "exit codes [75, 75]" in driver.output.read_text())
    before = {*tmp_path.glob("train/runs/night/checkpoints/last-*.json")}
    driver.wait_for(lambda: driver.has_checkpoint(before))
    cluster.remove_node(cluster.other, allow_graceful=False)
    driver.wait_for(lambda: "-1" in driver.output.read_text())
    cluster.add_node(num_cpus=1)
    codes = driver.ends_with(0)
    assert codes[0] == "[75, 75]" and "-1" in codes[1] and codes[-1] == "[0, 0]" and len(codes) == 3
    record = driver.record
    assert (record["status"], record["epochs"], record["num_nodes"], record["launcher"]) == ("finished", 60, 2, "nodes")
    assert record["restarts"][0]["downtime_s"] is not None, record["restarts"]
    assert len(record["restarts"]) == 2 and record["restarts"][0]["lost_steps"] == 0
    assert trainers(tmp_path) == []


def test_refused_input_starts_once_and_a_stopped_driver_saves(cluster, tmp_path):
    assert Driver(cluster, tmp_path, "data.global_batch_size=63").ends_with(2) == ["[2, 2]"]
    waiting = Driver(cluster, tmp_path, nodes=3)
    waiting.wait_for(lambda: "Connected to Ray" in waiting.output.read_text())
    time.sleep(2)
    waiting.process.send_signal(signal.SIGTERM)
    assert waiting.ends_with(75) == ["[75]"], "no three nodes ever come"
    driver = Driver(cluster, tmp_path)
    driver.wait_for(driver.has_checkpoint)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.ends_with(75) == ["[75, 75]"] and driver.record["status"] == "interrupted"
