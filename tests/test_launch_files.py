"""launch/: what schedulers read has the form that they ask for, and starts train.py with options that exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from lockstep.config.compose import compose

LAUNCH = Path(__file__).resolve().parents[1] / "launch"


def load(name):
    return yaml.safe_load((LAUNCH / name).read_text())


def check_shell(script, tmp_path):
    path = tmp_path / "script.sh"
    path.write_text(script)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def options(words):
    """The `key=value` words of a command line, without those that a shell variable fills."""
    return [word for word in words if re.match(r"[\w.]+=", word) and "$" not in word]


CLOUD_CONFIG = {"packages": list, "users": list, "write_files": list, "runcmd": list}
FILE = {"path": str, "content": str, "permissions": str}


def test_cloud_init_has_the_form_of_a_cloud_config(tmp_path):
    """Keys and types as in cloud-init's schema for the modules that it uses."""
    assert (LAUNCH / "cloud-init.yaml").read_text().startswith("#cloud-config\n")
    config = load("cloud-init.yaml")
    assert {key: type(value) for key, value in config.items()} == CLOUD_CONFIG
    for file in config["write_files"]:
        assert {"path", "content"} <= file.keys() <= FILE.keys()
        assert all(isinstance(file[key], FILE[key]) for key in file) and file["path"].startswith("/")
        assert re.fullmatch("0[0-7]{3}", file.get("permissions", "0644"))
    assert all(isinstance(word, str) for command in config["runcmd"] for word in command)
    assert len((LAUNCH / "cloud-init.yaml").read_bytes()) < 16_384, "EC2 takes no more user data"


@pytest.mark.parametrize("notice", [False, True])
def test_cloud_inits_node_reads_its_tags_and_starts_train(tmp_path, notice):
    """The script itself, with curl and the trainer played by scripts; after a spot notice it starts nothing."""
    [script] = [f["content"] for f in load("cloud-init.yaml")["write_files"] if f["path"].endswith("lockstep-node")]
    check_shell(script, tmp_path)
    (tmp_path / "opt/.venv/bin").mkdir(parents=True)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "curl").write_text(
        '#!/bin/bash\nfor word; do url=$word; done\ncase "$url" in\n*/api/token) echo secret;;\n'
        '*) [[ "$*" == *"X-aws-ec2-metadata-token: secret"* ]] || exit 22\n'
        f"case $url in *instance-action) exit {0 if notice else 22};; *-run) echo night;;\n"
        "*-master) echo 10.0.0.1;; *-rank) echo 1;; *-nodes) echo 2;;\n"
        '*-options) echo "trainer=ddp data=cifar10";; *) exit 22;; esac;;\nesac\n'
    )
    (tmp_path / "opt/.venv/bin/python").write_text(
        '#!/bin/bash\necho "$RUN_ID $MASTER_ADDR $MASTER_PORT $NODE_RANK" "$@"\n'
    )
    for path in (tools / "curl", tmp_path / "opt/.venv/bin/python"):
        path.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script.replace("/opt/lockstep", str(tmp_path / "opt"))],
        env={"PATH": f"{tools}:/usr/bin:/bin", "MASTER_PORT": "29500"}, capture_output=True, text=True,
    )  # fmt: skip
    if notice:
        assert (done.returncode, done.stdout) == (0, "")
        return
    assert done.stdout.split() == [
        "night", "10.0.0.1", "29500", "1", "src/train.py", "callbacks=[default,spot]", "trainer.num_nodes=2",
        "resume=auto", "trainer=ddp", "data=cifar10",
    ], done.stderr  # fmt: skip
    cfg = compose("train", done.stdout.split()[5:])
    assert cfg.trainer.num_nodes == 2 and "spot" in cfg.callbacks


