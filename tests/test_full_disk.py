"""A run whose disk fills up: one sentence, exit code 1, and a record that says so; on a small disk of its own."""

import json

import pytest

from disk_campaign import fill, no_mounts, small_disk
from kills import DDP, TINY
from lockstep.storage.checkpoint_files import newest_whole
from runs import run_door, start_door

pytestmark = pytest.mark.skipif(no_mounts() is not None, reason=str(no_mounts()))
SHARDED = ["trainer=fsdp_sim", "trainer.sharded_checkpoint=true"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "trainer"),
    [
        ("runs", ["trainer=cpu"]),
        ("checkpoints", [*DDP]),
        ("checkpoints", SHARDED),
        ("checkpoints", [*DDP, "callbacks.checkpoints.asynchronous=true"]),
    ],
)
def test_a_disk_that_fills_up_in_training(tmp_path, where, trainer):
    logs = tmp_path / "logs"
    run = logs / "train/runs/r"
    disk = run / "checkpoints" if where == "checkpoints" else run.parent
    with small_disk(disk, 24) as mounted:
        words = [*trainer, *TINY, "trainer.max_epochs=100000", "run_id=r"]
        started = start_door("train", *words, logs=logs)
        started.wait_for(lambda: any(run.glob("checkpoints/*.ckpt.json")))
        fill(mounted)
        done = started.done(90)
        errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
        assert done.code == 1, done.output
        assert len(errors) == 1 and errors[0].startswith(f"error: no room on {disk}"), done.output
        assert "Traceback" not in done.output, done.output
        record = json.loads((run / "run.json").read_text())
        assert (record["status"], record["exit_code"]) == ("failed", 1)
        assert record["error"]["message"] == errors[0].removeprefix("error: ")
        assert newest_whole(run / "checkpoints") is not None


def test_a_disk_that_is_full_before_the_run_begins(tmp_path):
    with small_disk(tmp_path / "logs/train/runs", 1) as mounted:
        fill(mounted)
        done = run_door("train", "trainer=cpu", *TINY, "run_id=r", logs=tmp_path / "logs")
    assert done.code == 1 and "Traceback" not in done.output, done.output
    assert done.output.strip().splitlines()[-1].startswith(f"error: no room on {mounted}"), done.output
