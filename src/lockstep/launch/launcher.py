"""Start this node's ranks from a composed config, or run the one rank that this process is.

Imports no torch before the first rank is needed, so that every early refusal is quick.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.keys import is_equal_on_all_ranks
from lockstep.launch import failures
from lockstep.launch.launchers import AGENT, Cluster, agent_id, named_run, set_rank_environment
from lockstep.launch.plan import RunPlan, check, headlines, resolve_cluster, resolved
from lockstep.launch.start import Search, begin, finished_already, has_trained, hold_run_lock, run_folder, write_config
from lockstep.runs import provenance, signals
from lockstep.runs.batch import Batch
from lockstep.runs.config import Config
from lockstep.runs.environment import die_with_parent, environment, set_variables
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, Interrupted, UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.output import as_read, set_up, tested_name
from lockstep.runs.record import RunRecord, read_record
from lockstep.runs.redact import refuse_secrets
from lockstep.storage.uploader import finish_upload

log = logging.getLogger(__name__)

Work = Callable[[RunPlan], int]  # what a rank does; its exit code


def launch(config: Config, work: Work, search: Search | None = None) -> int:
    """Run `work(plan)` in every rank that the config and the environment ask for; return the exit code.

    Args:
        config: with `choices` and `overrides`, as from `whole_config`.
        search: finds the largest batch for data.global_batch_size=max.
    """
    environ = environment()
    set_up(verbose=config["verbose"], quiet=config["quiet"])
    refuse_secrets(config)
    cluster, accelerator = resolve_cluster(config, config["choices"].get("trainer", "this trainer"), environ)
    if cluster.has_agent:
        agent, *_, output = environ[AGENT].split(maxsplit=6)
        die_with_parent(int(agent))
        if cluster.local_rank:  # the first one writes to the terminal
            with (Path(output) / f"rank{cluster.rank}.log").open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
    check(config, cluster, accelerator)
    with ExitStack() as kept:
        if done := finished_already(config):
            log.info(f"The run {done.run_id} has finished.")
            if cluster.is_rank_zero:
                kept.enter_context(hold_run_lock(done))
            return _finish(config, cluster, done, EXIT_OK) if not cluster.local_rank else EXIT_OK
        if cluster.local_rank is None:
            return _start_ranks(config, cluster, kept)
        return _be_rank(config, cluster, accelerator, work, search, kept)


def _start_ranks(config: Config, cluster: Cluster, kept: ExitStack) -> int:
    """Start this node's ranks with torch's agent, and finish the run when they have ended."""
    arguments, run_id = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]], named_run(config, environment())
    is_first = cluster.node_rank == 0
    if is_first:
        folder, _ = run_folder(config, run_id)
        run_id = folder.run_id
        kept.enter_context(hold_run_lock(folder))
    else:  # the ranks' first meeting tells which run it is
        folder = RunFolder(Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-ranks-"))))
    signals.before_the_end(partial(failures.record_end, folder, signals.INTERRUPTED_AT_ONCE))
    try:
        signals.on_stop(signals.interrupt)
        from lockstep.launch.agent import start_ranks

        signals.check()
        code, failure, callstack = start_ranks(cluster, run_id, folder.path, arguments, config["trainer"]["timeout_s"])
    except Exception:  # an import that a signal broke raises anything
        if not signals.asked:
            raise
        code, failure, callstack = EXIT_INTERRUPTED, None, ""
    finally:
        signals.on_stop(signals.note)  # what is left is short
    if failure:
        failure["phase"] = failure["phase"] or failures.phase_of(folder)
    if is_first:
        if code:
            failures.record_end(folder, code, failure)
        code = _finish(config, cluster, folder, code)
    if failure:
        failures.log_failure(failure, callstack)
    return code


def _be_rank(
    config: Config, cluster: Cluster, accelerator: str, work: Work, search: Search | None, kept: ExitStack
) -> int:
    """Meet the other ranks, begin or resume the run on rank 0, and do the work of this one."""
    logs = Path(config["paths"]["log_dir"])
    plan: RunPlan | None = None
    folder: RunFolder | None = None

    def decide() -> dict[str, Any]:
        """Decide on rank 0 which run it is, where it begins, and its batch."""
        nonlocal plan, folder
        folder, fresh = run_folder(config, named_run(config, environment()) or agent_id(environment()))
        if not cluster.has_agent:
            kept.enter_context(hold_run_lock(folder))
            fresh = fresh and not has_trained(folder)  # another process may have trained it meanwhile
        plan = begin(config, cluster, accelerator, folder, fresh, search)
        for line in headlines(plan):
            log.info(line)
        batch, begins_at = [plan.batch.global_size, plan.batch.accumulate], [plan.resume_step, plan.checkpoint]
        return {"folder": os.path.relpath(folder.path, logs), "batch": batch, "begins_at": begins_at}

    set_rank_environment(cluster)
    signals.on_stop(signals.interrupt)
    try:
        try:
            if cluster.world_size == 1:
                decide()
            else:
                from lockstep.launch.process_group import meet

                options = resolved(config, cluster, accelerator)
                mine = provenance.fingerprint(options, is_equal_on_all_ranks)
                answer = meet(cluster, config["trainer"]["timeout_s"], mine, decide)
                folder = RunFolder((logs / answer["folder"]).resolve())
                size, accumulate = answer["batch"]
                batch = Batch.cut(size, cluster.world_size, accumulate)
                plan = plan or RunPlan(config, cluster, accelerator, folder, batch, *answer["begins_at"])
            assert plan is not None and folder is not None
            folder.path.mkdir(parents=True, exist_ok=True)
            if cluster.is_rank_zero:
                signals.before_the_end(partial(failures.record_end, folder, signals.INTERRUPTED_AT_ONCE))
            elif cluster.local_rank == 0:
                if not folder.config.exists():  # on a disk of its own, for a later resume
                    write_config(plan)
                where = f"node {cluster.node_rank} of {cluster.num_nodes} (counted from 0)"
                log.info(f"{where} joined run {folder.run_id}; output is on node 0")
            set_variables({"TORCH_FR_DUMP_TEMP_FILE": str(folder.path / "nccl-trace-rank")}, unless_set=True)
            code = work(plan)
        finally:
            signals.on_stop(signals.note)  # what is left is short
    except Exception as error:
        # An import that the signal broke raises anything. Ranks that have met know better: `culprit` names who failed.
        if signals.asked and not isinstance(error, Interrupted | UserError) and not hasattr(error, "culprit"):
            error = Interrupted(signal.Signals(signals.asked[0]).name)
        code = failures.end_of(error, cluster, folder)
        if getattr(error, "elsewhere", False) and cluster.launcher == "torchrun" and cluster.num_nodes > 1:
            code = EXIT_FAILED  # torchrun shall start this node's ranks again, beside a node that comes back
    if cluster.has_agent or folder is None or cluster.local_rank:
        return code
    return _finish(config, cluster, folder, code)


def _finish(config: Config, cluster: Cluster, folder: RunFolder, code: int) -> int:
    """Upload what is left, write the page and log the last line, on the run's first process; return the exit code."""
    for path in [*folder.path.glob("stack-rank*.txt"), *folder.path.glob("rank*.log")]:
        if path.exists() and path.stat().st_size == 0:
            path.unlink(missing_ok=True)  # another rank that shares the folder may be first
    if cluster.is_rank_zero:
        code = finish_upload(config.get("s3"), folder, code)
        _conclude(config, folder, code)
    if code == EXIT_INTERRUPTED and cluster.launcher == "torchrun":
        return EXIT_OK  # the ranks would be started again, although somebody asked them to stop
    saved = any(folder.checkpoints.glob("*.json"))  # 75 promises a checkpoint to go on from
    ctrl_c = code == EXIT_INTERRUPTED and signal.SIGINT in signals.asked and not saved
    return signals.INTERRUPTED_AT_ONCE if ctrl_c else code


