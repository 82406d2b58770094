"""The first lines of a run's output."""

from lockstep.records.batch import DEFAULT_EVAL_BATCH_SIZE
from lockstep.records.config import data_name, model_name
from lockstep.runs.batch_size import is_lockstep_data
from lockstep.runs.run import Run


def headlines(run: Run) -> list[str]:
    """Return the first line of a run's output, and one on scaled learning rates."""
    if run.config["task_name"] != "train":
        return [" · ".join([*_what_runs(run), *_evaluation_batch(run)])]
    parts = [*_what_runs(run), *_global_batch(run), *_promise_of_resume(run)]
    return [" · ".join(parts), *_scaled_rates(run)]


def _what_runs(run: Run) -> list[str]:
    task = str(run.config["task"].get("_target_"))
    # A task of the user's may build its own net: its own name says more than that of the default
    # model.
    model = model_name(run.config) if task.startswith("tasks.") else task.rpartition(".")[2]
    trainer = run.choices["trainer"]
    if trainer == "default":
        trainer = f"{trainer} ({run.cluster.accelerator})"
    return [f"run {run.folder.run_id}", model, data_name(run.config), trainer]


def _evaluation_batch(run: Run) -> list[str]:
    if not is_lockstep_data(run.config):
        return []
    size = run.config["data"].get("eval_batch_size", DEFAULT_EVAL_BATCH_SIZE)
    return [f"batches of {size}"]


def _global_batch(run: Run) -> list[str]:
    if not is_lockstep_data(run.config):
        return []
    batch = run.batch
    split = f"{batch.per_device} × {run.cluster.world_size} × {batch.accumulate}"
    return [f"global batch {batch.global_size} = {split}"]


def _promise_of_resume(run: Run) -> list[str]:
    if not (run.config.get("callbacks") or {}).get("checkpoints"):
        return ["WITHOUT CHECKPOINTS"]
    if not run.trainer_config.get("resumes_exactly", True):
        # The peers of a swarm draw batches by time.
        return []
    if is_lockstep_data(run.config):
        return ["resume exact in mid-epoch"]
    # The loaders are not built yet. The checkpoint callback says what holds where they are no plain
    # ones.
    return ["resume exact, in mid-epoch by reading the epoch's batches again"]


def _scaled_rates(run: Run) -> list[str]:
    rates = run.learning_rates
    if not rates:
        return []
    optimizer = run.config["optimizer"]
    changes = ", ".join(f"{name} {optimizer[name]:g} → {rate:g}" for name, rate in rates.items())
    batch = f"global batch {run.batch.global_size} / base_batch_size {optimizer['base_batch_size']}"
    return [f"optimizer: {changes} ({batch})"]
