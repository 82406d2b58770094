"""The exit code of a run that was stopped."""

from dataclasses import replace
from functools import partial

import pytest

from faults import signal_at_step
from lockstep.ranks.find import Cluster
from lockstep.records.folder import RunFolder
from lockstep.records.record import RunRecord, write_record
from lockstep.runs.finishing import decide_exit_code
from runs import run_script

ONE = Cluster("slurm", 2, 1, 0, 0, "127.0.0.1", None)
OTHER_NODE = replace(ONE, node_rank=1)
NO_CHECKPOINTS = {"task_name": "train", "callbacks": {"checkpoints": None}}


def stopped_run(path, steps):
    folder = RunFolder(path)
    path.mkdir()
    write_record(folder.record_path, RunRecord(run_id="r", status="interrupted", steps=steps))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["cpu", "ddp_sim"])
def test_a_stop_without_checkpoints_fails_and_says_why(trainer, tmp_path):
    words = ["experiment=quickstart", f"trainer={trainer}", "trainer.num_threads=1", "run_id=r"]
    stop = partial(signal_at_step, 2)
    done = run_script("train", *words, "~callbacks.checkpoints", logs=tmp_path, before=stop)
    assert done.code == 1, done.output
    assert done.record["status"] == "interrupted" and done.record["steps"] >= 2
    assert "continues it" not in done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("error: ") and "without '~callbacks.checkpoints'" in last


@pytest.mark.parametrize("callbacks", [{"checkpoints": None}, {}, None])
@pytest.mark.parametrize("cluster", [ONE, OTHER_NODE])
def test_every_node_fails_where_steps_are_lost(callbacks, cluster, tmp_path):
    """Of the codes of a job's tasks srun returns the highest."""
    config = {"task_name": "train", "callbacks": callbacks}
    assert decide_exit_code(config, cluster, stopped_run(tmp_path / "r", steps=2), 75) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"task_name": "train", "callbacks": {"checkpoints": {"_target_": "Checkpoints"}}},
        {"task_name": "eval", "callbacks": None},
    ],
)
def test_a_stop_that_loses_no_steps_can_start_again(config, tmp_path):
    assert decide_exit_code(config, ONE, stopped_run(tmp_path / "r", steps=2), 75) == 75


def test_a_stop_before_the_first_step_can_start_again(tmp_path):
    folder = stopped_run(tmp_path / "r", steps=None)
    assert decide_exit_code(NO_CHECKPOINTS, ONE, folder, 75) == 75
    assert decide_exit_code(NO_CHECKPOINTS, ONE, RunFolder(tmp_path / "none"), 75) == 75
    assert decide_exit_code(NO_CHECKPOINTS, ONE, None, 75) == 75


def test_a_node_without_the_record_goes_by_the_config(tmp_path):
    assert decide_exit_code(NO_CHECKPOINTS, OTHER_NODE, RunFolder(tmp_path / "none"), 75) == 1


def test_torchrun_starts_no_stopped_run_again(tmp_path):
    cluster = replace(ONE, launcher="torchrun")
    assert decide_exit_code(NO_CHECKPOINTS, cluster, stopped_run(tmp_path / "r", steps=2), 75) == 0
