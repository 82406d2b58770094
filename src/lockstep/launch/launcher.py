"""Composed config → plan and run folder → this node's supervisor, or training in this process.

Imports no torch: a supervisor, and every error that can be found before work starts, come without it.
"""

import logging
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config.compose import chosen_options, plain
from lockstep.distributed.cluster import SUPERVISOR_PID, Cluster, Wanted, environment
from lockstep.distributed.launchers import describe, launcher_named
from lockstep.distributed.preflight import findings
from lockstep.distributed.supervisor import Supervisor, die_with_parent
from lockstep.launch.agree import agree_on_run
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
from lockstep.launch.plan import (
    RunPlan,
    asks_for_largest,
    headline,
    joined_line,
    learning_rate_line,
    read_plan,
    resolve_batch,
    resolve_cluster,
    scaled_learning_rates,
    time_limit,
    write_plan,
)
from lockstep.launch.resume import config_before
from lockstep.launch.start import begin, check_writable, find_weights, finished_already, hold_run_lock, run_folder
from lockstep.launch.validation import check_numbers, check_root, check_validation
from lockstep.launch.without_gpu import refuse_days_on_cpu
from lockstep.runs.config import Config, read_only
from lockstep.runs.errors import EXIT_INTERRUPTED, EXIT_OK, Interrupted, UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.output import set_up
from lockstep.runs.record import read_record, update_record
from lockstep.runs.redact import refuse_secrets
from lockstep.runs.signals import INTERRUPTED_AT_ONCE
from lockstep.storage.finish import finish_upload, note
from lockstep.storage.s3 import Bucket

log = logging.getLogger(__name__)

FindLargest = Callable[..., Any]


def launch(cfg: Any, work: Work, find_largest: FindLargest | None = None) -> int:
    """Run `work(plan)` in every rank that the config and the environment ask for.

    Args:
        cfg: composed, with Hydra's own node.
        find_largest: looks for the batch where data.global_batch_size=max.
    Returns:
        The exit code.
    """
    named = {"choices": chosen_options(cfg), "overrides": list(cfg.hydra.overrides.task)}
    return launch_config({**plain(cfg), **named}, work, find_largest)


def launch_config(config: Config, work: Work, find_largest: FindLargest | None = None) -> int:
    """The same from a plain config that also holds `choices` (option by group) and `overrides`."""
    with ExitStack() as kept:
        return _launch(read_only(config), work, kept, find_largest)


def _launch(config: Config, work: Work, kept: ExitStack, find_largest: FindLargest | None) -> int:
    """
    Args:
        kept: what lasts as long as the run.
    """
    set_up(verbose=config["verbose"], quiet=config["quiet"])
    refuse_secrets(config)
    environ = environment()
    cluster, accelerator = resolve_cluster(config, config["choices"].get("trainer", "this trainer"), environ)
    refuse_days_on_cpu(config, accelerator)
    resolve_batch(config, cluster, limit=math.inf if _may_go_on(config, cluster) else None)
    check_validation(config)
    check_numbers(config)
    time_limit(config)
    _check_bucket(config)
    if config.get("logbook") not in (None, "keep"):
        raise UserError(f"logbook={config['logbook']}: keep, or nothing.")
    if done := finished_already(config, environ):
        if _is_first(cluster):
            kept.enter_context(hold_run_lock(done))
        return send_what_is_left(config, done, cluster)
    if cluster.num_nodes == 1:  # else the others would wait: all ranks end together where one finds no images
        check_root(config)
    if cluster.local_rank in (0, None):
        check_writable(Path(config["paths"]["log_dir"]))
    try:
        run_id = _meet_others(config, cluster, accelerator, environ)
    except Interrupted as error:
        log.info(f"Interrupted ({error}) before the run began.")
        return INTERRUPTED_AT_ONCE if str(error) == "SIGINT" else EXIT_INTERRUPTED
    finally:
        signals_end_this_process()
    folder, fresh = run_folder(config, run_id, cluster, environ)
    plan, found = make_plan(config, cluster, accelerator, folder, environ, find_largest)
    if cluster.local_rank in (0, None):
        if cluster.node_rank == 0:
            kept.enter_context(hold_run_lock(folder))
            fresh = fresh and not folder.record.exists()  # another may have begun it while this one waited
        hold_signals()
        plan = begin(plan, fresh)
    if cluster.is_rank_zero:
        if found:
            with update_record(folder.record) as record:
                record.take({"largest_batch": found})
        log.info(headline(plan))
        if plan.learning_rates:
            log.info(learning_rate_line(plan))
    elif cluster.node_rank > 0 and cluster.local_rank in (0, None):
        log.info(joined_line(plan))
    code = run_ranks(plan, environ, work)
    signals_end_this_process()
    return code if code == INTERRUPTED_AT_ONCE else _finish(plan, code)  # a second Ctrl-C ends at once


def _is_first(cluster: Cluster) -> bool:
    return cluster.node_rank == 0 and cluster.local_rank in (0, None)


def _meet_others(config: Config, cluster: Cluster, accelerator: str, environ: Mapping[str, str]) -> str | None:
    """The run id that all have agreed on; a signal ends the wait."""
    if cluster.world_size > 1 and cluster.local_rank in (0, None):
        for sentence in findings(cluster, environ, Path(config["paths"]["log_dir"])):
            log.info(f"MEND  {sentence}")
    if cluster.num_nodes > 1 or launcher_named(cluster.launcher).restarts_ranks:
        stop_at_once_on_signal()
    return agree_on_run(config, cluster, accelerator, environ)


