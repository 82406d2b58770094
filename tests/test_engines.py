"""launch/ for Ray, Kubernetes, SkyPilot and AWS: the form that each asks for, and its rules played by exit codes."""

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

from lockstep.config.compose import compose
from lockstep.distributed.cluster import Wanted
from lockstep.distributed.launchers import describe, outside_run_id
from lockstep.runs.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_UPLOADED,
    EXIT_OK,
    EXIT_USER_ERROR,
)

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
RAY = runpy.run_path(str(LAUNCH / "ray_train.py"))
BATCH = json.loads((LAUNCH / "batch.json").read_text())
SKY = yaml.safe_load((LAUNCH / "sky.yaml").read_text())


def parts(name):
    return {part["kind"]: part for part in yaml.safe_load_all((LAUNCH / name).read_text())}


def trainjob_node():
    """The Job that Kubeflow Trainer's JobSet makes of the runtime."""
    [node] = parts("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]


# The engines' rules. Each: what one node's exit code leads to, and how often at most.

ENDLESS = 1000


def kubernetes_starts(job, codes):
    """Starts of a pod of a Job by its podFailurePolicy and backoffLimit, as its documentation has them."""
    counted, starts = 0, 0
    for code in codes:
        starts += 1
        matching = [rule["action"] for rule in job["podFailurePolicy"]["rules"]
                    if code in rule.get("onExitCodes", {}).get("values", [])]  # fmt: skip
        action = next(iter(matching), "Count")
        counted += action == "Count"
        if code == EXIT_OK or action == "FailJob" or counted > job["backoffLimit"]:
            break
    return starts


def batch_starts(codes):
    """Attempts of a Batch job: the first rule whose pattern fits, else once more, up to `attempts`."""
    retry, starts = BATCH["retryStrategy"], 0
    for code in codes[: retry["attempts"]]:
        starts += 1
        fitting = [rule["action"] for rule in retry["evaluateOnExit"] if fits(rule.get("onExitCode"), code)]
        if code == EXIT_OK or next(iter(fitting), "RETRY") == "EXIT":
            break
    return starts


def fits(pattern, code):
    return pattern is not None and (
        str(code).startswith(pattern[:-1]) if pattern.endswith("*") else pattern == str(code)
    )


def sky_starts(codes):
    """As SkyPilot's StrategyExecutor.should_restart_on_failure counts."""
    rules, starts, errors = SKY["resources"]["job_recovery"], 0, 0
    for code in codes:
        starts += 1
        if code == EXIT_OK:
            break
        if code not in rules["recover_on_exit_codes"]:
            errors += 1
            if errors > rules["max_restarts_on_errors"]:
                break
    return starts


def ray_starts(codes):
    """Of two nodes; the other one is asked along, and ends with 75 or fails too."""
    starts = 0
    for code in codes:
        starts += 1
        if not RAY["goes_on"]([code, EXIT_INTERRUPTED if code == EXIT_INTERRUPTED else EXIT_FAILED]):
            break
    return starts


ENGINES = {
    "Ray": ray_starts,
    "Kubernetes": lambda codes: kubernetes_starts(parts("kubernetes.yaml")["Job"]["spec"], codes),
    "Kubeflow": lambda codes: kubernetes_starts(trainjob_node(), codes),
    "SkyPilot": sky_starts,
    "Batch": batch_starts,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_75_starts_again_and_2_and_3_and_0_do_not(engine):
    starts = ENGINES[engine]
    assert starts([EXIT_INTERRUPTED] * ENDLESS) == (10 if engine == "Batch" else ENDLESS)
    for last in (EXIT_OK, EXIT_USER_ERROR, EXIT_NOT_UPLOADED):
        assert starts([EXIT_INTERRUPTED, EXIT_INTERRUPTED, last, EXIT_OK]) == 3
    assert starts([EXIT_FAILED] * 100) <= 11, "a run that fails each time comes to an end"


@pytest.mark.parametrize("code", [EXIT_OK, EXIT_USER_ERROR, EXIT_NOT_UPLOADED, EXIT_INTERRUPTED, EXIT_FAILED, 130])
def test_the_batch_script_queues_its_job_again_on_75_alone(tmp_path, code):
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/queued\nexit 1\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "LOCKSTEP_SECRET": "a secret of sixteen"}
    done = subprocess.run(["bash", str(LAUNCH / "train.sbatch")], cwd=tmp_path, env=environ)
    assert done.returncode == code and (tmp_path / "queued").exists() == (code == EXIT_INTERRUPTED)


def test_rays_driver_ends_with_what_the_run_says():
    goes_on, exit_code, lost = RAY["goes_on"], RAY["exit_code"], RAY["LOST"]
    assert goes_on([lost, EXIT_FAILED]), "the others fail where a node is lost"
    assert not goes_on([0, 0]) and not goes_on([EXIT_INTERRUPTED, EXIT_USER_ERROR])
    assert [exit_code(codes) for codes in ([0, 0], [0, 75], [75, 2], [1, 3], [lost, 75])] == [0, 75, 2, 1, 75]
    assert (RAY["FINISHED"], RAY["INTERRUPTED"]) == (EXIT_OK, EXIT_INTERRUPTED)


# What each starts


def started_by(script, environ, tmp_path):
    """(environment that a launcher reads, options) with which a node's shell script starts train.py."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/sh\nenv | grep -E "^(RUN_ID|NODE_RANK|MASTER_)"; printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    script = script.replace("/opt/lockstep", str(tmp_path))
    own = {"PATH": "/usr/bin:/bin", **environ}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=own, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    at = lines.index("src/train.py")
    return dict(line.split("=", 1) for line in lines[:at]), lines[at + 1 :]


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilots_nodes_are_those_of_one_run(tmp_path, rank):
    environ = {"SKYPILOT_TASK_ID": "sky-managed-2026-11-23-10-00-00-000000_lockstep_7-0", "S3_URI": "s3://b/runs",
               "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NUM_NODES": "2",
               "SKYPILOT_NUM_GPUS_PER_NODE": "4"}  # fmt: skip
    told, options = started_by(SKY["run"], environ, tmp_path)
    cluster, cfg = describe(told, Wanted(devices=4, num_nodes=2)), compose("train", options)
    assert (cluster.launcher, cluster.node_rank, cluster.master_addr) == ("nodes", rank, "10.0.0.4")
    assert (cfg.trainer.num_nodes, cfg.trainer.devices, cfg.resume, cfg.s3.uri) == (2, 4, "auto", "s3://b/runs")
    assert outside_run_id(told) == environ["SKYPILOT_TASK_ID"] and "spot" in cfg.callbacks


@pytest.mark.parametrize("rank", [0, 1])
def test_batchs_nodes_are_those_of_one_run(tmp_path, rank):
    """The main node is told no address of its own."""
    [nodes] = BATCH["nodeProperties"]["nodeRangeProperties"]
    container = nodes["container"]
    environ = {"AWS_BATCH_JOB_ID": f"ab-12#{rank}", "AWS_BATCH_JOB_NODE_INDEX": str(rank),
               "AWS_BATCH_JOB_NUM_NODES": str(BATCH["nodeProperties"]["numNodes"])}  # fmt: skip
    environ |= {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.4"} if rank else {}
    assert container["command"][:2] == ["bash", "-c"]
    told, options = started_by(container["command"][2], environ, tmp_path)
    cluster, cfg = describe(told, Wanted(devices=4, num_nodes=2)), compose("train", options)
    assert (cluster.launcher, cluster.node_rank) == ("nodes", rank) and outside_run_id(told) == "ab-12"
    assert cluster.master_addr == "10.0.0.4" if rank else re.match(r"[0-9a-f]+[.:]", cluster.master_addr)
    told, _ = started_by(container["command"][2], {**environ, "RUN_ID": "night"}, tmp_path / "again")
    assert outside_run_id(told) == "night", "a later job goes on with an earlier one's run"
    [gpus] = [int(each["value"]) for each in container["resourceRequirements"] if each["type"] == "GPU"]
    assert (cfg.trainer.num_nodes, cfg.trainer.devices, cfg.resume) == (2, gpus, "auto") and cfg.s3.uri
    assert [secret["name"] for secret in container["secrets"]] == ["LOCKSTEP_SECRET"]


def test_batchs_definition_is_as_its_api_asks():
    import botocore.session
    from botocore.validate import ParamValidator

    shape = botocore.session.get_session().get_service_model("batch").operation_model("RegisterJobDefinition")
    validator = ParamValidator()
    assert not validator.validate(BATCH, shape.input_shape).has_errors()
    wrong = {**BATCH, "retryStrategy": {"attempts": "ten", "evaluateOnExit": [{"onExitCode": "2"}]}}
    said = validator.validate(wrong, shape.input_shape).generate_report()
    assert "attempts" in said and 'Missing required parameter in retryStrategy.evaluateOnExit[0]: "action"' in said
    assert len(BATCH["retryStrategy"]["evaluateOnExit"]) <= 5 and BATCH["retryStrategy"]["attempts"] <= 10


def test_kubeflows_pods_are_the_nodes_of_one_run():
    job, node = parts("trainjob.yaml")["TrainJob"], trainjob_node()
    runtime = parts("trainjob.yaml")["TrainingRuntime"]
    trainer, pod = job["spec"]["trainer"], node["template"]["spec"]
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    env = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    name = job["metadata"]["name"]
    assert env["MASTER_ADDR"]["value"] == f"{name}-node-0-0.{name}", "JobSet's names: set, job, index, pod . set"
    assert "job-completion-index" in env["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert env["LOCKSTEP_SECRET"]["valueFrom"] == {"secretKeyRef": {"name": "lockstep", "key": "secret"}}
    cluster = describe({key: entry.get("value", "1") for key, entry in env.items()}, Wanted(devices=4, num_nodes=2))
    assert (cluster.launcher, cluster.node_rank, cluster.world_size) == ("nodes", 1, 8)
    cfg = compose("train", trainer["args"])
    assert cfg.trainer.num_nodes == trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    assert str(cfg.trainer.devices) == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert cfg.resume == "auto" and cfg.run_id and cfg.s3.uri and node["completionMode"] == "Indexed"
    policy = parts("kubernetes.yaml")["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert node["template"]["metadata"]["labels"] == policy
    same = parts("kubernetes.yaml")["Job"]["spec"]
    assert [r.get("onExitCodes", {}).get("values") for r in same["podFailurePolicy"]["rules"]] == [[2, 3], [75], None]
    assert pod["restartPolicy"] == "Never" and node["podReplacementPolicy"] == "Failed", (
        "podFailurePolicy asks for both"
    )


# By the engines' own code, where it is installed


@pytest.mark.parametrize("kind", ["TrainJob", "TrainingRuntime"])
def test_kubeflows_own_models_take_the_file(kind):
    """Generated from the CRDs; what a model does not know it leaves out."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api==2.3.0")
    model, document = getattr(models, f"TrainerV1alpha1{kind}"), parts("trainjob.yaml")[kind]
    assert model.from_dict(document).to_dict() == document
    document["spec"]["runtimeReff"] = {}
    assert model.from_dict(document).to_dict() != document


