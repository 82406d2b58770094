"""Composed config → this node's ranks, or the one rank that this process is.

Imports no torch before the first rank is needed, so that every early refusal is quick.
"""

import logging
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.compose import chosen_options, plain
from lockstep.launch import failures
from lockstep.launch.checks import check_numbers, check_root, check_validation, check_writable, refuse_days_on_cpu
from lockstep.launch.failures import record_interruption
from lockstep.launch.finish import finish
from lockstep.launch.launchers import AGENT, OUTPUT, Cluster, named_run, restart_run_id, set_rank_environment
from lockstep.launch.plan import (
    ResumePoint,
    RunPlan,
    headline,
    learning_rate_line,
    resolve_batch,
    resolve_cluster,
    resolved,
    scaled_learning_rates,
    time_limit,
)  # fmt: skip
from lockstep.launch.preflight import findings
from lockstep.launch.start import Search, begin, finished_already, hold_run_lock, make_plan, run_folder, write_config
from lockstep.runs import provenance, signals
from lockstep.runs.batch import Batch
from lockstep.runs.config import Config
from lockstep.runs.environment import die_with_parent, environment, set_variables
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Interrupted, UserError
from lockstep.runs.folder import RunFolder, new_run_id
from lockstep.runs.output import set_up
from lockstep.runs.record import update_record
from lockstep.runs.redact import refuse_secrets
from lockstep.storage.s3 import Bucket
from lockstep.storage.uploader import note

log = logging.getLogger(__name__)

Work = Callable[[RunPlan], int]  # what a rank does; its exit code


def launch(cfg: Any, work: Work, search: Search | None = None) -> int:
    """Run `work(plan)` in every rank that the config and the environment ask for.

    Args:
        cfg: composed, with Hydra's own node.
        search: finds the largest batch for data.global_batch_size=max.

    Returns:
        The exit code.
    """
    named = {"choices": chosen_options(cfg), "overrides": list(cfg.hydra.overrides.task)}
    return launch_config({**plain(cfg), **named}, work, search)


def launch_config(config: Config, work: Work, search: Search | None = None) -> int:
    """The same from a plain config that also holds `choices` (option by group) and `overrides`."""
    environ = environment()
    set_up(verbose=config["verbose"], quiet=config["quiet"])
    refuse_secrets(config)
    cluster, accelerator = resolve_cluster(config, config["choices"].get("trainer", "this trainer"), environ)
    if cluster.has_agent:
        die_with_parent(int(environ[AGENT].split()[0]))
    if cluster.has_agent and environ[OUTPUT]:
        with (Path(environ[OUTPUT]) / f"rank{cluster.rank}.log").open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    _check(config, cluster, accelerator)
    with ExitStack() as kept:
        if done := finished_already(config, environ):
            log.info(f"The run {done.run_id} has finished.")
            if cluster.is_rank_zero:
                kept.enter_context(hold_run_lock(done))
                if (config.get("s3") or {}).get("uri"):  # the earlier start has used its time up
                    note(done, until=None)
            return finish(config, cluster, done, EXIT_OK) if cluster.local_rank in (0, None) else EXIT_OK
        if cluster.starts_ranks:
            return _start_ranks(config, cluster, environ, kept)
        return _be_rank(config, cluster, accelerator, environ, work, search, kept)


def _check(config: Config, cluster: Cluster, accelerator: str) -> None:
    """
    Raises:
        UserError: an option that cannot work, before torch is imported.
    """
    refuse_days_on_cpu(config, accelerator)
    may_go_on = config.get("resume") or cluster.is_restarted
    resolve_batch(config, cluster, limit=math.inf if may_go_on else None)
    check_validation(config)
    check_numbers(config)
    time_limit(config)
    if (config.get("s3") or {}).get("uri"):
        Bucket.of(config["s3"])
    if config.get("logbook") not in (None, "keep"):
        raise UserError(f"logbook={config['logbook']}: keep, or nothing.")
    if config.get("resume") == "auto" and not named_run(config, environment()):
        raise UserError("resume=auto needs to know which run: give run_id=… (or RUN_ID), or resume=<run_id>.")
    if cluster.num_nodes == 1:  # else the others would wait: all ranks end together where one finds no images
        check_root(config)
    if cluster.local_rank in (0, None):
        check_writable(Path(config["paths"]["log_dir"]))
    if cluster.world_size > 1 and cluster.local_rank in (0, None) and not cluster.has_agent:
        for sentence in findings(cluster, environment(), Path(config["paths"]["log_dir"])):
            log.warning(sentence)


def _run_id(config: Config, environ: Mapping[str, str]) -> str:
    return named_run(config, environ) or restart_run_id(environ) or new_run_id()


