"""Composed config → run folder, record and Cluster → this node's supervisor, or training in this process.

Imports no torch: a supervisor, and every error that can be found before work starts, come without it.
"""

import logging
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.config.compose import chosen_options, plain
from lockstep.distributed import cluster as world
from lockstep.distributed.cluster import Cluster
from lockstep.distributed.preflight import findings
from lockstep.distributed.supervisor import Supervisor, die_with_parent
from lockstep.launch.finish import (
    Work,
    code_of_stop,
    conclude,
    hold_signals,
    in_this_process,
    remove_empty_stacks,
    signals_end_this_process,
    stop_at_once_on_signal,
)
from lockstep.launch.start import be_the_only_one, begin, find_weights, finished_already, run_folder
from lockstep.runs import provenance
from lockstep.runs.errors import EXIT_INTERRUPTED, EXIT_OK, Interrupted, UserError
from lockstep.runs.folder import RunFolder, new_run_id, read_config
from lockstep.runs.full_disk import use_reserve
from lockstep.runs.old_configs import model_name
from lockstep.runs.output import set_up
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import update_record
from lockstep.runs.redact import refuse_secrets
from lockstep.runs.signals import INTERRUPTED_AT_ONCE
from lockstep.storage.outbox import Outbox

log = logging.getLogger(__name__)

FindLargest = Callable[..., Any]
CHECKPOINTS = "lockstep.callbacks.checkpoints.Checkpoints"


def launch(cfg: Any, work: Work, find_largest: FindLargest | None = None) -> int:
    """Run `work(config, cluster, folder)` in every rank that the config and the environment ask for.

    Args:
        find_largest: looks for the batch where data.global_batch_size=max.

    Returns:
        The exit code.
    """
    config = plain(cfg)
    config["choices"], config["overrides"] = chosen_options(cfg), list(cfg.hydra.overrides.task)
    return launch_config(config, work, find_largest)


def launch_config(config: dict[str, Any], work: Work, find_largest: FindLargest | None = None) -> int:
    """The same from a plain config that also holds `choices` (option by group) and `overrides`."""
    with ExitStack() as kept:
        return _launch(config, work, kept, find_largest)


def _launch(config: dict[str, Any], work: Work, kept: ExitStack, find_largest: FindLargest | None) -> int:
    """
    Args:
        kept: what lasts as long as the run.
    """
    set_up(verbose=config["verbose"], quiet=config["quiet"])
    refuse_secrets(config)
    environment = world.environment()
    cluster = resolve_cluster(config, environment)
    if config["data"].get("global_batch_size") != "max":
        describe_batch(config, cluster)
    _check_bucket(config)
    if config.get("logbook") not in (None, "keep"):
        raise UserError(f"logbook={config['logbook']}: keep, or nothing.")
    if done := finished_already(config, environment):
        if cluster.node_rank == 0 and cluster.local_rank in (0, None):
            kept.enter_context(be_the_only_one(done))
        return send_what_is_left(config, done, cluster)
    if cluster.world_size > 1 and cluster.local_rank in (0, None):
        for sentence in findings(cluster, environment, Path(config["paths"]["log_dir"])):
            log.info(f"MEND  {sentence}")
    try:
        if cluster.num_nodes > 1 or cluster.launcher == "torchrun":
            stop_at_once_on_signal()
        agree_on_run(config, cluster, environment)
    except Interrupted as error:
        log.info(f"Interrupted ({error}) before the run began.")
        return INTERRUPTED_AT_ONCE if str(error) == "SIGINT" else EXIT_INTERRUPTED
    finally:
        signals_end_this_process()
    folder, fresh = run_folder(config, cluster, environment)
    if not any(folder.checkpoints.glob("*.json")):  # else the run goes on from its own
        find_weights(config, cluster)
    largest = largest_batch(config, cluster, environment, folder, find_largest)
    scaled = scale_learning_rates(config) if config["task_name"] == "train" else None
    if cluster.is_rank_zero or cluster.local_rank in (0, None):
        if cluster.node_rank == 0:
            kept.enter_context(be_the_only_one(folder))
            fresh = fresh and not folder.record.exists()  # another may have begun it while this one waited
        hold_signals()
        begin(config, cluster, folder, fresh)
    if cluster.is_rank_zero:
        if largest:
            with update_record(folder.record) as record:
                record.take({"largest_batch": largest})
        log.info(headline(config, cluster, folder.run_id))
        if scaled:
            log.info(scaled)
    if cluster.is_supervisor:
        command = [sys.executable, str(Path(sys.argv[0]).resolve())]
        code = Supervisor(cluster, folder, command, environment, timeout_s=config["trainer"]["timeout_s"]).run()
    else:
        code = in_this_process(config, cluster, folder, work)
    signals_end_this_process()
    if code == INTERRUPTED_AT_ONCE:  # by a second Ctrl-C
        return code
    remove_empty_stacks(folder)
    use_reserve(folder.path)
    if cluster.is_supervisor or cluster.local_rank == 0:
        code = _finish_upload(config, folder, code, cluster)
    if cluster.is_rank_zero:
        conclude(config, folder, code)
    if cluster.launcher == "torchrun" and code == EXIT_INTERRUPTED:
        return EXIT_OK  # torchrun would start the ranks again, which somebody has just asked to stop
    return code_of_stop(code, folder)


