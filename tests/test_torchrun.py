"""A real torchrun: ranks that it gives no run id agree on one, and its restarts go on in the same run."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kills import final_state
from lockstep.runs.folder import RunFolder
from ranks import SRC, free_port
from runs import run_door

SMALL = ["experiment=quickstart", "trainer=ddp_sim", "trainer.max_epochs=25", "trainer.num_threads=1",
         "trainer.timeout_s=30"]  # fmt: skip


def ranks_of(agent: int) -> dict[int, int]:
    """{rank: pid} of an agent's children."""
    found = {}
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(word[5:]): int(pid) for word in words if word.startswith(b"RANK=")}
    return found


def wait_until(condition, process, output, seconds=150):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_no_run_id_is_one_run_and_a_restart_goes_on_in_it(tmp_path):
    paths = [f"paths.{name}_dir={tmp_path / name}" for name in ("log", "data", "logbook")]
    output = tmp_path / "output.txt"
    environment = {k: v for k, v in os.environ.items() if k not in ("RUN_ID", "TORCHELASTIC_RUN_ID")}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1",
             f"--master-port={free_port()}", str(SRC / "train.py"), *SMALL, *paths],
            stdout=file, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    try:
        runs = tmp_path / "log/train/runs"
        wait_until(lambda: any(runs.glob("*/checkpoints/last-*.json")), process, output)
        first = ranks_of(process.pid)
        os.kill(first[1], signal.SIGKILL)
        assert process.wait(180) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    [path] = runs.iterdir()
    record = json.loads(RunFolder(path).record.read_text())
    assert record["status"] == "finished" and record["epochs"] == 25 and record["launcher"] == "torchrun"
    assert len(record["restarts"]) == 1 and record["restarts"][0]["resumed_step"] > 0
    assert record["restarts"][0]["downtime_s"] is not None, record["restarts"]
    assert "rank 1 on" in output.read_text()


@pytest.mark.slow
def test_a_node_that_is_drained_is_waited_for(tmp_path):
    """Kubernetes moves a pod: its torchrun gets SIGTERM; the other one starts its ranks again, beside a new pod's."""
    paths = [f"paths.{name}_dir={tmp_path / name}" for name in ("log", "data", "logbook")]
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torch 2.14's new agent waits for what nobody sends
    port, outputs, agents = free_port(), [], []

    def start() -> None:
        outputs.append(tmp_path / f"output{len(outputs)}.txt")
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                   "--rdzv-id=drained", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
                   "--max-restarts=3", str(SRC / "train.py"), *SMALL, *paths, "trainer.devices=1",
                   "trainer.max_epochs=40", "run_id=drained", "resume=auto"]  # fmt: skip
        with outputs[-1].open("wb") as file:
            agents.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **own}))

    try:
        start()
        wait_until(lambda: listens(port), agents[0], outputs[0])  # it holds the store at which they meet
        start()
        run = tmp_path / "log/train/runs/drained"
        wait_until(lambda: any(run.glob("checkpoints/last-*.json")), agents[0], outputs[0])
        agents[1].terminate()
        assert agents[1].wait(60) != 0
        start()
        assert [agents[0].wait(180), agents[2].wait(60)] == [0, 0], "\n".join(path.read_text() for path in outputs)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    record = json.loads(RunFolder(run).record.read_text())
    assert record["status"] == "finished" and record["epochs"] == 40 and record["num_nodes"] == 2
    assert record["restarts"][0]["downtime_s"] is not None and record["restarts"][0]["resumed_step"] > 0


@pytest.mark.slow
def test_nodes_come_and_go_and_the_batch_stays(tmp_path):
    """--nnodes=1:2: a node is lost, one goes on alone, another comes; the weights are those of one process."""
    exact = ["trainer.precision=64-true", "model.dropout=0", "model.head_dropout=0", "test=false",
             "trainer.max_epochs=15", "callbacks.checkpoints.every_minutes=0",
             "trainer.log_every_n_steps=5"]  # fmt: skip
    paths = [f"paths.{name}_dir={tmp_path / name}" for name in ("log", "data", "logbook")]
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run, port, outputs, agents = tmp_path / "log/train/runs/elastic", free_port(), [], []

    def start() -> None:
        outputs.append(tmp_path / f"output{len(outputs)}.txt")
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1",
                   "--rdzv-id=elastic", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
                   "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1", "--max-restarts=9",
                   str(SRC / "train.py"), *SMALL, *exact, *paths, "trainer.devices=1", "run_id=elastic",
                   "resume=auto"]  # fmt: skip
        with outputs[-1].open("wb") as file:
            agents.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **own}))

    def trains_on(ranks: int) -> bool:
        """With so many ranks, and a checkpoint since they began."""
        record = json.loads((run / "run.json").read_text()) if (run / "run.json").exists() else {}
        began = record["restarts"][-1]["resumed_step"] if record.get("restarts") else 0
        saved = [int(path.name[9:17]) for path in run.glob("checkpoints/last-step*.json")]
        return record.get("world_size") == ranks and max(saved, default=0) > began

    try:
        start()
        wait_until(lambda: listens(port), agents[0], outputs[0])  # it holds the store at which they meet
        start()
        wait_until(lambda: trains_on(2), agents[0], outputs[0])
        [worker] = ranks_of(agents[1].pid).values()
        agents[1].kill()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: trains_on(1), agents[0], outputs[0])
        start()
        assert [agents[0].wait(120), agents[2].wait(60)] == [0, 0], "\n".join(path.read_text() for path in outputs)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    record = json.loads(RunFolder(run).record.read_text())
    assert record["status"] == "finished" and record["steps"] == 300 and record["accumulate_grad_batches"] == 1
    changes = [(each["previous_world_size"], each["world_size"]) for each in record["restarts"] if each["resumed_step"]]
    assert changes[-2:] == [(2, 1), (1, 2)], record["restarts"]
    whole = run_door("train", "experiment=quickstart", *exact, "trainer.num_threads=1", logs=tmp_path / "whole")
    assert whole.code == 0, whole.output
    ours, theirs = (final_state(folder)["state_dict"] for folder in (RunFolder(run), whole.folder))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-9
