"""The start of a run: its folder, config.yaml and first record; for a resumed run, that it is the same one."""

import logging
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lockstep.config.compose import chosen_options, compose, plain
from lockstep.launch.launchers import Cluster, agent_id, launcher_named, named_run
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
from lockstep.runs.config import Config, read_only
from lockstep.runs.durations import seconds_of
from lockstep.runs.environment import environment
from lockstep.runs.errors import UserError
from lockstep.runs.files import lock, sha256_of, utc_now, write_atomically
from lockstep.runs.folder import RunFolder, checked_run_id, find_run, new_run_id
from lockstep.runs.full_disk import is_full
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import CodeState, RunRecord, continued, read_record, write_record
from lockstep.runs.redact import redact_text
from lockstep.storage.checkpoint_files import newest_whole, read_sidecar
from lockstep.strategies.placement import gpus_sharing_batch

log = logging.getLogger(__name__)

Search = Callable[[RunPlan, Mapping[str, str]], dict[str, Any]]  # for the largest batch


def run_folder(config: Config, run_id: str | None, environ: Mapping[str, str]) -> tuple[RunFolder, bool]:
    """The folder of this run, not yet made, and whether the run is new.

    Args:
        run_id: that its processes have agreed on; None: a new one.
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
        if _restarted_from_outside(folder, environ):
            return folder, False
        raise UserError(
            f"The run {folder.run_id} exists already: resume={folder.run_id} goes on with it, "
            "another run_id= starts anew."
        )
    return folder, True


def check_writable(logs: Path) -> None:
    """Before any work: a run that cannot write keeps nothing.

    Raises:
        UserError: the folder cannot be made, or nothing can be written there.
    """
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logs):
            pass
    except OSError as error:
        if is_full(error):
            raise
        raise UserError(
            f"{logs} cannot be written ({error.strerror}): give another place with paths.log_dir=."
        ) from None


def hold_run_lock(folder: RunFolder, wait_s: float = 330.0) -> IO[str]:
    """Hold the run for as long as this process lives: a second one would remove the first one's checkpoints.

    One that is just ending (with its last upload), or whose machine was lost (a network file system frees its locks in
    a minute or two), is waited for.

    Returns:
        What to keep open.
    Raises:
        UserError: another process still trains it.
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
    """It has finished, and this start asks for no more epochs, steps or time."""
    if previous.ended_by == "max_time":
        return previous.status == "finished" and not _has_time_left(config, previous)
    stored, steps = config_before(folder) or {}, config["trainer"]["max_steps"]
    by_steps = previous.steps == (stored.get("trainer") or {}).get("max_steps")
    longer = by_steps and (steps == -1 or steps > (previous.steps or 0))
    enough = not longer if by_steps else config["trainer"]["max_epochs"] <= (previous.epochs or 0)
    return previous.status == "finished" and enough


def _has_time_left(config: Config, previous: RunRecord) -> bool:
    stated = config["trainer"]["max_time"]
    return not stated or seconds_of(stated, "trainer.max_time") > (previous.fit_seconds or 0.0)


def finished_already(config: Config, environ: Mapping[str, str]) -> RunFolder | None:
    """The run that resume=auto names, where nothing is left to train: a restart from outside found it done."""
    named = named_run(config, environ)
    if config.get("resume") != "auto" or not named or config["task_name"] != "train":
        return None
    folder = RunFolder(runs_folder(config, Path(config["paths"]["log_dir"])) / checked_run_id(named))
    if not folder.record.exists() or not config_before(folder):
        return None
    return folder if is_over(config, folder, read_record(folder.record)) else None


def _restarted_from_outside(folder: RunFolder, environ: Mapping[str, str]) -> bool:
    """torchrun's agent started its ranks again, or SLURM requeued the job: the same run goes on by itself."""
    agent = agent_id(environ)
    return agent is not None and read_record(folder.record).agent == agent


def make_plan(
    config: Config,
    cluster: Cluster,
    accelerator: str,
    folder: RunFolder,
    environ: Mapping[str, str],
    search: Search | None,
) -> tuple[RunPlan, Any]:
    """The plan, and what a search for the largest batch has found; None where there was none.

    Args:
        config: with `choices` and `overrides`.
    """
    own = {key: value for key, value in config.items() if key not in ("choices", "overrides")}
    limit = _limit_before(folder)
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
        size = _batch_before(folder)
        if size is None:
            assert search is not None, "this script cannot look for a batch"
            log.info("Looking for the largest batch …")
            found = search(plan, environ)
            size = int(found["global"])
        plan = replace(plan, batch=resolve_batch(config, cluster, limit, size))
    if config["task_name"] == "train":
        plan = replace(plan, learning_rates=scaled_learning_rates(config["optimizer"], plan.batch))
    return plan, found