def largest_batch(
    config: dict[str, Any],
    cluster: Cluster,
    environment: dict[str, str],
    folder: RunFolder,
    find_largest: FindLargest | None,
) -> dict[str, Any] | None:
    """For data.global_batch_size=max: find it, put the number into config; what was found, for the record.

    A run that goes on keeps the size that it was started with, which any one of its nodes may know.
    """
    if config["data"].get("global_batch_size") != "max":
        return None
    assert find_largest is not None, "this script cannot look for a batch"
    before = _batch_before(folder)
    if before is None or cluster.num_nodes > 1 or not (cluster.is_supervisor or cluster.world_size == 1):
        if cluster.is_rank_zero:
            log.info("Looking for the largest batch …")
        largest = find_largest(config, cluster, environment, known=before)
        before = largest.known
    config["data"]["global_batch_size"] = before or largest.global_batch_size
    describe_batch(config, cluster)
    return None if before else largest.record()


def _batch_before(folder: RunFolder) -> int | None:
    path = folder.any_config()
    return read_config(path)["data"]["global_batch_size"] if path else None


def _check_bucket(config: dict[str, Any]) -> None:
    """Its settings, before anything is written."""
    s3 = config.get("s3") or {}
    if s3.get("uri"):
        from lockstep.storage.s3_options import options_from

        options_from(s3)


def send_what_is_left(config: dict[str, Any], folder: RunFolder, cluster: Cluster) -> int:
    """Of a run that an earlier start has finished; whoever started it again (systemd, torchrun) may leave it now."""
    code = EXIT_OK
    if cluster.is_supervisor or cluster.local_rank == 0:
        if (config.get("s3") or {}).get("uri"):  # the earlier start has used its time up
            Outbox(folder.path / "upload").note(deadline=None, flush_left_s=float(config["s3"]["flush_timeout_s"]))
        code = _finish_upload(config, folder, code, cluster)
    if cluster.is_rank_zero:
        log.info(f"The run {folder.run_id} has finished.")
        conclude(config, folder, code)
    return code


def _finish_upload(config: dict[str, Any], folder: RunFolder, code: int, cluster: Cluster) -> int:
    if not (config.get("s3") or {}).get("uri"):
        return code
    from lockstep.storage.finish import finish_upload

    first = cluster.node_rank * cluster.devices
    return finish_upload(config["s3"], folder, code, ranks=range(first, first + cluster.devices))


