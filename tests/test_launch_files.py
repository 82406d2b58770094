"""launch/: what schedulers read has the form that they ask for, and starts train.py with options that exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.config.compose import compose
from lockstep.distributed.cluster import Wanted
from lockstep.distributed.launchers import describe
from lockstep.distributed.secret import stated_secret
from lockstep.runs.errors import UserError

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


def test_cloud_inits_secret_is_filled_in_by_its_own_command_and_is_roots_alone(tmp_path):
    text = (LAUNCH / "cloud-init.yaml").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("#   SECRET=")]
    command = line.removeprefix("#   ").replace("$(openssl rand -hex 32)", "ab" * 32)
    command = command.replace("launch/", f"{LAUNCH}/").replace("user-data.yaml", str(tmp_path / "out.yaml"))
    subprocess.run(["bash", "-c", command], check=True)
    [file] = [file for file in load(tmp_path / "out.yaml")["write_files"] if file["path"] == "/etc/lockstep.secret"]
    assert file["content"] == f"LOCKSTEP_SECRET={'ab' * 32}\n" and file["permissions"] == "0600"
    [own] = [file["content"] for file in load("cloud-init.yaml")["write_files"] if file["path"].endswith(".secret")]
    with pytest.raises(UserError, match="too few for a secret"):  # nobody starts with what stands in the repository
        stated_secret(dict([own.strip().split("=")]))
    [unit] = [f["content"] for f in load("cloud-init.yaml")["write_files"] if f["path"].endswith(".service")]
    assert "EnvironmentFile=/etc/lockstep.secret" in unit


def kubernetes():
    return {part["kind"]: part for part in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())}


JOB = {"completionMode", "completions", "parallelism", "backoffLimit", "podReplacementPolicy", "podFailurePolicy",
       "template"}  # fmt: skip
POD = {"subdomain", "restartPolicy", "automountServiceAccountToken", "terminationGracePeriodSeconds", "containers",
       "volumes"}  # fmt: skip


def test_the_kubernetes_job_has_the_form_of_batch_v1():
    """The required fields and allowed values by hand: Kubernetes' schema is no package."""
    job = kubernetes()["Job"]
    assert job["apiVersion"] == "batch/v1" and job["metadata"]["name"] == "lockstep"
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert spec.keys() == JOB and pod.keys() == POD
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert spec["podReplacementPolicy"] == "Failed" and pod["restartPolicy"] == "Never", (
        "podFailurePolicy asks for both"
    )
    rules = spec["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [2, 3]), ("Ignore", [75]), ("Ignore", None),
    ]  # fmt: skip
    [container] = pod["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules[:2]} == {container["name"]}
    assert pod["terminationGracePeriodSeconds"] > 90
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    cfg = compose("train", container["args"])
    assert cfg.resume == "auto" and cfg.run_id == "lockstep" and cfg.s3.uri
    assert cfg.trainer.num_nodes == spec["completions"]
    assert cfg.trainer.devices == container["resources"]["limits"]["nvidia.com/gpu"]


def test_its_pods_are_the_nodes_of_one_run_and_share_a_secret():
    parts = kubernetes()
    spec = parts["Job"]["spec"]["template"]
    env = {entry["name"]: entry for entry in spec["spec"]["containers"][0]["env"]}
    job, service = parts["Job"]["metadata"]["name"], parts["Service"]["metadata"]["name"]
    assert env["MASTER_ADDR"]["value"] == f"{job}-0.{service}" and spec["spec"]["subdomain"] == service
    assert "job-completion-index" in env["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert env["LOCKSTEP_SECRET"]["valueFrom"] == {"secretKeyRef": {"name": "lockstep", "key": "secret"}}
    labels = spec["metadata"]["labels"]
    assert parts["Service"]["spec"]["selector"] == labels and parts["Service"]["spec"]["clusterIP"] == "None"
    policy = parts["NetworkPolicy"]["spec"]
    assert (
        policy["podSelector"]["matchLabels"] == labels == policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    )
    environ = {name: entry.get("value", "0") for name, entry in env.items()}
    cluster = describe(environ, Wanted(devices=4, num_nodes=2))
    assert (cluster.launcher, cluster.node_rank, cluster.world_size) == ("nodes", 0, 8)


def test_the_batch_script_gives_all_tasks_one_secret(tmp_path):
    """The script itself, with srun played by a script; a secret of the user's own stays."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$LOCKSTEP_SECRET" "$*"\n')
    (tmp_path / "srun").chmod(0o755)

    def said(**environ):
        own = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path), **environ}
        done = subprocess.run(["bash", str(LAUNCH / "train.sbatch")], env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(" ", 1)

    secret, words = said()
    assert re.fullmatch("[0-9a-f]{64}", secret) and secret not in words and said()[0] != secret
    assert said(LOCKSTEP_SECRET="of-the-users-own-making")[0] == "of-the-users-own-making"


@pytest.mark.parametrize("name", ["train.sbatch"])
def test_scripts_are_shell_and_set_the_environment_only(name, tmp_path):
    text = (LAUNCH / name).read_text()
    check_shell(text, tmp_path)
    [line] = [line for line in text.splitlines() if line.startswith("srun ")]
    assert compose("train", options(shlex.split(line))).resume == "auto"
