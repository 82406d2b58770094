"""The start of a run: its folder, config.yaml and first record; for a resumed run, that it is the same one."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lockstep.config.compose import chosen_options, compose, plain
from lockstep.config.schema import key_of
from lockstep.launch.launchers import Cluster, agent_id, command_line, named_run
from lockstep.launch.plan import (
    ResumePoint,
    RunPlan,
    as_run,
    asks_for_largest,
    resolve_batch,
    scaled_learning_rates,
)
from lockstep.launch.resume import config_before, runs_folder
from lockstep.runs import provenance
from lockstep.runs.config import Config
from lockstep.runs.durations import seconds_of
from lockstep.runs.environment import environment
from lockstep.runs.errors import UserError
from lockstep.runs.files import lock, sha256_of, utc_now, write_atomically
from lockstep.runs.folder import RunFolder, checked_run_id, find_run, new_run_id
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import CodeState, RunRecord, continued, read_record, write_record
from lockstep.runs.redact import redact_text
from lockstep.storage.checkpoint_files import newest_whole, read_sidecar
from lockstep.strategies.placement import gpus_sharing_batch

log = logging.getLogger(__name__)

Search = Callable[[RunPlan, Mapping[str, str]], dict[str, Any]]  # for the largest batch


def run_folder(config: Config, run_id: str | None, environ: Mapping[str, str]) -> tuple[RunFolder, bool]:
    """Return the folder of this run, not yet made, and whether the run is new.

    Args:
        run_id: None for a new one.

    Raises:
        UserError: the run to resume is unknown or finished, or a new run would overwrite one.
    """
    logs = Path(config["paths"]["log_dir"])
    resume = config.get("resume")
    if resume == "auto":
        folder = RunFolder(runs_folder(config, logs) / checked_run_id(run_id or ""))
        return folder, not folder.record.exists()
    if resume:
        return find_run(logs, resume), False
    folder = RunFolder(runs_folder(config, logs) / checked_run_id(run_id or new_run_id()))
    if folder.record.exists():
        agent = agent_id(environ)
        if agent is not None and read_record(folder.record).agent == agent:
            return folder, False  # torchrun's agent started its ranks again, or SLURM requeued the job
        raise UserError(
            f"The run {folder.run_id} exists already: resume={folder.run_id} goes on with it, "
            "another run_id= starts anew."
        )
    return folder, True


def hold_run_lock(folder: RunFolder, wait_s: float = 330.0) -> IO[str]:
    """Lock the run for this process: a second one would remove the first one's checkpoints.

    It waits for a process that is just ending, and for a lost machine, whose locks a network file system frees in a
    minute or two.

    Returns:
        The file to keep open.

    Raises:
        UserError: another process still trains the run.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    handle = folder.alive.open("a")
    if not lock(handle, wait_s=0):
        log.info(f"The run {folder.run_id} is trained by another process: waiting for it to end …")
        if not lock(handle, wait_s):
            handle.close()
            raise UserError(
                f"The run {folder.run_id} is still trained by another process, on this machine or on one that shares "
                f"{folder.path.parent}: end it; where its machine is gone, remove {folder.alive}."
            )
    return handle


def is_over(config: Config, folder: RunFolder, previous: RunRecord) -> bool:
    """Return whether a run has finished, and this start asks for no more epochs, steps or time."""
    if previous.status != "finished":
        return False
    own = config["trainer"]
    if previous.ended_by == "max_time":
        return bool(own["max_time"]) and seconds_of(own["max_time"], "trainer.max_time") <= (previous.fit_seconds or 0)
    stored = (config_before(folder) or {}).get("trainer") or {}
    if all(own.get(key) == stored.get(key) for key in ("max_epochs", "max_steps", "max_time")):
        return True  # also if a callback, as EarlyStopping, ended it
    if _ended_by_steps(folder, previous):
        return bool(0 <= own["max_steps"] <= (previous.steps or 0))
    return bool(own["max_epochs"] <= (previous.epochs or 0))


def _ended_by_steps(folder: RunFolder, previous: RunRecord) -> bool:
    return previous.steps == ((config_before(folder) or {}).get("trainer") or {}).get("max_steps")


def finished_already(config: Config, environ: Mapping[str, str]) -> RunFolder | None:
    """Return the run of resume=auto if nothing is left to train: a job script may start it again and again."""
    named = named_run(config, environ)
    if config.get("resume") != "auto" or not named or config["task_name"] != "train":
        return None
    folder = RunFolder(runs_folder(config, Path(config["paths"]["log_dir"])) / checked_run_id(named))
    if not folder.record.exists() or not config_before(folder):
        return None
    return folder if is_over(config, folder, read_record(folder.record)) else None