def test_skypilots_own_parser_takes_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky", reason="pip install skypilot==0.14.1")
    from sky.jobs.recovery_strategy import StrategyExecutor

    task = sky.Task.from_yaml_config({**SKY, "envs": {"S3_URI": "s3://b"}, "secrets": {"LOCKSTEP_SECRET": "x" * 16}})
    [resources] = task.resources
    assert task.num_nodes == 2 and resources.use_spot and resources.accelerators == {"T4": 4}
    executor = object.__new__(StrategyExecutor)
    executor.max_restarts_on_errors = resources.job_recovery["max_restarts_on_errors"]
    executor.recover_on_exit_codes, executor.restart_cnt_on_failure = resources.job_recovery["recover_on_exit_codes"], 0
    assert all(executor.should_restart_on_failure([75, 137]) for _ in range(ENDLESS))
    assert not any(executor.should_restart_on_failure([code, 137]) for code in (1, 2, 3))


def test_parallelclusters_own_schema_takes_the_file(monkeypatch):
    schemas = pytest.importorskip("pcluster.schemas.cluster_schema", reason="pip install aws-parallelcluster==3.16.1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    config = yaml.safe_load((LAUNCH / "parallelcluster.yaml").read_text())
    cluster = schemas.ClusterSchema(cluster_name="lockstep").load(config)
    assert [queue.capacity_type.value for queue in cluster.scheduling.queues] == ["SPOT"]
    config["Scheduling"]["SlurmQueues"][0]["CapacityTyp"] = "SPOT"
    with pytest.raises(Exception, match="Unknown field"):
        schemas.ClusterSchema(cluster_name="lockstep").load(config)
