"""Test a checkpoint on the test images of its run, or on other images.

    python src/eval.py ckpt_path=<run_id | FILE | s3://…> [data=image_folder data.root=DIR]
    [key=value …]

Options come from the checkpoint, or from config.yaml in the folder of its run. The command line
overrides them. Labels are matched by class name. Of other data all images are tested, unless the
data have a test split.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.commands.command_line import read_command
from lockstep.config import keys
from lockstep.config.compose import compose, plain
from lockstep.config.foreign import choose_stored_config
from lockstep.config.schema import key_of
from lockstep.process.errors import UserError
from lockstep.process.files import utc_now
from lockstep.process.script import script
from lockstep.ranks.find import find_ranks
from lockstep.ranks.placement import one_process_options
from lockstep.records.config import Config
from lockstep.runs.checks import check_before_start
from lockstep.runs.opening import open_run
from lockstep.runs.starting import start_ranks
from lockstep.storage.fetch import locate_checkpoint

log = logging.getLogger(__name__)

# Other images are made by the same values of these options as the images in training.
IMAGE_OPTIONS = (
    "image_size",
    "channels",
    "mean",
    "std",
    "fit",
    "crop_pct",
    "interpolation",
    "resize",
    "range",
    "page",
    "bands",
)


@dataclass(frozen=True)
class TrainedCheckpoint:
    """A checkpoint on this machine, with its run's config and the facts about its training data."""

    path: Path
    config: Config
    facts: Config


@script
def main(argv: list[str]) -> int:
    """Evaluate in this process, or start the processes of this node. Return the exit code."""
    command = read_command("train", argv, __doc__ or "")
    checkpoint = find_checkpoint(command.overrides)
    composed = command.compose(stored=inherited_config(checkpoint.config))
    config = evaluation_config(composed, checkpoint, command.overrides)
    cluster = find_ranks(config)
    check_before_start(config, cluster)
    if cluster.starts_ranks:
        return start_ranks(config, cluster)

    with open_run(config, cluster) as run:
        # torch and Lightning are imported here, after every early refusal.
        from lightning.fabric.utilities.seed import reset_seed

        from lockstep.checkpoints.load import load_on_all_ranks
        from lockstep.training.build import build
        from lockstep.training.task import Task

        trainer, module, data = build(run, load_on_all_ranks(str(run.checkpoint)))
        check_testable(module, data)
        # `build` has loaded the weights of a Task. Lightning loads those of any other module.
        path = None if isinstance(module, Task) else run.checkpoint
        # The data may draw their splits, which are those of the training then.
        reset_seed()
        trainer.test(module, datamodule=data, ckpt_path=path, weights_only=True, verbose=False)

        metrics = metrics_of_test(trainer)
        run.update(
            trainer,
            status="finished",
            phase="end",
            exit_code=0,
            finished_at=utc_now(),
            num_test=getattr(data, "num_test", None),
        )
        if trainer.is_global_zero:
            log.info(" · ".join(f"{name} {value:.10g}" for name, value in metrics.items()))
    return run.exit_code


def check_testable(module: Any, data: Any) -> None:
    from lightning.pytorch.utilities.model_helpers import is_overridden

    # Without a data module the LightningModule has its own loaders.
    loaders = data or module
    if not is_overridden("test_step", module) or not is_overridden("test_dataloader", loaders):
        raise UserError(
            "There is nothing to test: the task has no test_step, or the data no test_dataloader."
        )


def metrics_of_test(trainer: Any) -> dict[str, float]:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if not metrics:
        raise UserError(
            "There is nothing to test: trainer.limit_test_batches=0, or test_step logs nothing."
        )
    return metrics


def find_checkpoint(overrides: list[str]) -> TrainedCheckpoint:
    """Return the checkpoint that ckpt_path= names. A checkpoint in a bucket is downloaded.

    Raises:
        UserError: no checkpoint is named, it cannot be found or read, or it has no config.
    """
    finders = [override for override in overrides if keys.is_run_locator(key_of(override))]
    composed = plain(compose("train", finders))
    if not composed["ckpt_path"]:
        raise UserError(
            "eval needs a checkpoint. Pass ckpt_path=<run_id>, ckpt_path=FILE or ckpt_path=s3://…."
        )
    logs = Path(composed["paths"]["log_dir"])
    path = locate_checkpoint(str(composed["ckpt_path"]), logs, composed.get("s3"))

    # torch is imported here, after the checks above.
    from lockstep.checkpoints.load import read_checkpoint
    from lockstep.training.weights import facts_of

    checkpoint = read_checkpoint(path)
    contents = checkpoint.get("lockstep")
    config = contents.get("config") if isinstance(contents, dict) else None
    return TrainedCheckpoint(path, choose_stored_config(path, config, logs), facts_of(checkpoint))


