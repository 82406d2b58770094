"""The start of a run: its folder and lock, its plan, config.yaml and first record."""

import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lockstep.config.compose import compose, whole_config
from lockstep.config.schema import key_of
from lockstep.launch.launchers import Cluster, agent_id
from lockstep.launch.plan import RunPlan, as_run, resolve_batch
from lockstep.launch.resume import check_resumable, config_before, folder_of, has_trained
from lockstep.runs import provenance
from lockstep.runs.config import Config, data_name, differences, flatten, model_name
from lockstep.runs.environment import environment
from lockstep.runs.errors import UserError, is_full
from lockstep.runs.files import lock, sha256_of, utc_now, write_atomically
from lockstep.runs.folder import RunFolder, find_run, new_run_id
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import RunRecord, continued, read_record, write_record
from lockstep.runs.redact import redact, redact_text
from lockstep.storage.checkpoint_files import newest_whole, read_sidecar

log = logging.getLogger(__name__)

Search = Callable[[RunPlan], dict[str, Any]]  # for the largest batch


def run_folder(config: Config, run_id: str | None) -> tuple[RunFolder, bool]:
    """Return the folder of this run, not yet made, and whether the run is new.

    Args:
        run_id: None for a new one.
    """
    resume = config.get("resume")
    if resume and resume != "auto":
        folder = find_run(Path(config["paths"]["log_dir"]), resume)
    else:
        folder = folder_of(config, run_id or new_run_id())
    is_new, agent = not has_trained(folder), agent_id(environment())
    # torchrun's agent may have started its ranks again, or SLURM requeued the job
    if not (is_new or resume or (agent and read_record(folder.record).agent == agent)):
        raise UserError(
            f"The run {folder.run_id} exists already: resume={folder.run_id} continues it, "
            "another run_id= starts a new one."
        )
    return folder, is_new