def make_plan(
    config: Config, cluster: Cluster, accelerator: str, folder: RunFolder, environ: Mapping[str, str],
    search: Search | None,
) -> tuple[RunPlan, dict[str, Any] | None]:  # fmt: skip
    """Return the plan, and the result of a search for the largest batch, if there was one.

    Args:
        config: with `choices` and `overrides`.
    """
    own = {key: value for key, value in config.items() if key not in ("choices", "overrides")}
    record = read_record(folder.record) if folder.record.exists() else None
    limit = (record.per_device_batch_limit or record.per_device_batch_size) if record else None
    plan = RunPlan(
        config=own, choices=config["choices"], overrides=tuple(config["overrides"]), cluster=cluster,
        accelerator=accelerator, folder=folder, batch=resolve_batch(config, cluster, limit),
        initial_weights=config.get("ckpt_path"),
    )  # fmt: skip
    if not any(folder.checkpoints.glob("*.json")):  # else the run goes on from its own
        plan = find_weights(plan)
    found = None
    if asks_for_largest(config):
        size = ((config_before(folder) or {}).get("data") or {}).get("global_batch_size")
        if not isinstance(size, int):
            assert search is not None, "this script cannot look for a batch"
            log.info("Looking for the largest batch …")
            found = search(plan, environ)
            size = int(found["global"])
        plan = replace(plan, batch=resolve_batch(config, cluster, limit, size))
    if config["task_name"] == "train":
        plan = replace(plan, learning_rates=scaled_learning_rates(config["optimizer"], plan.batch))
    return plan, found


def find_weights(plan: RunPlan) -> RunPlan:
    """Return the plan with the file of the user's ckpt_path; rank 0 reads it and broadcasts it.

    Raises:
        UserError: there is none.
    """
    if not (stated := plan.config.get("ckpt_path")):
        return plan
    from lockstep.storage.fetch import locate_checkpoint

    logs = Path(plan.config["paths"]["log_dir"])
    found = locate_checkpoint(str(stated), logs, plan.config.get("s3"), logs / "cache")
    return replace(plan, initial_weights=str(found.resolve()))


def begin(plan: RunPlan, fresh: bool) -> RunPlan:
    """Write config.yaml and the first record of a run; check that a resumed one is the same run.

    Returns:
        The plan, with the checkpoint that a resumed run goes on from.
    """
    folder, previous = plan.folder, None
    if not fresh:
        previous = read_record(folder.record)
        check_resumable(plan, previous)
    if previous is not None or plan.config.get("resume") == "auto":
        checkpoint = newest_whole(folder.checkpoints)
        if previous is not None or checkpoint:
            place = checkpoint.name if checkpoint else "its start: no whole checkpoint"
            log.info(f"Resuming {folder.run_id} from {place}.")
        if checkpoint:
            sidecar = read_sidecar(checkpoint)
            plan = replace(plan, resume=ResumePoint(sidecar.step if sidecar else 0, str(checkpoint.resolve())))
        else:  # anew, from the weights that the user named
            plan = replace(find_weights(plan), resume=ResumePoint(0))
    folder.path.mkdir(parents=True, exist_ok=True)
    record = first_record(plan)
    record.summary = _changes_of_recipe(plan)
    if previous is None:  # a resume writes it when its ranks are built: one that fails leaves what ran before
        write_config(plan)
    else:
        record = continued(previous, record, step=plan.resume_step or 0, checkpoint=plan.checkpoint)
    if previous is None and (diff := provenance.code_diff(REPOSITORY) if record.code.dirty else ""):
        write_atomically(folder.code_diff, lambda file: file.write(redact_text(diff)))
    write_record(folder.record, record)
    return plan


def _changes_of_recipe(plan: RunPlan) -> dict[str, Any]:
    """Return what the options change in the recipe that they choose, for the page; {} for an evaluation."""
    from lockstep.logbook.folders import changes  # with numpy, which an early refusal does without

    if plan.config["task_name"] != "train":
        return {}
    kept = ("experiment=", "+experiment=", "hydra.searchpath=")
    recipe = compose("train", [word for word in plan.overrides if word.startswith(kept)])
    try:
        return changes({**plain(recipe), "choices": chosen_options(recipe)}, as_run(plan), plan.overrides)
    except UserError:  # it needs an option, as data.root
        return {}


def write_config(plan: RunPlan) -> None:
    import yaml

    write_atomically(plan.folder.config, lambda file: yaml.safe_dump(as_run(plan), file, sort_keys=False))


IGNORED_ON_RESUME = (
    "resume", "run_id", "ckpt_path", "initial_weights", "overrides", "choices", "resume_step", "per_device_batch_size",
    "trainer", "paths", "tags", "test", "s3", "hardware", "callbacks", "logger", "debug", "optimized_metric",
    "sweep_dir", "task_name", "logbook", "verbose", "quiet",
)  # fmt: skip