def _limit_before(folder: RunFolder) -> float | None:
    """Return how many images a device of the run takes at a time; None for a new run."""
    if not folder.record.exists():
        return None
    record = read_record(folder.record)
    return record.per_device_batch_limit or record.per_device_batch_size


def _batch_before(folder: RunFolder) -> int | None:
    size = ((config_before(folder) or {}).get("data") or {}).get("global_batch_size")
    return size if isinstance(size, int) else None


def find_weights(plan: RunPlan) -> RunPlan:
    """The plan with the user's ckpt_path, from whose weights a run starts, as a file of this machine.

    A node other than the first may lack it: rank 0 reads it and broadcasts it.

    Raises:
        UserError: on node 0, where there is none.
    """
    stated = plan.config.get("ckpt_path")
    if not stated:
        return plan
    from lockstep.storage.fetch import locate_checkpoint

    logs = Path(plan.config["paths"]["log_dir"])
    try:
        found = locate_checkpoint(str(stated), logs, plan.config.get("s3"), logs / "cache")
        return replace(plan, initial_weights=str(found))
    except UserError:
        if plan.cluster.node_rank == 0:
            raise
        return plan


def begin(plan: RunPlan, fresh: bool) -> RunPlan:
    """Make the folder, config.yaml and the first record; for a resumed run check that it is the same one.

    Returns:
        The plan, of a run that goes on with the point where it does.
    """
    folder = plan.folder
    previous = None if fresh else read_record(folder.record)
    if previous is not None:
        check_resumable(plan, previous)
    if previous is not None or plan.config.get("resume") == "auto":
        plan = _at_newest_checkpoint(plan, is_told=previous is not None)
    if plan.initial_weights:
        plan = replace(plan, initial_weights=str(Path(plan.initial_weights).resolve()))
    folder.path.mkdir(parents=True, exist_ok=True)
    if plan.config["task_name"] == "train":
        recipe = compose("train", [word for word in plan.overrides if word.startswith("experiment=")])
        _write_yaml({**plain(recipe), "choices": chosen_options(recipe)}, folder.defaults)
    write_config(plan)
    _write_first_record(plan, previous)
    return plan


def _at_newest_checkpoint(plan: RunPlan, *, is_told: bool) -> RunPlan:
    """Of the run's own, by name; without one the run begins anew, from the weights that the user named."""
    checkpoint = newest_whole(plan.folder.checkpoints)
    if is_told or checkpoint:
        place = checkpoint.name if checkpoint else "its start: no whole checkpoint"
        log.info(f"Resuming {plan.folder.run_id} from {place}.")
    if not checkpoint:
        return replace(find_weights(plan), resume=ResumePoint(0))
    sidecar = read_sidecar(checkpoint)
    step = sidecar.step if sidecar else 0
    return replace(plan, resume=ResumePoint(step, str(checkpoint.resolve())))


def write_config(plan: RunPlan) -> None:
    import yaml

    write_atomically(plan.folder.config, lambda file: yaml.safe_dump(as_run(plan), file, sort_keys=False))


def _write_yaml(tree: Config, path: Path) -> None:
    import yaml

    write_atomically(path, lambda file: yaml.safe_dump(tree, file, sort_keys=False))


def _write_first_record(plan: RunPlan, previous: RunRecord | None) -> None:
    folder, record = plan.folder, first_record(plan)
    if previous is not None:
        record = continued(previous, record, step=plan.resume_step or 0, checkpoint=plan.checkpoint)
    elif diff := provenance.code_diff(REPOSITORY) if record.code.dirty else "":
        write_atomically(folder.code_diff, lambda file: file.write(redact_text(diff)))
    write_record(folder.record, record)


IGNORED_ON_RESUME = (
    "resume", "run_id", "ckpt_path", "initial_weights", "overrides", "choices", "resume_step", "per_device_batch_size",
    "trainer", "paths", "tags", "test", "s3", "hardware", "callbacks", "logger", "debug", "optimized_metric",
    "sweep_dir", "task_name", "logbook", "verbose", "quiet",
)  # fmt: skip


