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

from lockstep.runs.folder import RunFolder
from ranks import SRC, free_port

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
    assert record["restarts"][0]["previous_status"] == "failed", record["restarts"]
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
    assert record["restarts"][0]["previous_status"] == "interrupted" and record["restarts"][0]["resumed_step"] > 0
