"""Write what is known when a run begins: config.yaml, the first record and a diff of the code.

The diff is of uncommitted code. The first lines of the output are formatted here, too.
"""

import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from lockstep.config import keys
from lockstep.config.changes import differences
from lockstep.config.compose import compose, whole_config
from lockstep.config.schema import key_of
from lockstep.process.environment import environment
from lockstep.process.errors import UserError
from lockstep.process.files import sha256_of, utc_now, write_atomically
from lockstep.process.project import REPOSITORY
from lockstep.process.redact import redact, redact_diff
from lockstep.ranks.find import find_restart_id
from lockstep.records import provenance
from lockstep.records.batch import DEFAULT_EVAL_BATCH_SIZE
from lockstep.records.config import Config, data_name, flatten, model_name
from lockstep.records.record import (
    RunRecord,
    locked_record,
    merge_restart,
    read_record,
    write_record,
)
from lockstep.runs.batch_size import is_lockstep_data
from lockstep.runs.run import Run
from lockstep.storage.pointers import new_uuid, read_uuid

log = logging.getLogger(__name__)

# Overrides with these prefixes choose the recipe that the other overrides change.
RECIPE_PREFIXES = ("experiment=", "+experiment=", "hydra.searchpath=")


def begin_record(run: Run, earlier_record: RunRecord | None, largest_batch: dict[str, Any]) -> None:
    """Write the record of this start and, for a new run, config.yaml.

    The config of a resumed run is written later, when its parts are built. If the start fails
    before that, the config of the earlier start stays.

    Args:
        earlier_record: the record that an earlier start left; None for a new run.
        largest_batch: the result of a search for data.global_batch_size=max; {} without one.
    """
    run.folder.path.mkdir(parents=True, exist_ok=True)
    record = first_record(run)
    if earlier_record is None:
        write_config(run)
        # A start of this id that has trained nothing may have left its own.
        run.folder.code_diff.unlink(missing_ok=True)
        if record.code["dirty"]:
            _write_code_diff(run)
    with locked_record(run.folder.record_path):
        if earlier_record is not None:
            # Read it again, because a link to a page may have been added since.
            record = merge_restart(
                read_record(run.folder.record_path), record, step=run.resume_step or 0
            )
            if record.restarts[-1].code:
                log.info(
                    "src/, configs/ or requirements.txt have changed since the run began: its page "
                    "names this commit beside the restart."
                )
        if largest_batch:
            record.update({"largest_batch": largest_batch})
        write_record(run.folder.record_path, record)


def write_config(run: Run) -> None:
    """Write config.yaml, with the values that the run has."""
    import yaml

    config = run.effective_config()
    write_atomically(
        run.folder.config_path, lambda file: yaml.safe_dump(config, file, sort_keys=False)
    )


def _write_code_diff(run: Run) -> None:
    diff = redact_diff(provenance.code_diff(REPOSITORY)).encode(errors="surrogateescape")
    if diff:
        write_atomically(run.folder.code_diff, lambda file: file.write(diff), binary=True)


def first_record(run: Run) -> RunRecord:
    """Return the record before anything has happened."""
    return RunRecord(
        **_identity(run),
        **_command(run),
        **_code_and_host(run),
        **_parts(run),
        **_sizes(run),
        **_initial_weights(run),
    )


def _identity(run: Run) -> dict[str, Any]:
    now = utc_now()
    tags = run.config["tags"]
    if not isinstance(tags, list | tuple):
        tags = [tags]
    return {
        "run_id": run.folder.run_id,
        "uuid": read_uuid(run.folder) or new_uuid(),
        "task_name": run.config["task_name"],
        "status": "running",
        "phase": "start",
        "tags": [str(tag) for tag in tags if tag is not None],
        "started_at": now,
        "updated_at": now,
    }


def _command(run: Run) -> dict[str, Any]:
    program = Path(sys.argv[0]).resolve()
    script = (
        str(program.relative_to(REPOSITORY)) if program.is_relative_to(REPOSITORY) else program.name
    )
    # The command repeats the run, which is then no trial of a search.
    arguments = [word for word in sys.argv[1:] if key_of(word) != "trial"]
    return {
        "command": f"python {shlex.join([script, *arguments])}",
        "overrides": list(run.config["overrides"]),
        "experiment": run.config.get("experiment_name") or run.choices.get("experiment"),
        "summary": {"changed": find_recipe_changes(run)},
    }


def _code_and_host(run: Run) -> dict[str, Any]:
    hardware = run.config.get("hardware") or {}
    return {
        "code": provenance.code_state(REPOSITORY),
        "versions": provenance.versions(),
        "hosts": [provenance.describe_host(run.cluster.node_rank)],
        "launcher": run.cluster.launcher,
        "agent": find_restart_id(environment()),
        "cost": {"price_per_hour": hardware.get("price_per_hour_usd")},
    }


def _parts(run: Run) -> dict[str, Any]:
    checkpoints = (run.config.get("callbacks") or {}).get("checkpoints") or {}
    return {
        "model": model_name(run.config),
        "data": data_name(run.config),
        "trainer": run.choices["trainer"],
        "precision": run.trainer_config["precision"],
        "seed": run.config["seed"],
        "monitor": checkpoints.get("monitor", "val/acc"),
    }


def _sizes(run: Run) -> dict[str, Any]:
    return {
        "world_size": run.cluster.world_size,
        "num_nodes": run.cluster.num_nodes,
        "accelerator": run.cluster.accelerator,
        "global_batch_size": run.batch.global_size,
        "per_device_batch_size": run.batch.per_device,
        "per_device_batch_limit": run.batch.per_device,
        "accumulate_grad_batches": run.batch.accumulate,
        "epochs": 0,
        "steps": 0,
    }