def hold_run_lock(folder: RunFolder, wait_s: float = 330.0) -> IO[str]:
    """Lock the run for this process and return the file to keep open: a second one would remove its checkpoints.

    It waits for a process that is just ending, and for a lost machine, whose locks a network file system frees in a
    minute or two.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        handle = folder.alive.open("a")
    except OSError as error:
        if is_full(error):
            raise
        reason = f"{folder.path} cannot be written ({error.strerror})"
        raise UserError(f"{reason}: give another place with paths.log_dir=.") from None
    if not lock(handle, wait_s=0):
        log.info(f"The run {folder.run_id} is trained by another process: waiting for it to end …")
        if not lock(handle, wait_s):
            handle.close()
            raise UserError(
                f"The run {folder.run_id} is still trained by another process, on this machine or on one that shares "
                f"{folder.path.parent}: end it; where its machine is gone, remove {folder.alive}."
            )
    return handle


def make_plan(
    config: Config, cluster: Cluster, accelerator: str, folder: RunFolder, fresh: bool, search: Search | None
) -> tuple[RunPlan, dict[str, Any]]:
    """Return the plan, and the result of a search for the largest batch, {} if there was none."""
    record = RunRecord() if fresh else read_record(folder.record)
    limit = record.per_device_batch_limit or record.per_device_batch_size
    plan = RunPlan(config, cluster, accelerator, folder, resolve_batch(config, cluster, limit))
    if config["data"].get("global_batch_size") != "max":
        return plan, {}
    before = {} if fresh else config_before(folder) or {}
    size, found = (before.get("data") or {}).get("global_batch_size"), {}
    if not isinstance(size, int):
        assert search is not None, "this script cannot look for a batch"
        log.info("Looking for the largest batch …")
        found = search(plan)
        size = int(found["global"])
    return replace(plan, batch=resolve_batch(config, cluster, limit, size)), found


def begin(
    config: Config, cluster: Cluster, accelerator: str, folder: RunFolder, fresh: bool, search: Search | None
) -> RunPlan:
    """Write config.yaml and the first record of a run; check that a resumed one is the same run.

    Returns:
        The plan, with the checkpoint from which a resumed run continues or a new one takes its weights.
    """
    plan, largest_batch = make_plan(config, cluster, accelerator, folder, fresh, search)
    previous = None if fresh else read_record(folder.record)
    if previous:
        check_resumable(folder, as_run(plan), previous)
    if previous or config.get("resume") == "auto":
        checkpoint = newest_whole(folder.checkpoints)
        if previous or checkpoint:
            name = checkpoint.name if checkpoint else "its start: no whole checkpoint"
            log.info(f"Resuming {folder.run_id} from {name}.")
        sidecar, path = (read_sidecar(checkpoint), str(checkpoint.resolve())) if checkpoint else (None, None)
        plan = replace(plan, resume_step=sidecar.step if sidecar else 0, checkpoint=path)
    if (stated := config.get("ckpt_path")) and not plan.checkpoint:
        from lockstep.storage.fetch import locate_checkpoint

        logs = Path(config["paths"]["log_dir"])
        weights = locate_checkpoint(str(stated), logs, config.get("s3"), logs / "cache")
        plan = replace(plan, checkpoint=str(weights.resolve()))
    folder.path.mkdir(parents=True, exist_ok=True)
    record = first_record(plan)
    if previous is None:  # a resume writes it when its ranks are built: one that fails leaves what ran before
        write_config(plan)
        if diff := provenance.code_diff(REPOSITORY) if record.code["dirty"] else "":
            write_atomically(folder.code_diff, lambda file: file.write(redact_text(diff)))
    else:
        record = continued(previous, record, step=plan.resume_step or 0, checkpoint=plan.checkpoint)
    if largest_batch:
        record.take({"largest_batch": largest_batch})
    write_record(folder.record, record)
    return plan


def _changes_of_recipe(plan: RunPlan) -> list[list[Any]]:
    """Return [option, value in the recipe, value here] for what the command line changes; [] for an evaluation."""
    overrides, rows = plan.config["overrides"], []
    if plan.config["task_name"] != "train":
        return []
    kept = ("experiment=", "+experiment=", "hydra.searchpath=")
    recipe = compose("train", [word for word in overrides if word.startswith(kept)])
    try:
        before = flatten(redact(whole_config(recipe)))
    except UserError:  # it needs an option, as data.root
        return []
    here = flatten(redact(as_run(plan)))
    found = differences([before, here])
    for key in map(key_of, overrides):
        names = [f"choices.{key}"] if f"choices.{key}" in here else [n for n in found if f"{n}.".startswith(f"{key}.")]
        rows += [[name.removeprefix("choices."), *found.pop(name)] for name in names if name in found]
    return rows


def write_config(plan: RunPlan) -> None:
    import yaml

    write_atomically(plan.folder.config, lambda file: yaml.safe_dump(as_run(plan), file, sort_keys=False))


def first_record(plan: RunPlan) -> RunRecord:
    """Return the record before anything has happened."""
    now, folder, cluster, config, batch = utc_now(), plan.folder, plan.cluster, plan.config, plan.batch
    tags = [config["tags"]] if isinstance(config["tags"], str) else list(config["tags"] or ())
    program = Path(sys.argv[0]).resolve()
    script = str(program.relative_to(REPOSITORY)) if program.is_relative_to(REPOSITORY) else program.name
    hardware, chooser = config.get("hardware") or {}, (config.get("callbacks") or {}).get("checkpoints") or {}
    initial, resumed = (None, plan.checkpoint) if plan.resume_step else (plan.checkpoint, None)
    named = initial or config["model"].get("weights")
    starts_from = Path(named) if isinstance(named, str) and not resumed and Path(named).is_file() else None
    return RunRecord(
        run_id=folder.run_id, task_name=config["task_name"], tags=tags, status="running", phase="start",
        started_at=now, updated_at=now, command=f"python {shlex.join([script, *sys.argv[1:]])}",
        overrides=list(config["overrides"]), experiment=config.get("experiment_name") or plan.choices.get("experiment"),
        code=provenance.code_state(REPOSITORY), versions=provenance.versions(),
        hosts=[provenance.host(cluster.node_rank)], launcher=cluster.launcher, agent=agent_id(environment()),
        model=model_name(config), data=data_name(config), trainer=plan.choices["trainer"],
        world_size=cluster.world_size, num_nodes=cluster.num_nodes, accelerator=plan.accelerator,
        precision=plan.trainer["precision"], seed=config["seed"], global_batch_size=batch.global_size,
        per_device_batch_size=batch.per_device, per_device_batch_limit=batch.per_device,
        accumulate_grad_batches=batch.accumulate, monitor=chooser.get("monitor", "val/acc"),
        monitor_mode=chooser.get("mode", "max"), epochs=0, steps=0,
        cost={"price_per_hour": hardware.get("price_per_hour_usd")}, summary={"changed": _changes_of_recipe(plan)},
        initial_weights=initial, initial_weights_sha256=sha256_of(starts_from) if starts_from else None,
        resumed_from=resumed,
    )  # fmt: skip
