"""The start of a run: its config if it is resumed, its folder and lock, its plan, config.yaml and first record."""

import logging
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lockstep.config import keys
from lockstep.config.changes import Change, changes_of, differences
from lockstep.config.compose import compose, defaults_of, plain, whole_config
from lockstep.config.foreign import OF_RUN, accepted
from lockstep.config.schema import key_of
from lockstep.launch.launchers import Cluster, agent_id, is_first_on_node, launcher_of, named_run
from lockstep.launch.plan import RunPlan, as_run, is_lockstep_data, resolve_batch
from lockstep.runs import provenance
from lockstep.runs.batch import states_accumulation
from lockstep.runs.config import Config, data_name, flatten, model_name, seconds_of
from lockstep.runs.environment import environment
from lockstep.runs.errors import UserError, is_full
from lockstep.runs.files import lock, locked_file, sha256_of, utc_now, write_atomically
from lockstep.runs.folder import RunFolder, checked_run_id, find_run, new_run_id, read_config
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import RunRecord, continued, read_record, write_record
from lockstep.runs.redact import redact, redact_text
from lockstep.storage.checkpoint_files import complete, newest_whole, read_sidecar

log = logging.getLogger(__name__)

Search = Callable[[RunPlan], dict[str, Any]]  # for the largest batch


def folder_of(config: Config, run_id: str) -> RunFolder:
    """Return the folder of a run of this id, which need not exist."""
    runs = Path(config["paths"]["log_dir"]) / config["task_name"] / "runs"
    return RunFolder((Path(config["sweep_dir"]) if config.get("sweep_dir") else runs) / checked_run_id(run_id))


def find_stored(overrides: list[str]) -> Config | None:
    """Return the config of the run to resume; None for a new run, or on a node that does not have it.

    A run that only its bucket knows is fetched first, by one process of each node.
    """
    if not any(key_of(word) == "resume" for word in overrides):
        return None
    config = plain(compose("train", [word for word in overrides if keys.finds_run(key_of(word))]))
    environ, is_auto = environment(), config["resume"] == "auto"
    folder = _folder_to_resume(config, environ)
    if folder is None:
        return None

    if is_auto and (config.get("s3") or {}).get("uri"):
        _fetch(config, folder, environ)
    # A job script gives all options each time.
    # Those of an attempt that trained nothing may have been wrong.
    if is_auto and folder.config.exists() and not has_trained(folder):
        return None
    before = config_before(folder)
    if before and not folder.config.exists():
        before = _taken_from_bucket(before, overrides, folder, environ)
    if before and launcher_of(environ):
        words = [str(word) for word in before.get("overrides") or ()]
        before["overrides"] = [word for word in words if key_of(word) not in keys.RANK_COUNTS]
    return before


def _folder_to_resume(config: Config, environ: Mapping[str, str]) -> RunFolder | None:
    """Return the folder of the run that resume= names; None if there is none on this node."""
    run_id = named_run(config, environ) if config["resume"] == "auto" else config["resume"]
    if not run_id:
        return None
    try:
        if config["resume"] == "auto":
            return folder_of(config, run_id)
        return find_run(Path(config["paths"]["log_dir"]), run_id)
    except UserError:  # another node may have it; the launch names what is wrong with it
        return None


