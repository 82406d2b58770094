"""Two hosts that share nothing but a cable: each launcher trains, loses a host, and resumes to the
same weights.
"""

import json

import pytest
import torch

from hosts import make_keys, needs_hosts, two_hosts, wait_until
from kills import weights
from lockstep.records.folder import RunFolder
from runs import run_script

pytestmark = needs_hosts

SMALL = ["experiment=quickstart", "trainer=ddp_sim", "trainer.max_epochs=20", "trainer.num_threads=1",
         "trainer.timeout_s=60"]  # fmt: skip
ACROSS = [*SMALL, "trainer.devices=1", "trainer.num_nodes=2"]


@pytest.fixture(scope="module")
def one_host(tmp_path_factory):
    done = run_script("train", *SMALL, logs=tmp_path_factory.mktemp("one-host"))
    assert done.code == 0 and done.record["world_size"] == 2, done.output
    return done


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as hosts:
        yield hosts


def one_command_per_node(hosts, *overrides):
    return [
        host.start([".venv/bin/python", "src/train.py", *ACROSS, *overrides], MASTER_ADDR=hosts[0].address,
                   MASTER_PORT="29500", WORLD_SIZE="2", NODE_RANK=str(rank))
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def torchrun(hosts, *overrides):
    own = [word for word in overrides if not word.startswith("run_id=")]  # --rdzv-id names the run
    return [
        host.start([".venv/bin/python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                    "--rdzv-id=night", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:29400",
                    f"--local-addr={host.address}", f"--rdzv-conf=is_host={1 - rank}", "--monitor-interval=1",
                    "src/train.py", *SMALL, "trainer.devices=1", *own])
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def nodes_py(hosts, *overrides):
    """nodes.py on the first host, over a real sshd on both."""
    keys = hosts[0].home.parent / "keys"
    if not keys.exists():
        make_keys(keys)
        for host in hosts:
            host.serve_ssh(keys)
            host.run(
                "sh",
                "-c",
                f"until ssh-keyscan -p 2222 {host.address} >/dev/null 2>&1; do sleep 0.1; done",
            )
    ssh = (f"ssh -p 2222 -i {keys}/user -o BatchMode=yes -o StrictHostKeyChecking=no "
           "-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR")  # fmt: skip
    return [
        hosts[0].start([".venv/bin/python", "src/nodes.py", *(host.address for host in hosts), "--dir",
                        *(str(host.project) for host in hosts), "--ssh", ssh, "--", *SMALL, "trainer.devices=1",
                        *overrides])
    ]  # fmt: skip


def runs(host):
    return sorted((host.project / "logs/train/runs").glob("*"))


def said(hosts):
    return "\n".join(f"--- {host.name}\n{host.output()}" for host in hosts)


@pytest.mark.slow
@pytest.mark.parametrize("launch", [one_command_per_node, torchrun, nodes_py])
def test_two_hosts_lose_one_and_resume_to_equal_weights(launch, hosts, one_host):
    first, second = hosts
    with pytest.raises(Exception, match="returned non-zero"):
        second.run("cat", str(first.project / "src/train.py"))
    started = launch(hosts)
    wait_until(
        lambda: (
            any(first.project.glob("logs/train/runs/*/checkpoints/last-*.json"))
            or started[0].poll()
        ),
        120,
    )
    assert started[0].poll() is None, said(hosts)
    second.die()
    assert started[0].wait(60) != 0, said(hosts)
    assert first.is_empty_within(5), first.pids()
    [path] = runs(first)
    record = json.loads((path / "run.json").read_text())
    assert record["status"] == "failed" and (record["error"]["rank"], record["error"]["host"]) == (
        1,
        "host1",
    ), record
    assert "rank 1 on host1, in" in first.output(), first.output()
    assert [p.name for p in runs(second)] == [path.name]

    again = launch(hosts, "resume=auto", f"run_id={path.name}")
    assert {process.wait(150) for process in again} == {0}, said(hosts)
    assert all(host.is_empty_within(5) for host in hosts)
    assert runs(first) == [path] and [p.name for p in runs(second)] == [path.name]
    record = json.loads((path / "run.json").read_text())
    assert (
        record["status"] == "finished" and record["num_nodes"] == 2 and len(record["restarts"]) == 1
    )
    assert [host["host"] for host in record["hosts"]] == ["host0", "host1"]
    theirs, ours = weights(one_host.folder), weights(RunFolder(path))
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    for name in ("val/loss", "test/loss", "test/correct"):
        assert record["metrics"][name] == one_host.record["metrics"][name], name