def inherited_config(stored: Config) -> Config:
    """Return the part of a run's config that an evaluation takes, with the default trainer."""
    # An experiment may choose a trainer, too, and this machine may not have its GPUs.
    choices = {**(stored.get("choices") or {}), "trainer": "default"}
    overrides = [
        override
        for override in map(str, stored.get("overrides") or ())
        if not key_of(override).startswith("trainer")
    ]
    kept = {key: value for key, value in stored.items() if not keys.is_not_inherited(key)}
    # The experiment may set these two, for its own runs.
    kept |= {"logbook": None, "tags": []}
    if isinstance(kept.get("trainer"), dict):
        # The test takes all images, also if the training was limited, in processes of its own.
        kept["trainer"] = {
            key: value
            for key, value in kept["trainer"].items()
            if not key.startswith("limit_") and not keys.is_placement(f"trainer.{key}")
        }
    return {**kept, "choices": choices, "overrides": overrides}


def evaluation_config(
    composed: dict[str, Any], checkpoint: TrainedCheckpoint, overrides: list[str]
) -> dict[str, Any]:
    """Return the config of an evaluation. `composed` does not change.

    Args:
        composed: the checkpoint's config with the overrides of the command line.
        overrides: the overrides of the command line.
    """
    named = {key_of(override) for override in overrides}
    if "experiment" in named:
        raise UserError("eval takes its experiment from the checkpoint: leave experiment= out.")
    trainer = composed["trainer"]
    if "trainer" not in named:
        trainer = one_process_options(trainer, named)
    return {
        **composed,
        "data": _evaluation_data(composed, checkpoint, named),
        "trainer": {**trainer, "accumulate_grad_batches": 1},
        "callbacks": _callbacks_of_run(composed),
        "ckpt_path": str(checkpoint.path),
        "task_name": "eval",
        "resume": None,
        "logger": {},
        "scheduler": {},
        "test": True,
        "overrides": overrides,
    }


def _callbacks_of_run(composed: dict[str, Any]) -> dict[str, Any]:
    """Return the callbacks that the run has added, because its task may need them."""
    callbacks_of_every_run = plain(compose("train", []))["callbacks"]
    callbacks = (composed["callbacks"] or {}).items()
    return {name: node for name, node in callbacks if name not in callbacks_of_every_run}


def _evaluation_data(
    composed: dict[str, Any], checkpoint: TrainedCheckpoint, named: set[str]
) -> dict[str, Any]:
    """Return the options of the data, so that images are made as in training.

    Args:
        named: the keys on the command line. Their values stay.
    """
    data = composed["data"]
    choices_of_run = checkpoint.config.get("choices") or {}
    if composed["choices"].get("data") != choices_of_run.get("data"):
        data = _with_training_options(data, checkpoint.facts, named)
    return _with_measured_range(data, checkpoint.facts, named)


def _with_training_options(data: dict[str, Any], facts: Config, named: set[str]) -> dict[str, Any]:
    """Return the options of another data set with IMAGE_OPTIONS and target of the training."""
    size_is_named = named & {"data.image_size", "data.crop_pct"}
    changed = dict(data)
    for key in IMAGE_OPTIONS:
        is_left_open = f"data.{key}" not in named and not (key == "resize" and size_is_named)
        if is_left_open and key in facts and key in data:
            changed[key] = facts[key]
    if (
        facts.get("target") in ("number", "mask")
        and "data.target" not in named
        and "target" in data
    ):
        changed["target"] = facts["target"]
    return changed


def _with_measured_range(data: dict[str, Any], facts: Config, named: set[str]) -> dict[str, Any]:
    """Return the options with the values that the run measured in its training images.

    If a checkpoint has no range, its version read 8 bits, and `range` becomes None.
    """
    if "range" not in data:
        return data
    names = ["range"]
    if facts.get("range") is not None or facts.get("channels", 3) not in (1, 3):
        names += ["mean", "std"]
    measured = {name: facts.get(name) for name in names}
    left_open = {key: value for key, value in measured.items() if f"data.{key}" not in named}
    return {**data, **left_open}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