def _fetch(config: Config, folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Fetch a run that only its bucket knows, by one process of each node."""
    from lockstep.storage.fetch import fetch_run
    from lockstep.storage.s3 import Bucket

    if not is_first_on_node(environ):
        # The first rank of the node logs it.
        logging.getLogger("lockstep.storage").setLevel(logging.WARNING)
    with locked_file(folder.path.parent / f".{folder.run_id}.lock"):
        fetch_run(Bucket.of(config["s3"]).at(folder.run_id), folder)


def _taken_from_bucket(
    before: Config, overrides: list[str], folder: RunFolder, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the part of a bucket's config that may be used; log what has to be given again.

    Nothing is taken for a group whose class the command line names, as with task._target_=.
    """
    typed = {key_of(word) for word in overrides}
    roots = tuple(root for root in OF_RUN if f"{root}._target_" not in typed)
    whose = f"The config of the run {folder.run_id} in its bucket"
    taken, rejected = accepted(before, roots, whose)
    left = [key for key in rejected if key not in typed]
    if left and is_first_on_node(environ):
        again = "give them again to have them"
        log.info(f"Not taken from the bucket's config, {again}: {', '.join(left)}")
    return taken


def has_trained(folder: RunFolder) -> bool:
    """Return whether a run has trained a step or finished: otherwise its id can be used again, with other options."""
    if any(folder.checkpoints.glob("*.ckpt")):
        return True
    record = read_record(folder.record) if folder.record.exists() else RunRecord()
    return bool(record.steps) or record.status == "finished"


def config_before(folder: RunFolder) -> dict[str, Any] | None:
    """Return the config that the run was last started with, from its folder or its bucket."""
    path = folder.config if folder.config.exists() else folder.bucket_config
    return read_config(path) if path.exists() else None


def finished_already(config: Config) -> RunFolder | None:
    """Return the run of resume=auto if nothing is left to train: a job script may start it again and again."""
    named = named_run(config, environment())
    if config.get("resume") != "auto" or not named or config["task_name"] != "train":
        return None
    folder = folder_of(config, named)
    before = config_before(folder) if folder.record.exists() else None
    return folder if before and what_is_over(config, before, read_record(folder.record)) else None


def what_is_over(config: Config, before: Config, previous: RunRecord) -> str | None:
    """Return epochs, steps or time if a run has finished, and this start asks for no more of them."""
    now, stored = config["trainer"], before.get("trainer") or {}
    if previous.ended_by == "max_time":
        what, allowed = "time", now["max_time"] and seconds_of(now["max_time"], "trainer.max_time")
        is_over = bool(allowed) and allowed <= (previous.fit_seconds or 0)
    elif previous.steps == stored.get("max_steps"):
        what, is_over = "steps", 0 <= now["max_steps"] <= (previous.steps or 0)
    else:
        what, is_over = "epochs", 0 < (now["max_epochs"] or 0) <= (previous.epochs or 0)
    is_same = all(now.get(key) == stored.get(key) for key in ("max_epochs", "max_steps", "max_time"))
    is_over = is_over or (is_same and what != "time")  # also if a callback, as EarlyStopping, ended it
    return what if is_over and previous.status == "finished" else None


def check_resumable(folder: RunFolder, now: Config, previous: RunRecord) -> None:
    """Refuse to resume a run that is over, or with an option that cannot change within a run.

    Args:
        now: the config of this start, with the values that the run has.
    """
    before = config_before(folder) or {}
    if more := what_is_over(now, before, previous):
        raise UserError(
            f"The run {folder.run_id} is finished ({previous.epochs} epochs): give more trainer.max_{more} to go on."
        )
    changes = changes_of(before, now, defaults_of)
    for change in changes:
        if not keys.may_resume_change(change.key):
            group, _, name = change.key.partition(".")
            raise UserError(
                f"The run {folder.run_id} was started with another {group} "
                f"({name or group} {change}): resume it with the same options, or start a new run "
                "with ckpt_path=."
            )
    # A module with several optimizers passes max_steps by itself.
    if any(change.key in keys.LENGTHS for change in changes):
        check_length(folder, now)
    log_changes(changes, now)


def check_length(folder: RunFolder, now: Config) -> None:
    """Refuse a length that the run's newest checkpoint has passed."""
    sidecars = [sidecar for _, sidecar in complete(folder.checkpoints) if not sidecar.weights_only]
    if not sidecars:
        return
    newest = sidecars[0]
    epochs = now["trainer"]["max_epochs"] or -1
    steps = now["trainer"]["max_steps"]
    if 0 < epochs <= newest.epoch:
        reached, option = f"epoch {newest.epoch + 1}", f"trainer.max_epochs={newest.epoch + 1}"
    elif 0 <= steps < newest.step:
        reached, option = f"step {newest.step}", f"trainer.max_steps={newest.step}"
    else:
        return
    raise UserError(
        f"The run {folder.run_id} is in {reached} already: give {option} or more to go on, "
        f"or start a new run with ckpt_path={folder.run_id}."
    )


def log_changes(changes: list[Change], now: Config) -> None:
    """Log what a resume changes, and how."""
    lengths = [change for change in changes if change.key in keys.LENGTHS]
    for change in lengths:
        note = ""
        if now.get("scheduler"):
            note = ": the learning rate's schedule is stretched over the new length, and may jump"
        log.info(f"{change.key} {change}{note}.")
    others = [f"{change.key} {change}" for change in changes if change not in lengths]
    if others:
        log.info(f"Changed from here on: {'; '.join(others)}.")


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
    if lock(handle, wait_s=0):
        return handle
    log.info(f"The run {folder.run_id} is trained by another process: waiting for it to end …")
    if lock(handle, wait_s):
        return handle
    handle.close()
    raise UserError(
        f"The run {folder.run_id} is still trained by another process, on this machine or on one that shares "
        f"{folder.path.parent}: end it; where its machine is gone, remove {folder.alive}."
    )


def make_plan(
    config: Config, cluster: Cluster, accelerator: str, folder: RunFolder, fresh: bool, search: Search | None
) -> tuple[RunPlan, dict[str, Any]]:
    """Return the plan, and the result of a search for the largest batch, {} if there was none."""
    record = RunRecord() if fresh else read_record(folder.record)
    limit = record.per_device_batch_limit or record.per_device_batch_size
    size = None
    if not (is_lockstep_data(config) or states_accumulation(config["overrides"])):
        size = (record.world_size or 0) * (record.accumulate_grad_batches or 1) or None
    plan = RunPlan(config, cluster, accelerator, folder, resolve_batch(config, cluster, limit, size))
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

        weights = locate_checkpoint(str(stated), Path(config["paths"]["log_dir"]), config.get("s3"))
        plan = replace(plan, checkpoint=str(weights.resolve()))
    folder.path.mkdir(parents=True, exist_ok=True)
    record = first_record(plan)
    if previous is None:  # a resume writes it when its ranks are built: one that fails leaves what ran before
        write_config(plan)
        if diff := provenance.code_diff(REPOSITORY) if record.code["dirty"] else "":
            write_atomically(folder.code_diff, lambda file: file.write(redact_text(diff)))
    else:
        record = continued(previous, record, step=plan.resume_step or 0)
    if largest_batch:
        record.take({"largest_batch": largest_batch})
    write_record(folder.record, record)
    return plan


def _changes_of_recipe(plan: RunPlan) -> list[list[Any]]:
    """Return [option, value in the recipe, value here] for what the command line changes; [] for an evaluation."""
    if plan.config["task_name"] != "train":
        return []
    overrides = plan.config["overrides"]
    choosing = ("experiment=", "+experiment=", "hydra.searchpath=")
    words = [word for word in overrides if word.startswith(choosing)]
    try:
        recipe = flatten(redact(whole_config(compose("train", words))))
    except UserError:  # it needs an option, as data.root
        return []

    config = flatten(redact(as_run(plan)))
    changed = differences([recipe, config], keys.is_told_of_a_run)
    rows = []
    for key in map(key_of, overrides):
        names = [name for name in changed if keys.is_below(name, key)]
        if f"choices.{key}" in config:
            names = [f"choices.{key}"]
        for name in names:
            if name in changed:
                rows.append([name.removeprefix("choices."), *changed.pop(name)])
    return rows


def write_config(plan: RunPlan) -> None:
    import yaml

    write_atomically(plan.folder.config, lambda file: yaml.safe_dump(as_run(plan), file, sort_keys=False))


def first_record(plan: RunPlan) -> RunRecord:
    """Return the record before anything has happened."""
    now, folder, cluster, config, batch = utc_now(), plan.folder, plan.cluster, plan.config, plan.batch
    tags = config["tags"] if isinstance(config["tags"], list | tuple) else [config["tags"]]
    program = Path(sys.argv[0]).resolve()
    script = str(program.relative_to(REPOSITORY)) if program.is_relative_to(REPOSITORY) else program.name
    hardware, chooser = config.get("hardware") or {}, (config.get("callbacks") or {}).get("checkpoints") or {}
    initial = None if plan.resume_step else plan.checkpoint
    named = None if plan.resume_step else initial or config["model"].get("weights")
    starts_from = Path(named) if isinstance(named, str) and Path(named).is_file() else None
    return RunRecord(
        run_id=folder.run_id, task_name=config["task_name"], status="running", phase="start",
        tags=[str(tag) for tag in tags if tag is not None],
        started_at=now, updated_at=now, command=f"python {shlex.join([script, *sys.argv[1:]])}",
        overrides=list(config["overrides"]), experiment=config.get("experiment_name") or plan.choices.get("experiment"),
        code=provenance.code_state(REPOSITORY), versions=provenance.versions(),
        hosts=[provenance.host(cluster.node_rank)], launcher=cluster.launcher, agent=agent_id(environment()),
        model=model_name(config), data=data_name(config), trainer=plan.choices["trainer"],
        world_size=cluster.world_size, num_nodes=cluster.num_nodes, accelerator=plan.accelerator,
        precision=plan.trainer["precision"], seed=config["seed"], global_batch_size=batch.global_size,
        per_device_batch_size=batch.per_device, per_device_batch_limit=batch.per_device,
        accumulate_grad_batches=batch.accumulate, monitor=chooser.get("monitor", "val/acc"), epochs=0, steps=0,
        cost={"price_per_hour": hardware.get("price_per_hour_usd")}, summary={"changed": _changes_of_recipe(plan)},
        initial_weights=initial, initial_weights_sha256=sha256_of(starts_from) if starts_from else None,
    )  # fmt: skip