def make_plan(
    config: Config,
    cluster: Cluster,
    accelerator: str,
    folder: RunFolder,
    environ: Mapping[str, str],
    find_largest: FindLargest | None,
) -> tuple[RunPlan, Any]:
    """The plan, and what a search for the largest batch has found; None where there was none.

    Args:
        config: with `choices` and `overrides`.
    """
    own = {key: value for key, value in config.items() if key not in ("choices", "overrides")}
    limit = _limit_before(config, cluster, folder)
    plan = RunPlan(
        config=read_only(own),
        choices=config["choices"],
        overrides=tuple(config["overrides"]),
        cluster=cluster,
        accelerator=accelerator,
        folder=folder,
        batch=resolve_batch(config, cluster, limit),
        initial_weights=config.get("ckpt_path"),
    )
    if not any(folder.checkpoints.glob("*.json")):  # else the run goes on from its own
        plan = find_weights(plan)
    found = None
    if asks_for_largest(config):
        size, found = largest_batch(plan, environ, find_largest)
        plan = replace(plan, batch=resolve_batch(config, cluster, limit, size))
    if config["task_name"] == "train":
        plan = replace(plan, learning_rates=scaled_learning_rates(config["optimizer"], plan.batch))
    return plan, found


def largest_batch(plan: RunPlan, environ: Mapping[str, str], find_largest: FindLargest | None) -> tuple[int, Any]:
    """The largest global batch that fits, and what a search has found; None where there was none.

    A run that goes on keeps the size that it was started with, which any one of its nodes may know.
    """
    assert find_largest is not None, "this script cannot look for a batch"
    cluster, size, found = plan.cluster, _batch_before(plan.folder), None
    if size is None or cluster.num_nodes > 1 or not (cluster.is_supervisor or cluster.world_size == 1):
        if cluster.is_rank_zero:
            log.info("Looking for the largest batch …")
        size, found = find_largest(plan, environ, known=size)
    return size, found


def _may_go_on(config: Config, cluster: Cluster) -> bool:
    return bool(config.get("resume")) or launcher_named(cluster.launcher).restarts_ranks


def _limit_before(config: Config, cluster: Cluster, folder: RunFolder) -> float | None:
    """Images that a device of the run takes at a time; infinite where another node may know it, None of a new run."""
    if folder.record.exists():
        record = read_record(folder.record)
        return record.per_device_batch_limit or record.per_device_batch_size
    return math.inf if config.get("resume") and cluster.node_rank > 0 else None


def _batch_before(folder: RunFolder) -> int | None:
    size = ((config_before(folder) or {}).get("data") or {}).get("global_batch_size")
    return size if isinstance(size, int) else None


def _check_bucket(config: Config) -> None:
    """Its settings, before anything is written."""
    s3 = config.get("s3") or {}
    if s3.get("uri"):
        Bucket.of(s3)


def run_ranks(plan: RunPlan, environ: Mapping[str, str], work: Work) -> int:
    """Start this node's ranks and wait for them, or be the one rank that this process is; returns the exit code."""
    if plan.cluster.is_supervisor:
        write_plan(plan, plan.folder.plan(plan.cluster.node_rank))
        command = [sys.executable, str(Path(sys.argv[0]).resolve())]
        timeout_s = plan.trainer["timeout_s"]
        return Supervisor(plan.cluster, plan.folder, command, dict(environ), timeout_s=timeout_s).run()
    return in_this_process(plan, work)


def run_supervised(path: Path, work: Work) -> int:
    """What a rank does that our supervisor started: everything is decided already.

    Args:
        path: of its node's plan.
    """
    environ = environment()
    die_with_parent(int(environ[SUPERVISOR_PID]))
    plan = replace(read_plan(path), cluster=describe(environ, Wanted()))
    set_up(verbose=plan.config["verbose"], quiet=plan.config["quiet"])
    return in_this_process(plan, work)


def _finish(plan: RunPlan, code: int) -> int:
    cluster, folder = plan.cluster, plan.folder
    remove_empty_stacks(folder)
    if cluster.is_rank_zero:
        code = finish_upload(plan.config.get("s3"), folder, code)
        conclude(folder, _keep_in(plan.config, plan.choices), code)
    if launcher_named(cluster.launcher).restarts_ranks and code == EXIT_INTERRUPTED:
        return EXIT_OK  # the ranks would be started again, which somebody has just asked to stop
    return code_of_stop(code, folder)


def _keep_in(config: Config, choices: Config) -> Path | None:
    """The logbook for logbook=keep, where no debugging run belongs."""
    return (
        Path(config["paths"]["logbook_dir"]) if config.get("logbook") == "keep" and not choices.get("debug") else None
    )


def send_what_is_left(config: Config, folder: RunFolder, cluster: Cluster) -> int:
    """Of a run that an earlier start has finished; whoever started it again (systemd, torchrun) may leave it now."""
    code = EXIT_OK
    if cluster.is_rank_zero:
        if (config.get("s3") or {}).get("uri"):  # the earlier start has used its time up
            note(folder, deadline=None, left_s=None)
        code = finish_upload(config.get("s3"), folder, code)
        log.info(f"The run {folder.run_id} has finished.")
        conclude(folder, _keep_in(config, config["choices"]), code)
    return code