def test_cloud_inits_service_starts_again_and_leaves_time_for_a_checkpoint():
    [unit] = [f["content"] for f in load("cloud-init.yaml")["write_files"] if f["path"].endswith(".service")]
    lines = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    assert lines["Restart"] == "on-failure" and lines["StartLimitIntervalSec"] == "0"
    assert int(lines["TimeoutStopSec"]) > 90 and lines["ExecStart"] == "/usr/local/bin/lockstep-node"


def test_cloud_init_installs_the_commit_that_was_named_and_no_other(tmp_path):
    [script] = [f["content"] for f in load("cloud-init.yaml")["write_files"] if f["path"].endswith("lockstep-install")]
    check_shell(script, tmp_path)
    origin, place = tmp_path / "origin", tmp_path / "opt"
    place.mkdir()

    def git(*words):
        own = ["git", "-C", str(origin), "-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run([*own, *words], check=True, capture_output=True, text=True).stdout.strip()

    origin.mkdir()
    git("init", "-q")
    git("config", "uploadpack.allowReachableSHA1InWant", "true")
    for content in ("named", "later"):
        (origin / "Makefile").write_text(f"install:\n\t@echo {content}\n")
        git("add", "."), git("commit", "-q", "-m", content)
    named = git("rev-parse", "HEAD~1")

    def installed(commit):
        (tmp_path / "env").write_text(f"REPOSITORY={origin}\nCOMMIT={commit}\n")
        own = script.replace("/opt/lockstep", str(place)).replace("/etc/lockstep.env", str(tmp_path / "env"))
        return subprocess.run(["bash", "-c", own], capture_output=True, text=True)

    for wrong in ("main", named[:12], "the whole hash of the commit that is to run"):
        assert installed(f"'{wrong}'").returncode == 1
    done = installed(named)
    said = done.stdout.splitlines()  # make names its folder too, where another make runs the tests
    assert done.returncode == 0 and "named" in said and "later" not in said, done.stderr
    assert git("-C", str(place), "rev-parse", "HEAD") == named


def test_service_and_image_run_as_nobody_of_note():
    config = load("cloud-init.yaml")
    assert "lockstep" in [user["name"] for user in config["users"] if isinstance(user, dict)]
    [unit] = [f["content"] for f in config["write_files"] if f["path"].endswith(".service")]
    assert "\nUser=lockstep\n" in unit and "NoNewPrivileges=yes" in unit
    image = (LAUNCH / "Dockerfile").read_text()
    assert image.index("\nUSER lockstep\n") < image.index("COPY --chown=lockstep") < image.index("make install")
    assert "ARG BASE\n" in image and "@sha256:*)" in image, "a base without a digest is refused"
    assert ".git" in (LAUNCH.parent / ".dockerignore").read_text().split()


REPLICA = {"replicas", "restartPolicy", "template"}


def test_pytorchjob_has_the_form_that_the_operator_reads():
    """The required fields and allowed values of kubeflow.org/v1 PyTorchJob, by hand: its schema is no package."""
    job = load("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob") and job["metadata"]["name"]
    spec = job["spec"]
    assert spec.keys() <= {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
    assert isinstance(spec["nprocPerNode"], str)
    assert spec["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert spec["pytorchReplicaSpecs"].keys() == {"Worker"}, "an elastic job has no Master"
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert worker.keys() == REPLICA and worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    elastic = spec["elasticPolicy"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == worker["replicas"], "a run has a fixed number of ranks"
    [container] = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == spec["nprocPerNode"]
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    cfg = compose("train", container["args"])
    assert cfg.resume == "auto" and cfg.run_id == "lockstep" and cfg.s3.uri


@pytest.mark.parametrize("name", ["train.sbatch"])
def test_scripts_are_shell_and_set_the_environment_only(name, tmp_path):
    text = (LAUNCH / name).read_text()
    check_shell(text, tmp_path)
    [line] = [line for line in text.splitlines() if line.startswith("srun ")]
    assert compose("train", options(shlex.split(line))).resume == "auto"