def agree_on_run(config: dict[str, Any], cluster: Cluster, environment: dict[str, str]) -> None:
    """One run id for all processes before any folder is made: config["run_id"], where nothing outside names the run.

    Raises:
        UserError: resume=auto where nothing names the run.
    """
    named = config.get("run_id") or world.outside_run_id(environment)
    if config.get("resume") == "auto" and not named:
        raise UserError("resume=auto needs to know which run: give run_id=… (or RUN_ID), or resume=<run_id>.")
    if cluster.is_supervisor and cluster.num_nodes > 1:
        meet(config, cluster, named if config.get("resume") in (None, "auto") else config["resume"])
    elif cluster.launcher == "torchrun" and cluster.world_size > 1 and not (named or config.get("resume")):
        from lockstep.distributed.process_group import agreed_run_id

        mine = world.agent_run_id(environment)
        config["run_id"] = agreed_run_id(cluster, mine, config["trainer"]["timeout_s"])


def meet(config: dict[str, Any], cluster: Cluster, run_id: str | None) -> None:
    """The supervisors of all nodes agree on the run id, which goes into config, and on code and options."""
    from lockstep.distributed.rendezvous import agree

    if cluster.node_rank == 0 and run_id is None:
        run_id = new_run_id()
    mine = {
        "run_id": run_id, "host": socket.gethostname(), "tree_hash": provenance.tree_hash(REPOSITORY),
        "config_hash": provenance.config_hash(config), "versions": provenance.versions(),
    }  # fmt: skip
    answer = agree(cluster, mine, config["trainer"]["timeout_s"], log.info)
    if config.get("resume") in (None, "auto"):
        config["run_id"] = answer["run_id"]


def resume_in_rank(config_path: str, work: Work) -> int:
    """What a rank does that our supervisor started: everything is decided already."""
    environment = world.environment()
    die_with_parent(int(environment["LOCKSTEP_SUPERVISOR"]))
    config = read_config(Path(config_path))
    set_up(verbose=config["verbose"], quiet=config["quiet"])
    cluster = world.describe(environment, devices=None, num_nodes=None, several_processes=True, machine=1)
    return in_this_process(config, cluster, RunFolder(Path(config_path).parent), work)


def resolve_cluster(config: dict[str, Any], environment: dict[str, str]) -> Cluster:
    """The Cluster, with `trainer.accelerator`, `devices` and `num_nodes` in config made plain numbers.

    Raises:
        UserError: a GPU is asked for where there is none, with the option that works here.
    """
    trainer = config["trainer"]
    name = config.get("choices", {}).get("trainer", "this trainer")
    _check_one_process(trainer, name)
    gpus = world.visible_gpus(environment)
    if trainer.get("stage_devices"):
        trainer["accelerator"] = "cpu" if str(trainer["stage_devices"][0]).startswith("cpu") else "gpu"
    if trainer["accelerator"] == "auto":
        trainer["accelerator"] = "gpu" if gpus else "cpu"
    stated = None if trainer["devices"] == "auto" else trainer["devices"]
    if stated is not None and (not isinstance(stated, int) or stated < 1):
        raise UserError(f"trainer.devices={stated!r}: give a number from 1 on, or auto.")
    if trainer["accelerator"] == "gpu":
        needed = (trainer["num_gpus"] or 2) if "num_gpus" in trainer else stated or 1  # dp: several in one process
        if gpus < needed:
            simulated = {"ddp": "ddp_sim", "fsdp": "fsdp_sim", "allreduce": "allreduce_sim", "dp": "ddp_sim"}
            has = "no GPU" if gpus == 0 else f"{gpus} GPU{'s' if gpus > 1 else ''}"
            raise UserError(
                f"trainer={name} asks for {needed} GPU{'s' if needed > 1 else ''} and this machine has {has}: "
                f"trainer={simulated.get(name, 'cpu')} works here."
            )
    cluster = world.describe(
        environment,
        devices=stated,
        num_nodes=None if trainer["num_nodes"] == "auto" else trainer["num_nodes"],
        several_processes=trainer["launch"] == "process_per_device",
        machine=gpus if trainer["accelerator"] == "gpu" else 1,
    )
    if trainer["launch"] == "process_per_device":
        if trainer["accelerator"] == "gpu" and cluster.devices > gpus:
            raise UserError(
                f"{cluster.devices} ranks on this node see {gpus} GPU{'s' if gpus != 1 else ''}: each rank must see "
                "all of its node's (SLURM: --gpus-per-node, not --gpus-per-task), and there must be one for each."
            )
        trainer["devices"] = cluster.devices
    trainer["num_nodes"] = cluster.num_nodes
    return cluster


