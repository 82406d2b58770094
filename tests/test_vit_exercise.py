"""launch/vit_exercise.sh: its commands in order, what stops it, and the whole of it in small."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from lockstep.config.compose import compose, plain
from object_store import shared_store

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "launch" / "vit_exercise.sh"
RECORDER = """#!/bin/bash
echo "$NODE_RANK" "$@" >>{log}
case "$*" in *"{fails}"*) exit 75 ;; esac
"""


@pytest.fixture
def exercise(tmp_path):
    """Run the script with a python that only records its arguments; return its exit code and the commands."""
    log = tmp_path / "commands"

    def run(*overrides, fails="nothing", **variables):
        log.write_text("")
        python = tmp_path / "python"
        python.write_text(RECORDER.format(log=log, fails=fails))
        python.chmod(0o755)
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "S3": "s3://bucket/prefix/", **variables}
        code = subprocess.run([SCRIPT, *overrides], env=environment).returncode
        return code, [shlex.split(line) for line in log.read_text().splitlines()]

    return run


def test_one_machine_trains_both_tests_both_from_the_bucket_and_compares(exercise):
    code, commands = exercise("data.root=/images")
    assert code == 0
    scripts = ["src/train.py", "src/train.py", "src/eval.py", "src/eval.py", "src/logbook.py"]
    assert [command[0] for command in commands] == scripts
    assert commands[2][1:] == [
        "ckpt_path=s3://bucket/prefix/assignment-ddp", "s3.uri=s3://bucket/prefix", "data.root=/images",
    ]  # fmt: skip
    assert commands[4][1:4] == ["compare", "assignment-ddp", "assignment-fsdp"]
    config = plain(compose("train", commands[0][1:]))
    assert config["trainer"]["max_epochs"] == 26 and config["data"]["global_batch_size"] == "max"
    assert (config["data"]["name"], config["model"]["pretrained"], config["logbook"]) == ("cifar10", True, "keep")


def test_node_one_only_trains_and_its_overrides_win(exercise):
    nodes = {"NODES": "2", "NODE": "1", "MASTER": "host"}
    code, commands = exercise("trainer.max_epochs=5", "data.global_batch_size=64", **nodes)
    assert code == 0 and [command[:2] for command in commands] == [["1", "src/train.py"]] * 2
    config = plain(compose("train", commands[1][2:]))
    assert config["trainer"]["num_nodes"] == 2 and config["run_id"] == "assignment-fsdp"
    assert config["trainer"]["max_epochs"] == 5 and config["data"]["global_batch_size"] == 64


def test_an_interrupted_run_stops_the_script_with_its_exit_code(exercise):
    code, commands = exercise(fails="trainer=fsdp")
    assert code == 75 and len(commands) == 2
    assert exercise(S3="bucket")[0] == 2 and exercise(NODES="2")[0] == 1


@pytest.mark.slow
def test_in_small_on_cpus_and_again(tmp_path):
    server = shared_store()
    overrides = [
        "model=vit_tiny_32", "model.depth=1", "model.embed_dim=24", "data=synthetic", "data.num_images=400",
        "data.num_test_images=60", "data.image_size=32", "data.global_batch_size=16", "trainer.num_threads=1",
        "trainer.max_epochs=1", *(f"paths.{name}_dir={tmp_path / name}" for name in ("log", "data", "logbook")),
    ]  # fmt: skip
    variables = {"S3": f"s3://{server.new_bucket()}/runs", "ENDPOINT": server.endpoint_url, "STRATEGIES": "ddp_sim"}
    environment = {**os.environ, **server.environment(), **variables}
    done = subprocess.run([SCRIPT, *overrides], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "log/eval/runs").iterdir())) == 1
    again = subprocess.run([SCRIPT, *overrides], env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "assignment-ddp_sim has finished" in again.stdout, again.stdout + again.stderr