def _initial_weights(run: Run) -> dict[str, Any]:
    """Return the checkpoint with a new run's weights, and the sha256 of its file."""
    if run.resume_step:
        return {}
    weights = run.checkpoint or run.config["model"].get("weights")
    is_file = isinstance(weights, str) and Path(weights).is_file()
    return {
        "initial_weights": run.checkpoint,
        "initial_weights_sha256": sha256_of(Path(weights)) if is_file else None,
    }


def find_recipe_changes(run: Run) -> list[list[Any]]:
    """Return [option, value in the recipe, value of this run] for what the command line changes.

    For experiment=quickstart optimizer.lr=0.05 it is [["optimizer.lr", 0.1, 0.05]].

    A value is compared with its default under the chosen options, since another model or data set
    may have other defaults (configs/fits). The list is empty for an evaluation, and if the recipe
    cannot be composed alone, for example without data.root.
    """
    overrides = run.config["overrides"]
    if run.config["task_name"] != "train":
        return []
    recipe = [word for word in overrides if word.startswith(RECIPE_PREFIXES)]
    choices = [
        word
        for word in overrides
        if word.startswith(RECIPE_PREFIXES) or _is_choice(word, run.choices)
    ]
    try:
        recipe_values = _compose_flat(recipe)
        default_values = recipe_values if choices == recipe else _compose_flat(choices)
    except UserError:
        return []

    values = flatten(redact(run.effective_config()))
    changes = differences([default_values, values], keys.is_shown_as_changed)
    changes_of_recipe = differences([recipe_values, values], keys.is_shown_as_changed)
    changes |= {name: pair for name, pair in changes_of_recipe.items() if _is_choice_key(name)}
    return _order_changes(changes, overrides, values)


def _order_changes(
    changes: dict[str, list[Any]], overrides: list[str], values: dict[str, Any]
) -> list[list[Any]]:
    """Return [key, before, now] for each change, in the order in which the overrides make them.

    Args:
        changes: the values before and now, by key.
        values: the options of this run, by dotted key.
    """
    rows: dict[str, list[Any]] = {}
    for key in map(key_of, overrides):
        names = [name for name in changes if keys.is_below(name, key)]
        if f"choices.{key}" in values:
            names = [f"choices.{key}"]
        for name in names:
            if name in changes:
                rows.setdefault(name, [name.removeprefix("choices."), *changes[name]])
    return list(rows.values())


def _compose_flat(overrides: list[str]) -> dict[str, Any]:
    return flatten(redact(whole_config(compose("train", overrides))))


def _is_choice(override: str, choices: Config) -> bool:
    """Return whether an override chooses an option of a group, or its class."""
    key = key_of(override)
    return not override.startswith("~") and (key in choices or _is_choice_key(key))


def _is_choice_key(key: str) -> bool:
    return key.startswith("choices.") or key.endswith("._target_")


def format_headlines(run: Run) -> list[str]:
    """Return the first line of a run's output, and one on scaled learning rates.

    The first line begins with "run r · small_cnn · digits · cpu · global batch 64 = 64 × 1 × 1".
    """
    if run.config["task_name"] != "train":
        return [" · ".join([*_describe_run(run), *_describe_evaluation_batch(run)])]
    parts = [*_describe_run(run), *_describe_global_batch(run), *_describe_resume(run)]
    return [" · ".join(parts), *_describe_scaled_rates(run)]


def _describe_run(run: Run) -> list[str]:
    task = str(run.config["task"].get("_target_"))
    # A task of the user's may build its own net, so that the name of the task says more than that
    # of the default model.
    model = model_name(run.config) if task.startswith("tasks.") else task.rpartition(".")[2]
    trainer = run.choices["trainer"]
    if trainer == "default":
        trainer = f"{trainer} ({run.cluster.accelerator})"
    return [f"run {run.folder.run_id}", model, data_name(run.config), trainer]


def _describe_evaluation_batch(run: Run) -> list[str]:
    if not is_lockstep_data(run.config):
        return []
    size = run.config["data"].get("eval_batch_size", DEFAULT_EVAL_BATCH_SIZE)
    return [f"batches of {size}"]


def _describe_global_batch(run: Run) -> list[str]:
    if not is_lockstep_data(run.config):
        return []
    batch = run.batch
    split = f"{batch.per_device} × {run.cluster.world_size} × {batch.accumulate}"
    return [f"global batch {batch.global_size} = {split}"]


def _describe_resume(run: Run) -> list[str]:
    if not (run.config.get("callbacks") or {}).get("checkpoints"):
        return ["WITHOUT CHECKPOINTS"]
    if not run.trainer_config.get("resumes_exactly", True):
        # The batches of a swarm's peers depend on time.
        return []
    if is_lockstep_data(run.config):
        return ["resume exact in mid-epoch"]
    # The loaders are not built yet. If they cannot do so, the checkpoint callback says it later.
    return ["resume exact, in mid-epoch by reading the epoch's batches again"]


def _describe_scaled_rates(run: Run) -> list[str]:
    rates = run.learning_rates
    if not rates:
        return []
    optimizer = run.config["optimizer"]
    changes = ", ".join(f"{name} {optimizer[name]:g} → {rate:g}" for name, rate in rates.items())
    batch = f"global batch {run.batch.global_size} / base_batch_size {optimizer['base_batch_size']}"
    return [f"optimizer: {changes} ({batch})"]
