"""launch/: which exit codes start a run again, and with which options each engine starts train.py."""

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from lockstep.config.compose import compose
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOT_UPLOADED, EXIT_OK, EXIT_USER_ERROR

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
RAY = runpy.run_path(str(LAUNCH / "ray_train.py"))
SKY = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
CODES = [EXIT_OK, EXIT_USER_ERROR, EXIT_NOT_UPLOADED, EXIT_INTERRUPTED, EXIT_FAILED]


@pytest.mark.parametrize("code", [*CODES, 130])
def test_the_batch_script_requeues_its_job_on_75_alone(tmp_path, code):
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/queued\nexit 1\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(LAUNCH / "train.sbatch")], cwd=tmp_path, env=environ)
    assert done.returncode == code and (tmp_path / "queued").exists() == (code == EXIT_INTERRUPTED)


def test_the_batch_script_resumes():
    [line] = [line for line in (LAUNCH / "train.sbatch").read_text().splitlines() if line.startswith("srun ")]
    options = [word for word in shlex.split(line) if re.match(r"[\w.]+=", word) and "$" not in word]
    assert compose("train", options).resume == "auto"


def test_skypilot_recovers_on_75_alone():
    assert SKY["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_INTERRUPTED]


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_tells_each_node_its_rank(tmp_path, rank):
    environ = {"SKYPILOT_TASK_ID": "sky-managed-2026-11-23-10-00-00-000000_lockstep_7-0", "S3_URI": "s3://b/runs",
               "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NUM_NODES": "2",
               "SKYPILOT_NUM_GPUS_PER_NODE": "4"}  # fmt: skip
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/sh\nenv | grep -E "^(RUN_ID|NODE_RANK|MASTER_)"; printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    own = {"PATH": "/usr/bin:/bin", **environ}
    done = subprocess.run(["bash", "-c", SKY["run"]], cwd=tmp_path, env=own, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    told = dict(line.split("=", 1) for line in lines[: lines.index("src/train.py")])
    cfg = compose("train", lines[lines.index("src/train.py") + 1 :])
    assert (told["NODE_RANK"], told["MASTER_ADDR"]) == (str(rank), "10.0.0.4")
    assert (cfg.trainer.num_nodes, cfg.trainer.devices, cfg.resume, cfg.s3.uri) == (2, 4, "auto", "s3://b/runs")
    assert told["RUN_ID"] == environ["SKYPILOT_TASK_ID"] and "spot" in cfg.callbacks


def test_rays_driver_restarts_on_75_and_on_a_lost_node_alone():
    goes_on, exit_code, lost = RAY["goes_on"], RAY["exit_code"], RAY["LOST"]
    assert goes_on([lost, EXIT_FAILED]), "the others fail where a node is lost"
    assert goes_on([EXIT_INTERRUPTED, EXIT_INTERRUPTED])
    assert not goes_on([0, 0]) and not goes_on([EXIT_INTERRUPTED, EXIT_USER_ERROR])
    assert [exit_code(codes) for codes in ([0, 0], [0, 75], [75, 2], [1, 3], [lost, 75])] == [0, 75, 2, 1, 75]
