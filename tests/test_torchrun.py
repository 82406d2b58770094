"""A real torchrun: ranks that it gives no run id agree on one, and its restarts go on in the same
run.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from kills import final_state
from lockstep.checkpoints.files import complete_checkpoints
from lockstep.records.folder import RunFolder
from ranks import SRC, free_port
from runs import run_script

SMALL = [
    "experiment=quickstart",
    "trainer=ddp_sim",
    "trainer.num_threads=1",
    "trainer.timeout_s=30",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Agents:
    """Several torchruns of one run on this machine, each as if it were a node."""

    def __init__(self, tmp_path) -> None:
        self.folder, self.port, self.started, self.command = tmp_path, free_port(), [], []
        self.runs = tmp_path / "log/train/runs"

    def start(self, options=(), words=()) -> subprocess.Popen:
        """Start another torchrun, with the options and words of the first."""
        paths = [f"paths.{name}_dir={self.folder / name}" for name in ("log", "data", "logbook")]
        options = [word.format(port=self.port) for word in options]
        self.command = self.command or [
            *TORCHRUN,
            *options,
            str(SRC / "train.py"),
            *SMALL,
            *words,
            *paths,
        ]
        own = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
        }  # else torch 2.14's new agent waits for what nobody sends
        environment = {
            k: v
            for k, v in {**os.environ, **own}.items()
            if k not in ("RUN_ID", "TORCHELASTIC_RUN_ID")
        }
        with (self.folder / f"output{len(self.started)}.txt").open("wb") as file:
            self.started.append(
                subprocess.Popen(self.command, stdout=file, stderr=file, env=environment)
            )
        return self.started[-1]

    @property
    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("output*.txt")))

    def wait_until(self, condition, seconds=150):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.started[0].poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def is_served(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def record(self, run_id):
        path = RunFolder(self.runs / run_id).record_path
        return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture
def agents(tmp_path):
    own = Agents(tmp_path)
    yield own
    for process in own.started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_torchrun_restart_goes_on_in_one_run(agents):
    own = agents
    agent = own.start(
        ["--nproc-per-node=2", "--max-restarts=1", "--master-port={port}"],
        ["trainer.max_epochs=25"],
    )
    own.wait_until(lambda: any(own.runs.glob("*/checkpoints/last-*.json")))
    [rank_one] = [
        rank for rank in psutil.Process(agent.pid).children() if rank.environ()["RANK"] == "1"
    ]
    rank_one.kill()
    assert agent.wait(180) == 0, own.output
    [path] = own.runs.iterdir()
    record = own.record(path.name)
    assert (
        record["status"] == "finished"
        and record["epochs"] == 25
        and record["launcher"] == "torchrun"
    )
    assert len(record["restarts"]) == 1 and record["restarts"][0]["resumed_step"] > 0
    assert record["restarts"][0]["downtime_s"] is not None and "rank 1 on" in own.output, record[
        "restarts"
    ]


@pytest.mark.slow
def test_a_stopped_run_ends_torchrun_without_a_restart(agents):
    """Any rank with another exit code than 0 would be started again."""
    options = ["--nproc-per-node=2", "--max-restarts=3", "--master-port={port}"]
    agent = agents.start(options, ["trainer.max_epochs=1000"])
    agents.wait_until(lambda: any(agents.runs.glob("*/checkpoints/last-*.json")))
    ranks = {rank.environ()["RANK"]: rank for rank in psutil.Process(agent.pid).children()}
    ranks["1"].send_signal(signal.SIGUSR1)
    assert agent.wait(120) == 0, agents.output
    [path] = agents.runs.iterdir()
    record = agents.record(path.name)
    assert (record["status"], record["restarts"]) == ("interrupted", []), agents.output
    [saved, *_] = complete_checkpoints(RunFolder(path).checkpoints, "last")
    assert saved[1].step == record["steps"]


ELASTIC = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=elastic", "--rdzv-backend=c10d", "--max-restarts=9",
           "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1"]  # fmt: skip


@pytest.mark.slow
def test_nodes_are_drained_and_come_and_the_batch_stays(agents, tmp_path):
    """--nnodes=1:2: Kubernetes moves a pod, one goes on alone, another comes.

    The weights are those of one process.
    """
    exact = ["trainer.precision=64-true", "model.dropout=0", "model.head_dropout=0", "test=false",
             "trainer.max_epochs=30", "callbacks.checkpoints.every_minutes=0",
             "trainer.log_every_n_steps=5"]  # fmt: skip
    own = agents

    def trains_on(ranks: int) -> bool:
        """With so many ranks, and a checkpoint since they began."""
        record = own.record("elastic")
        began = record["restarts"][-1]["resumed_step"] if record.get("restarts") else 0
        saved = [
            int(path.name[9:17]) for path in own.runs.glob("elastic/checkpoints/last-step*.json")
        ]
        return record.get("world_size") == ranks and max(saved, default=0) > began

    own.start(ELASTIC, [*exact, "trainer.devices=1", "resume=auto"])
    own.wait_until(own.is_served)  # the first holds the store at which they meet
    own.start()
    own.wait_until(lambda: trains_on(2))
    own.started[1].terminate()
    assert own.started[1].wait(60) != 0
    own.wait_until(lambda: trains_on(1))
    own.start()
    assert [own.started[0].wait(120), own.started[2].wait(60)] == [0, 0], own.output
    record = own.record("elastic")
    assert (
        record["status"] == "finished"
        and record["steps"] == 600
        and record["accumulate_grad_batches"] == 1
    )
    changes = [
        (each["previous_world_size"], each["world_size"])
        for each in record["restarts"]
        if each["resumed_step"]
    ]
    assert changes[-2:] == [(2, 1), (1, 2)], record["restarts"]
    assert all(each["downtime_s"] is not None for each in record["restarts"])
    whole = run_script(
        "train", "experiment=quickstart", *exact, "trainer.num_threads=1", logs=tmp_path / "whole"
    )
    assert whole.code == 0, whole.output
    ours, theirs = (
        final_state(folder)["state_dict"]
        for folder in (RunFolder(own.runs / "elastic"), whole.folder)
    )
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-9