def _check_one_process(trainer: dict[str, Any], name: str) -> None:
    """A trainer that runs in one process would silently leave out what it cannot do."""
    own = next((f"give trainer.{key}" for key in ("num_gpus", "stage_devices") if key in trainer), None)
    for key in ("devices", "num_nodes"):
        if trainer["launch"] == "one_process" and trainer[key] not in ("auto", 1):
            instead = (key == "devices" and own) or "trainer=ddp (on CPUs ddp_sim) has several"
            raise UserError(f"trainer.{key}={trainer[key]}, but trainer={name} is one process: {instead}.")


def describe_batch(config: dict[str, Any], cluster: Cluster) -> None:
    """Write `per_device_batch_size` into config; an error names the nearest global batches that divide."""
    size = config["data"].get("global_batch_size")
    parts = config["trainer"]["accumulate_grad_batches"] * cluster.world_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"data.global_batch_size={size!r}: give a whole number from 1 on.")
    if config["trainer"]["accumulate_grad_batches"] < 1:
        raise UserError("trainer.accumulate_grad_batches counts from 1 on.")
    if size % parts:
        below, above = size // parts * parts, (size // parts + 1) * parts
        near = f"{below} and {above}" if below else str(above)
        raise UserError(
            f"data.global_batch_size={size} does not divide into {cluster.world_size} ranks × "
            f"{config['trainer']['accumulate_grad_batches']} accumulated batches: the nearest that do are {near}."
        )
    config["per_device_batch_size"] = size // parts


def scale_learning_rates(config: dict[str, Any]) -> str | None:
    """For optimizer.scale_lr_with_batch=true: lr × global batch / base_batch_size (Goyal et al. 2017), in config.

    Returns:
        A sentence that says from what to what; None where nothing is scaled.
    """
    optimizer, batch = config["optimizer"], config["data"]["global_batch_size"]
    if not optimizer.get("scale_lr_with_batch"):
        return None
    base = optimizer["base_batch_size"]
    if not isinstance(base, int) or base < 1:
        raise UserError(f"optimizer.base_batch_size={base!r}: give a whole number from 1 on.")
    changes = []
    for name in [key for key in optimizer if key == "lr" or key.endswith("_lr")]:
        stated = optimizer[name]
        optimizer[name] = stated * batch / base
        changes.append(f"{name} {stated:g} → {optimizer[name]:g}")
    return f"optimizer: {', '.join(changes)} (global batch {batch} / base_batch_size {base})"


def headline(config: dict[str, Any], cluster: Cluster, run_id: str) -> str:
    accumulate = config["trainer"]["accumulate_grad_batches"]
    return (
        f"run {run_id} · {model_name(config)} · {config['data']['name']} · {config['choices']['trainer']} · "
        f"global batch {config['data']['global_batch_size']} = {config['per_device_batch_size']} × "
        f"{cluster.world_size} × {accumulate}{without_checkpoints(config)}"
    )


def without_checkpoints(config: Mapping[str, Any]) -> str:
    """Said at the end of the head line of a training that will leave nothing to resume or to test."""
    callbacks = (config.get("callbacks") or {}).values()
    kept = any(node and node.get("_target_") == CHECKPOINTS for node in callbacks)
    return "" if kept or config["task_name"] != "train" else " · WITHOUT CHECKPOINTS"