def check_resumable(plan: RunPlan, previous: RunRecord) -> None:
    folder, stored, config = plan.folder, config_before(plan.folder) or {}, as_run(plan)
    if is_over(config, folder, previous):
        by_steps = previous.steps == (stored.get("trainer") or {}).get("max_steps")
        more = "time" if previous.ended_by == "max_time" else "steps" if by_steps else "epochs"
        raise UserError(
            f"The run {folder.run_id} is finished ({previous.epochs} epochs): give more trainer.max_{more} to go on."
        )
    longest = [(tree.get("trainer") or {}).get("max_epochs") for tree in (stored, config)]
    if longest[0] != longest[1] and "_target_" in (config.get("scheduler") or {}):
        log.info(
            f"trainer.max_epochs was {longest[0]}, now {longest[1]}: the learning rate's schedule is stretched over "
            "the new length, and may jump."
        )
    before, now = (_without_places(tree) for tree in (stored, config))
    for key in sorted(before.keys() | now.keys(), key=str):
        if key not in IGNORED_ON_RESUME and before.get(key) != now.get(key):
            differs = _difference(before.get(key), now.get(key))
            raise UserError(
                f"The run {folder.run_id} was started with another {key} ({differs}): "
                "resume it with the same options, or start a new run with ckpt_path=."
            )


def _without_places(config: Config) -> Config:
    """Where the data lies and what a machine can hold of it may differ; what it is, data_hash tells."""
    of_machine = (
        "root", "cache_dir", "download_dir", "eval_batch_size", "cache_gib", "device_cache_gib", "num_workers", "path",
        "memory_limit_gib", "max_pixels",
    )  # fmt: skip
    data = {key: value for key, value in (config.get("data") or {}).items() if key not in of_machine}
    return {**config, "data": data}


def _difference(before: Any, now: Any, path: str = "") -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys(), key=str):
            if before.get(key) != now.get(key):
                return _difference(before.get(key), now.get(key), f"{path}.{key}")
    return f"{path.lstrip('.')} was {before!r}, now {now!r}"


def first_record(plan: RunPlan) -> RunRecord:
    """The record before anything has happened."""
    now, folder, cluster, config = utc_now(), plan.folder, plan.cluster, plan.config
    launcher, typed = launcher_named(cluster.launcher), [_as_typed(sys.argv[0]), *sys.argv[1:]]
    hardware, chooser = config.get("hardware") or {}, (config.get("callbacks") or {}).get("checkpoints") or {}
    return RunRecord(
        run_id=folder.run_id,
        task_name=config["task_name"],
        tags=list(config["tags"]),
        status="running",
        phase="start",
        started_at=now,
        updated_at=now,
        command=launcher.command_line(typed, cluster, plan.accelerator == "gpu"),
        overrides=list(plan.overrides),
        experiment=config.get("experiment_name") or plan.choices.get("experiment"),
        code=CodeState(**provenance.code_state(REPOSITORY)),
        versions=provenance.versions(),
        hosts=[provenance.host(cluster.node_rank)],
        launcher=cluster.launcher,
        agent=agent_id(environment()),
        model=plan.model_name,
        data=plan.data_name,
        trainer=plan.choices["trainer"],
        world_size=cluster.world_size,
        num_nodes=cluster.num_nodes,
        devices=cluster.devices,
        num_gpus=gpus_sharing_batch(plan.trainer),
        accelerator=plan.accelerator,
        precision=plan.trainer["precision"],
        seed=config["seed"],
        global_batch_size=plan.batch.global_size,
        per_device_batch_size=plan.batch.per_device,
        per_device_batch_limit=plan.batch.per_device,
        accumulate_grad_batches=plan.batch.accumulate,
        max_epochs=plan.trainer["max_epochs"],
        max_time_s=seconds_of(stated, "trainer.max_time") if (stated := plan.trainer["max_time"]) else None,
        monitor=chooser.get("monitor", "val/acc"),
        monitor_mode=chooser.get("mode", "max"),
        epochs=0,
        steps=0,
        cost={"price_per_hour": hardware.get("price_per_hour_usd")},
        initial_weights=None if plan.resume_step else plan.initial_weights,
        initial_weights_sha256=_weights_sha256(plan),
        resumed_from=plan.checkpoint if plan.resume_step else None,
    )


def _weights_sha256(plan: RunPlan) -> str | None:
    """Of the file that a new run starts from."""
    named = plan.initial_weights or plan.config["model"].get("weights")
    is_file = not plan.resume_step and isinstance(named, str) and Path(named).is_file()
    return sha256_of(Path(named)) if is_file else None


def _as_typed(program: str) -> str:
    path = Path(program).resolve()
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name