# Options that may differ: data_hash tells what the data are, and config.yaml has the scaled learning rates.
MAY_DIFFER = {"data.root", "data.cache_dir", "data.download_dir", "data.eval_batch_size", "data.num_workers",
              "data.path", "optimizer.scale_lr_with_batch"}  # fmt: skip


def check_resumable(plan: RunPlan, previous: RunRecord) -> None:
    """
    Raises:
        UserError: the run is over, or an option differs that cannot be changed within a run.
    """
    folder, before, now = plan.folder, dict(config_before(plan.folder) or {}), as_run(plan)
    if is_over(now, folder, previous):
        more = "steps" if _ended_by_steps(folder, previous) else "epochs"
        more = "time" if previous.ended_by == "max_time" else more
        raise UserError(
            f"The run {folder.run_id} is finished ({previous.epochs} epochs): give more trainer.max_{more} to go on."
        )
    longest = [(tree.get("trainer") or {}).get("max_epochs") for tree in (before, now)]
    if longest[0] != longest[1] and "_target_" in (now.get("scheduler") or {}):
        log.info(
            f"trainer.max_epochs was {longest[0]}, now {longest[1]}: the learning rate's schedule is stretched over "
            "the new length, and may jump."
        )
    typed = {key_of(word) for word in plan.overrides}
    for key in sorted(before.keys() & now.keys() - {*IGNORED_ON_RESUME}, key=str):
        if differs := _difference(before[key], now[key], key, typed):
            raise UserError(
                f"The run {folder.run_id} was started with another {key} ({differs}): "
                "resume it with the same options, or start a new run with ckpt_path=."
            )


def _difference(before: Any, now: Any, path: str, typed: set[str]) -> str | None:
    """Return the first value that differs; a key that another version lacks counts only if an override names it."""
    if before == now or path in MAY_DIFFER:
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted((key for key in now if key in before or f"{path}.{key}" in typed), key=str)
        found = (_difference(before.get(key), now[key], f"{path}.{key}", typed) for key in keys)
        return next(filter(None, found), None)
    return f"{path.partition('.')[2] or path} was {before!r}, now {now!r}"


def first_record(plan: RunPlan) -> RunRecord:
    """Return the record before anything has happened."""
    now, folder, cluster, config = utc_now(), plan.folder, plan.cluster, plan.config
    typed = [_as_typed(sys.argv[0]), *sys.argv[1:]]
    hardware, chooser = config.get("hardware") or {}, (config.get("callbacks") or {}).get("checkpoints") or {}
    named = plan.initial_weights or config["model"].get("weights")
    starts_from = Path(named) if isinstance(named, str) and not plan.resume_step and Path(named).is_file() else None
    return RunRecord(
        run_id=folder.run_id, task_name=config["task_name"], tags=list(config["tags"]), status="running", phase="start",
        started_at=now, updated_at=now, command=command_line(typed, cluster, plan.accelerator == "gpu"),
        overrides=list(plan.overrides), experiment=config.get("experiment_name") or plan.choices.get("experiment"),
        code=CodeState(**provenance.code_state(REPOSITORY)), versions=provenance.versions(),
        hosts=[provenance.host(cluster.node_rank)], launcher=cluster.launcher, agent=agent_id(environment()),
        model=plan.model_name, data=plan.data_name, trainer=plan.choices["trainer"], world_size=cluster.world_size,
        num_nodes=cluster.num_nodes, devices=cluster.devices, num_gpus=gpus_sharing_batch(plan.trainer),
        accelerator=plan.accelerator, precision=plan.trainer["precision"], seed=config["seed"],
        global_batch_size=plan.batch.global_size, per_device_batch_size=plan.batch.per_device,
        per_device_batch_limit=plan.batch.per_device, accumulate_grad_batches=plan.batch.accumulate,
        max_epochs=plan.trainer["max_epochs"],
        max_time_s=seconds_of(stated, "trainer.max_time") if (stated := plan.trainer["max_time"]) else None,
        monitor=chooser.get("monitor", "val/acc"), monitor_mode=chooser.get("mode", "max"), epochs=0, steps=0,
        cost={"price_per_hour": hardware.get("price_per_hour_usd")},
        initial_weights=None if plan.resume_step else plan.initial_weights,
        initial_weights_sha256=sha256_of(starts_from) if starts_from else None,
        resumed_from=plan.checkpoint if plan.resume_step else None,
    )  # fmt: skip


def _as_typed(program: str) -> str:
    path = Path(program).resolve()
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name