def _start_ranks(config: Config, cluster: Cluster, environ: Mapping[str, str], kept: ExitStack) -> int:
    """Start this node's ranks with torch's agent, and finish the run when they have ended."""
    arguments, run_id = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]], named_run(config, environ)
    is_first = cluster.node_rank == 0
    if is_first:
        folder, _ = run_folder(config, run_id, environ)
        run_id = folder.run_id
        kept.enter_context(hold_run_lock(folder))
    else:  # the ranks' first meeting tells which run it is
        folder = RunFolder(Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-ranks-"))))
    folder.path.mkdir(parents=True, exist_ok=True)
    signals.before_the_end(partial(record_interruption, folder, signals.INTERRUPTED_AT_ONCE))
    try:
        signals.on_stop(signals.interrupt)
        from lockstep.launch.agent import start_ranks

        signals.check()
        code, failure, callstack = start_ranks(cluster, run_id, folder.path, arguments, config["trainer"]["timeout_s"])
    except Exception:  # an import that a signal broke raises anything
        if not signals.asked:
            raise
        code, failure, callstack = EXIT_INTERRUPTED, None, ""
    if failure:
        failure["phase"] = failure["phase"] or failures.phase_of(folder)
    if is_first and failure:
        failures.record_failure(folder, failure, code)
    elif is_first and code:
        record_interruption(folder)
    code = finish(config, cluster, folder, code) if is_first else code
    if failure:
        if failure["kind"] not in ("UserError", "Diverged", "NoRoom"):
            sys.stderr.write(callstack)
        log.error(failures.sentence_of(failure))
    return code


def _be_rank(
    config: Config, cluster: Cluster, accelerator: str, environ: Mapping[str, str], work: Work,
    search: Search | None, kept: ExitStack,
) -> int:  # fmt: skip
    """Meet the other ranks, begin or resume the run on rank 0, and do the work of this one."""
    logs, timeout_s = Path(config["paths"]["log_dir"]), config["trainer"]["timeout_s"]
    plan: RunPlan | None = None
    folder: RunFolder | None = None

    def decide() -> dict[str, Any]:
        """On rank 0: the run, where it begins, and its batch."""
        nonlocal plan, folder
        folder, fresh = run_folder(config, _run_id(config, environ), environ)
        if not cluster.has_agent:
            kept.enter_context(hold_run_lock(folder))
            fresh = fresh and not folder.record.exists()  # another process may have begun it meanwhile
        decided, found = make_plan(config, cluster, accelerator, folder, environ, search)
        plan = begin(decided, fresh)
        if found:
            with update_record(folder.record) as record:
                record.take({"largest_batch": found})
        log.info(headline(plan))
        if plan.learning_rates:
            log.info(learning_rate_line(plan))
        return {
            "folder": os.path.relpath(folder.path, logs), "batch": [plan.batch.global_size, plan.batch.accumulate],
            "resume": plan.resume and [plan.resume.step, plan.resume.checkpoint], "weights": plan.initial_weights,
        }  # fmt: skip

    set_rank_environment(cluster)
    signals.on_stop(signals.interrupt)
    code = EXIT_FAILED
    try:
        try:
            if cluster.world_size == 1:
                decide()
            else:
                from lockstep.launch.process_group import meet

                mine = provenance.fingerprint(resolved(config, cluster, accelerator))
                answer = meet(cluster, timeout_s, mine, named_run(config, environ), decide)
                folder = RunFolder((logs / answer["folder"]).resolve())
                if plan is None:
                    plan = _as_decided(config, cluster, accelerator, folder, answer)
            assert plan is not None and folder is not None
            if cluster.is_rank_zero:
                signals.before_the_end(partial(record_interruption, folder, signals.INTERRUPTED_AT_ONCE))
            folder.path.mkdir(parents=True, exist_ok=True)
            set_variables(failures.recorded_collectives(folder), unless_set=True)
            code = work(plan)
        finally:
            signals.on_stop(signals.note)  # what is left is short
    except Exception as error:
        # An import that the signal broke raises anything. Ranks that have met know better: `culprit` names who failed.
        stopped = signals.asked and not isinstance(error, Interrupted | UserError) and not hasattr(error, "culprit")
        code = failures.end_of(
            Interrupted(signal.Signals(signals.asked[0]).name) if stopped else error, cluster, folder
        )
        is_restarted = cluster.is_restarted and cluster.num_nodes > 1
        if getattr(error, "elsewhere", False) and is_restarted:
            code = EXIT_FAILED  # torchrun shall start this node's ranks again, beside a node that comes back
    if cluster.has_agent or folder is None or cluster.local_rank:
        return code
    return finish(config, cluster, folder, code)


def _as_decided(
    config: Config, cluster: Cluster, accelerator: str, folder: RunFolder, answer: dict[str, Any]
) -> RunPlan:
    """Return the plan of a rank other than 0."""
    own = {key: value for key, value in config.items() if key not in ("choices", "overrides")}
    size, accumulate = answer["batch"]
    plan = RunPlan(
        config=own, choices=config["choices"], overrides=tuple(config["overrides"]), cluster=cluster,
        accelerator=accelerator, folder=folder, batch=Batch.cut(size, cluster.world_size, accumulate),
        resume=answer["resume"] and ResumePoint(*answer["resume"]), initial_weights=answer["weights"],
    )  # fmt: skip
    if config["task_name"] == "train":
        plan = replace(plan, learning_rates=scaled_learning_rates(config["optimizer"], plan.batch))
    if cluster.local_rank == 0 and not folder.config.exists():  # on a disk of its own, for a later resume
        write_config(plan)
    if cluster.local_rank == 0:
        log.info(
            f"node {cluster.node_rank} of {cluster.num_nodes} (counted from 0) joined run {folder.run_id}; "
            "output is on node 0"
        )
    return plan
