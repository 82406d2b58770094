"""launch/train.sbatch on a real SLURM of two nodes: requeue, cancel, a lost node, a killed task."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from kills import differences, weights
from lockstep.records.folder import RunFolder
from runs import run_script
from slurm import cluster, needs_slurm

pytestmark = needs_slurm

SMALL = [
    "experiment=quickstart",
    "trainer=ddp_sim",
    "trainer.num_threads=1",
    "trainer.timeout_s=30",
]
NODES = ["--nodes=2", "--ntasks-per-node=1", "launch/train.sbatch", *SMALL, "trainer.devices=1"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        slurm.install_project()
        yield slurm


def folder(slurm, job):
    return RunFolder(slurm.submit_from / f"logs/train/runs/slurm-{job}")


def record(slurm, job):
    return json.loads(folder(slurm, job).record_path.read_text())


def wait_for_checkpoint(slurm, job):
    slurm.wait_until(lambda: any(folder(slurm, job).checkpoints.glob("last-*.json")), job, 150)


def gone(slurm, job):
    slurm.wait_until(lambda: not slurm.pids(job), job, 40)


def only_run(slurm, job):
    """A requeued job goes on in its folder."""
    runs = [p for p in (slurm.submit_from / "logs/train/runs").iterdir() if job in p.name]
    return runs == [folder(slurm, job).path]


@pytest.mark.slow
def test_usr1_requeues_and_the_weights_are_bit_equal(slurm, tmp_path):
    whole = run_script("train", *SMALL, "trainer.max_epochs=20", logs=tmp_path)
    assert whole.code == 0, whole.output
    job = slurm.sbatch(*NODES, "trainer.max_epochs=20")
    wait_for_checkpoint(slurm, job)
    slurm.run("scancel", "--signal=USR1", job)
    slurm.wait_until(lambda: record(slurm, job)["status"] != "running", job, 60)
    assert record(slurm, job)["exit_code"] == 75, slurm.output(job)
    slurm.wait(job, "COMPLETED", seconds=180)
    found = record(slurm, job)
    assert found["status"] == "finished" and found["num_nodes"] == 2 and found["epochs"] == 20
    assert (
        slurm.facts(job)["Restarts"] == "1" and len(found["restarts"]) == 1 and only_run(slurm, job)
    )
    assert found["restarts"][0]["lost_steps"] == 0 < found["restarts"][0]["resumed_step"]
    assert differences(weights(folder(slurm, job)), weights(whole.folder)) == []
    assert found["metrics"]["test/loss"] == whole.record["metrics"]["test/loss"]
    gone(slurm, job)


@pytest.mark.slow
def test_a_killed_task_fails_the_job_and_is_named(slurm):
    job = slurm.sbatch(*NODES, "trainer.max_epochs=1000")
    wait_for_checkpoint(slurm, job)
    second = [
        p for p in slurm.pids(job) if b"SLURM_PROCID=1\0" in Path(f"/proc/{p}/environ").read_bytes()
    ]
    os.kill(
        max(p for p in second if "train.py" in Path(f"/proc/{p}/cmdline").read_text()),
        signal.SIGKILL,
    )
    slurm.wait(job, "FAILED", seconds=60)
    found = record(slurm, job)
    assert found["status"] == "failed" and found["error"]["rank"] == 1, found["error"]
    gone(slurm, job)


@pytest.mark.slow
def test_a_job_whose_node_goes_down_starts_again(slurm):
    job = slurm.sbatch(*NODES, "trainer.max_epochs=1000")
    wait_for_checkpoint(slurm, job)
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    slurm.wait(job, "PENDING", "CONFIGURING", seconds=60)
    gone(slurm, job)
    slurm.run(
        "scontrol", "update", "nodename=n2", "state=resume", check=False
    )  # SLURM may have found it alive by now
    slurm.wait(job, "RUNNING", seconds=60)
    slurm.wait_until(lambda: len(record(slurm, job)["restarts"]) == 1, job, 150)
    slurm.wait_until(lambda: record(slurm, job)["phase"] == "training", job, 60)
    slurm.run("scancel", job)
    slurm.wait(job, "CANCELLED", seconds=60)
    gone(slurm, job)
    assert record(slurm, job)["status"] == "interrupted", slurm.output(job)
    assert (
        slurm.state(job) == "CANCELLED"
        and slurm.facts(job)["Restarts"] == "1"
        and only_run(slurm, job)
    )


@pytest.mark.slow
def test_each_job_of_a_sweep_is_a_slurm_job(slurm):
    """Two ranks on two nodes each.

    The second learning rate diverges, which its record and the exit code say.
    """
    launcher = ["nodes=2", "tasks_per_node=1", "array_parallelism=1", "timeout_min=5"]
    command = [
        "-m",
        "hydra/launcher=submitit_slurm",
        *(f"hydra.launcher.{word}" for word in launcher),
    ]
    command += [*SMALL, "trainer.devices=1", "trainer.max_epochs=1", "optimizer.lr=0.001,1e30"]
    place = "hydra.sweep.dir=logs/train/multiruns/night"
    done = slurm.call(sys.executable, "src/train.py", *command, place, seconds=240)
    runs = slurm.submit_from / "logs/train/multiruns/night"
    records = {path.parent.name: json.loads(path.read_text()) for path in runs.glob("*/run.json")}
    assert {name: record["status"] for name, record in records.items()} == {
        "night_0": "finished",
        "night_1": "failed",
    }
    assert {(r["launcher"], r["num_nodes"], r["world_size"]) for r in records.values()} == {
        ("slurm", 2, 2)
    }
    assert done.returncode == 1, done.stdout + done.stderr
