"""launch/: which exit codes start a run again, with which options each engine starts train.py, the
ViT exercise.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from lockstep.config.compose import compose, plain
from lockstep.process.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_UPLOADED,
    EXIT_OK,
    EXIT_USER_ERROR,
)
from object_store import shared_store

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
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
    [line] = [
        line
        for line in (LAUNCH / "train.sbatch").read_text().splitlines()
        if line.startswith("srun ")
    ]
    options = [word for word in shlex.split(line) if re.match(r"[\w.]+=", word) and "$" not in word]
    assert compose("train", options).resume == "auto"


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_tells_each_node_its_rank(tmp_path, rank):
    environ = {"SKYPILOT_TASK_ID": "sky-managed-2026-11-23-10-00-00-000000_lockstep_7-0", "S3_URI": "s3://b/runs",
               "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NUM_NODES": "2",
               "SKYPILOT_NUM_GPUS_PER_NODE": "4"}  # fmt: skip
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(
        '#!/bin/sh\nenv | grep -E "^(RUN_ID|NODE_RANK|MASTER_)"; printf "%s\\n" "$@"\n'
    )
    python.chmod(0o755)
    own = {"PATH": "/usr/bin:/bin", **environ}
    done = subprocess.run(
        ["bash", "-c", SKY["run"]],
        cwd=tmp_path,
        env=own,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    told = dict(line.split("=", 1) for line in lines[: lines.index("src/train.py")])
    cfg = compose("train", lines[lines.index("src/train.py") + 1 :])
    assert (told["NODE_RANK"], told["MASTER_ADDR"]) == (str(rank), "10.0.0.4")
    assert (cfg.trainer.num_nodes, cfg.trainer.devices, cfg.resume, cfg.s3.uri) == (
        2,
        4,
        "auto",
        "s3://b/runs",
    )
    assert told["RUN_ID"] == environ["SKYPILOT_TASK_ID"] and "spot" in cfg.callbacks
    assert SKY["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_INTERRUPTED]


SCRIPT = LAUNCH / "vit_exercise.sh"


@pytest.fixture
def exercise(tmp_path):
    """Run the script with a python that only records its arguments.

    Return its exit code and the commands.
    """
    log, python = tmp_path / "commands", tmp_path / "python"

    def run(*overrides, fails="nothing", **variables):
        log.write_text("")
        python.write_text(
            f'#!/bin/bash\necho "$NODE_RANK" "$@" >>{log}\ncase "$*" in *"{fails}"*) exit 75 ;; esac\n'
        )
        python.chmod(0o755)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(python),
            "S3": "s3://bucket/prefix/",
            **variables,
        }
        code = subprocess.run([SCRIPT, *overrides], env=environment).returncode
        return code, [shlex.split(line) for line in log.read_text().splitlines()]

    return run


def test_one_machine_trains_tests_and_compares_two_engines(exercise):
    code, commands = exercise("data.root=/images")
    scripts = ["src/train.py", "src/train.py", "src/eval.py", "src/eval.py", "src/logbook.py"]
    assert code == 0 and [command[0] for command in commands] == scripts
    where = [
        "ckpt_path=s3://bucket/prefix/assignment-ddp",
        "s3.uri=s3://bucket/prefix",
        "data.root=/images",
    ]
    assert commands[2][1:] == where and commands[4][1:4] == [
        "compare",
        "assignment-ddp",
        "assignment-fsdp",
    ]
    config = plain(compose("train", commands[0][1:]))
    assert config["trainer"]["max_epochs"] == 26 and config["data"]["global_batch_size"] == "max"
    assert (config["data"]["name"], config["model"]["pretrained"], config["logbook"]) == (
        "cifar10",
        True,
        "keep",
    )


def test_an_interrupted_run_stops_the_script_of_several_engines(exercise):
    nodes = {"NODES": "2", "NODE": "1", "MASTER": "host"}
    code, commands = exercise("trainer.max_epochs=5", "data.global_batch_size=64", **nodes)
    assert code == 0 and [command[:2] for command in commands] == [["1", "src/train.py"]] * 2
    config = plain(compose("train", commands[1][2:]))
    assert config["trainer"]["num_nodes"] == 2 and config["run_id"] == "assignment-fsdp"
    assert config["trainer"]["max_epochs"] == 5 and config["data"]["global_batch_size"] == 64
    code, commands = exercise(fails="trainer=fsdp")
    assert code == 75 and len(commands) == 2
    assert exercise(S3="bucket")[0] == 2 and exercise(NODES="2")[0] == 1


def test_each_strategy_may_have_overrides_of_its_own(exercise):
    code, commands = exercise("seed=3", DDP="trainer.max_epochs=40 optimizer.lr=0.1", FSDP="seed=4")
    ddp, fsdp = (plain(compose("train", command[1:])) for command in commands[:2])
    assert code == 0 and commands[4][1] == "compare"
    assert (ddp["trainer"]["max_epochs"], ddp["optimizer"]["lr"], ddp["seed"]) == (40, 0.1, 3)
    assert (fsdp["trainer"]["max_epochs"], fsdp["seed"]) == (26, 4)


@pytest.mark.slow
def test_in_small_on_cpus_and_again(tmp_path):
    server = shared_store()
    overrides = [
        "model=vit_tiny_32", "model.depth=1", "model.embed_dim=24", "data=synthetic", "data.num_images=400",
        "data.num_test_images=60", "data.image_size=32", "data.global_batch_size=16", "trainer.num_threads=1",
        "trainer.max_epochs=1", *(f"paths.{name}_dir={tmp_path / name}" for name in ("log", "data", "logbook")),
    ]  # fmt: skip
    variables = {
        "S3": f"s3://{server.new_bucket()}/runs",
        "ENDPOINT": server.endpoint_url,
        "STRATEGIES": "ddp_sim",
    }
    environment = {**os.environ, **server.environment(), **variables}
    done = subprocess.run([SCRIPT, *overrides], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "log/eval/runs").iterdir())) == 1
    again = subprocess.run([SCRIPT, *overrides], env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "assignment-ddp_sim has finished" in again.stdout, (
        again.stdout + again.stderr
    )