def _conclude(config: Config, folder: RunFolder, code: int) -> None:
    """Write the page of a run and log its last line; remove the folder of a run whose input was refused."""
    record = read_record(folder.record) if folder.record.exists() else RunRecord()
    if code == EXIT_USER_ERROR and not (record.restarts or has_trained(folder)):
        shutil.rmtree(folder.path, ignore_errors=True)
    if not folder.record.exists():
        return
    pages: list[Path] = []
    try:
        from lockstep.logbook.build import keep_run, summarise, write_page

        pages.append(write_page(summarise(folder.path)))
        if config.get("logbook") == "keep" and not config["choices"].get("debug"):
            pages.append(keep_run(folder.path, Path(config["paths"]["logbook_dir"])))
    except Exception as error:
        again = f"python src/logbook.py keep {folder.run_id} writes one into logbook/"
        log.warning(f"The run's page was not written ({type(error).__name__}: {error}); {again}.")
    if code == EXIT_OK and record.status == "finished":
        found = ((name, record.metrics.get(name)) for name in (f"{record.monitor}_best", tested_name(record.monitor)))
        words = [f"{name} {as_read(name, value)}" for name, value in found if isinstance(value, float)]
        log.info(" · ".join(["finished", *words, *map(os.path.relpath, pages or [folder.path])]))
    if record.upload.error:
        again = f"python src/upload.py {folder.run_id} sends it"
        log.info(f"The best checkpoint is NOT in the bucket: {record.upload.error}; {again}.")
