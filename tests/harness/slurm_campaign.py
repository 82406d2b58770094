"""A job under SLURM that is queued again and again, and loses the host of its rank 0."""

import contextlib
import json
import time

import psutil

from campaign import Clock, Row, Task, piece, spread
from kills import differences, final_state
from lockstep.runs.folder import RunFolder
from runs import run_door
from slurm import Slurm, cluster, missing

WORDS = ["experiment=quickstart", "trainer=ddp_sim", "trainer.num_threads=1", "trainer.timeout_s=30",
         "trainer.max_epochs=400", "optimizer.lr=1e-4", "test=false"]  # fmt: skip
NEXT_START_S = 120.0


def lose_node(slurm: Slurm, job: str, node: str) -> None:
    """The node falls silent: all that the job runs there is gone, and its daemon says nothing of it."""
    daemon = psutil.Process(slurm.daemons[{"n1": 2, "n2": 3}[node]].pid)
    daemon.suspend()
    there = []
    for process in map(psutil.Process, slurm.pids(job)):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURMD_NODENAME") == node:
                there += [process, *(parent for parent in process.parents() if parent.name() == "slurmstepd")]
    for process in sorted(there, key=lambda p: p.name() != "slurmstepd"):  # it would tell the controller
        with contextlib.suppress(psutil.Error):
            process.kill()
    slurm.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
    slurm.wait(job, "PENDING", "CONFIGURING", seconds=60)
    slurm.wait_until(lambda: not slurm.pids(job), job, 60)
    daemon.resume()
    slurm.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)


def queue_again(slurm: Slurm, job: str, node: str) -> None:
    slurm.run("scontrol", "requeue", job)
    slurm.wait_until(lambda: slurm.state(job) in ("PENDING", "CONFIGURING", "RUNNING"), job, 60)


@piece("slurm-requeue", 3, missing)
def slurm_requeue(task: Task) -> list[Row]:
    """`count` times each: queued again in training, and rank 0's host lost; one run must come of it, bit-equal."""
    clock, wrong, took, lost = Clock(), [], [], []
    whole = run_door("train", *WORDS, logs=task.folder / "whole")
    per_epoch = whole.record["steps"] // whole.record["epochs"]
    with cluster(task.folder / "slurm") as slurm:
        slurm.install_project()
        folder = RunFolder(slurm.submit_from / "logs/train/runs/again")
        slurm.environment["RUN_ID"] = "again"
        job = slurm.sbatch("--nodes=2", "--ntasks-per-node=1", "launch/train.sbatch", *WORDS, "trainer.devices=1",
                           "logbook=keep")  # fmt: skip

        def record() -> dict:
            return json.loads(folder.record.read_text())

        faults = [fault for _ in range(task.count) for fault in (queue_again, lose_node)]
        for number, fault in enumerate(faults):
            slurm.wait(job, "RUNNING", seconds=NEXT_START_S)
            slurm.wait_until(lambda n=number: folder.record.exists() and len(record()["restarts"]) == n, job, 150)
            before = record()["steps"]
            slurm.wait_until(lambda b=before: record()["steps"] > b + 2 * per_epoch, job, 150)
            time.sleep(task.chance.uniform(0, 1.0))
            fault(slurm, job, "n1")
            task.say(f"{fault.__name__} at step {record()['steps']}")
        slurm.wait(job, "COMPLETED", seconds=300)
        end = record()
        for restart in end["restarts"]:
            took.append(round(restart["downtime_s"], 1))
            lost.append(restart["lost_steps"])
        if len(end["restarts"]) != len(faults) or end["status"] != "finished":
            wrong.append(f"{end['status']} after {len(end['restarts'])} restarts of {len(faults)}")
        wrong += [f"{seconds} s until it went on" for seconds in took if seconds > NEXT_START_S]
        wrong += [f"{steps} steps lost, {per_epoch} lie between two saves" for steps in lost if steps > per_epoch]
        wrong += [f"{place} differs" for place in differences(final_state(folder), final_state(whole.folder))[:3]]
        rows = [path.name for path in (slurm.submit_from / "logbook/runs").glob("*.json")]
        if rows != ["again.json"]:
            wrong.append(f"rows in the logbook: {rows}")
    seen = (
        f"each time the same run went on, {spread(took)} s after its last sign of life (SLURM's own pause of two "
        f"minutes cut short), {min(lost)} to {max(lost)} steps lost of the {per_epoch} between two saves; one row in "
        "the logbook; final weights equal to the last bit"
    )
    done = "scontrol requeue, and the host of rank 0 lost, in turns"
    return [Row("slurm-requeue", done, len(faults), seen, clock.seconds, wrong)]
