"""Test a checkpoint on the test images of its run, or on other images.

    python src/eval.py ckpt_path=<run_id | FILE | s3://…> [data=image_folder data.root=DIR] [key=value …]

Options come from the checkpoint, or from config.yaml in the folder of its run, then from the command line. Labels are
matched by class name. Other images are all tested, unless they have a test split.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from lockstep.commands.command_line import run_script
from lockstep.config import keys
from lockstep.config.compose import chosen_options, compose, plain
from lockstep.config.foreign import stored_config
from lockstep.config.schema import key_of
from lockstep.process.errors import UserError
from lockstep.records.config import Config
from lockstep.runs.launcher import launch
from lockstep.runs.plan import RunPlan
from lockstep.storage.fetch import locate_checkpoint

log = logging.getLogger(__name__)

IMAGES = ("image_size", "channels", "mean", "std", "fit", "crop_pct", "interpolation", "resize")  # the training's


def evaluate(plan: RunPlan) -> int:
    """Evaluate the checkpoint as one rank."""
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lockstep.process.files import utc_now
    from lockstep.ranks.collectives import load_on_all_ranks
    from lockstep.runs.join import joined_ranks
    from lockstep.training.build import build_run
    from lockstep.training.task import Task

    with joined_ranks(plan) as session:
        trainer, module, data, recorder = build_run(session, load_on_all_ranks(str(session.plan.checkpoint)))
        if not is_overridden("test_step", module) or not is_overridden("test_dataloader", data):
            raise UserError("There is nothing to test: the task has no test_step, or the data no test_dataloader.")
        own = None if isinstance(module, Task) else session.plan.checkpoint
        trainer.test(module, datamodule=data, ckpt_path=own, weights_only=True, verbose=False)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if not metrics:
            raise UserError("There is nothing to test: trainer.limit_test_batches=0, or test_step logs nothing.")
        ended = {"status": "finished", "phase": "end", "exit_code": 0, "finished_at": utc_now()}
        recorder.write(trainer, **ended, num_test=getattr(data, "num_test", None))
        if trainer.is_global_zero:
            log.info(" · ".join(f"{name} {value:.10g}" for name, value in metrics.items()))
    return 0


def find_checkpoint(words: list[str]) -> tuple[Path, Config, Config]:
    """Return the path of a checkpoint on this machine, the config of its run, and its facts about the training data.

    Raises:
        UserError: no checkpoint is named, it cannot be found or read, or it has no config.
    """
    composed = plain(compose("train", [word for word in words if keys.finds_run(key_of(word))]))
    if not composed["ckpt_path"]:
        raise UserError("eval needs a checkpoint. Pass ckpt_path=<run_id>, ckpt_path=FILE or ckpt_path=s3://….")
    logs = Path(composed["paths"]["log_dir"])
    path = locate_checkpoint(str(composed["ckpt_path"]), logs, composed.get("s3"))
    from lockstep.checkpoints.load import read_checkpoint
    from lockstep.training.weights import facts_of  # imports torch, after the checks above

    checkpoint = read_checkpoint(path)
    own = checkpoint.get("lockstep")
    config = stored_config(path, own.get("config") if isinstance(own, dict) else None, logs)
    return path, config, facts_of(checkpoint)


def for_evaluation(stored: Config) -> Config:
    """Return the part of a run's config that counts in an evaluation, which runs in one process by default."""
    choices = {group: name for group, name in (stored.get("choices") or {}).items() if group != "trainer"}
    overrides = [word for word in map(str, stored.get("overrides") or ()) if not key_of(word).startswith("trainer")]
    kept = {key: value for key, value in stored.items() if not keys.is_of_one_run(key)}
    if isinstance(kept.get("trainer"), dict):  # a training with limits is tested on all images
        kept["trainer"] = {key: value for key, value in kept["trainer"].items() if not key.startswith("limit_")}
    return {**kept, "choices": choices, "overrides": overrides}


def config_of(cfg: Any, path: Path, stored: Config, facts: Config, words: list[str]) -> dict[str, Any]:
    """Return the config of an evaluation.

    Args:
        cfg: the checkpoint's config with the command line's overrides.
        path, stored, facts: as from `find_checkpoint`.
        words: the command-line overrides.
    """
    config, choices, named = plain(cfg), dict(chosen_options(cfg)), {key_of(word) for word in words}
    if "experiment" in named:
        raise UserError("eval takes its experiment from the checkpoint: leave experiment= out.")
    if choices.get("data") != (stored.get("choices") or {}).get("data"):  # the net's image size and so on stay
        size_is_stated = named & {"data.image_size", "data.crop_pct"}
        kept = [key for key in IMAGES if f"data.{key}" not in named and not (key == "resize" and size_is_stated)]
        config["data"].update({key: facts[key] for key in kept if key in facts and key in config["data"]})
        if facts.get("target") in ("number", "mask") and "data.target" not in named and "target" in config["data"]:
            config["data"]["target"] = facts["target"]
    every_run = plain(compose("train", []))["callbacks"]  # those of training
    callbacks = {name: node for name, node in (config["callbacks"] or {}).items() if name not in every_run}
    config.update(
        ckpt_path=str(path), task_name="eval", resume=None, logger={}, scheduler={}, test=True, overrides=words,
        callbacks=callbacks, choices=choices,
    )  # fmt: skip
    if "trainer" not in named:
        one_device = {"launch": "one_process", "devices": 1, "num_nodes": 1, "process_devices": 1}
        config["trainer"].update(one_device, strategy=None)
    config["trainer"]["accumulate_grad_batches"] = 1
    return config


def main(argv: list[str]) -> int:
    found: list[Any] = []

    def find_stored(words: list[str]) -> Config:
        path, stored, facts = find_checkpoint(words)
        found[:] = [path, stored, facts, words]
        return for_evaluation(stored)

    def task(cfg: Any) -> int:
        path, stored, facts, words = found
        return launch(config_of(cfg, path, stored, facts, words), evaluate)

    return run_script("train", argv, task, __doc__ or "", find_stored)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
