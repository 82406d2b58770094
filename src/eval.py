"""Test a checkpoint: the same counts as its run, or the accuracy on other images.

    python src/eval.py ckpt_path=<run_id | FILE | s3://…> [data=image_folder data.root=DIR] [key=value …]

Options come from the checkpoint, or from the config in its run's folder; the command line changes single values. Labels
are matched by class name. Of other images all are tested, unless they come with a test split.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import copy
import logging
import sys
from pathlib import Path
from typing import Any

from lockstep.config.compose import CONFIGS, chosen_options, compose, plain, run_script
from lockstep.config.declared import key_of
from lockstep.config.from_outside import config_of_checkpoint
from lockstep.distributed.cluster import plan_file
from lockstep.launch.launcher import launch_config, run_supervised
from lockstep.launch.plan import RunPlan
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.storage.fetch import locate_checkpoint
from lockstep.strategies.placement import in_one_process

log = logging.getLogger(__name__)

FINDERS = ("ckpt_path", "paths", "s3")  # say where the checkpoint is
OF_THIS_EVALUATION = (
    *FINDERS, "tags", "run_id", "test", "resume", "sweep_dir", "logbook", "verbose", "quiet",
)  # fmt: skip
OPTIONS = ("data", "augmentation", "model", "loss", "optimizer", "scheduler")  # taken from the checkpoint
IMAGES = ("image_size", "channels", "mean", "std", "fit", "crop_pct", "interpolation", "resize")  # likewise


def evaluate(plan: RunPlan) -> int:
    """One rank's evaluation."""
    from lockstep.callbacks.checkpoint_io import load_on_all_ranks
    from lockstep.callbacks.confusion import write_counts
    from lockstep.runs.files import utc_now
    from lockstep.training.build import build_run
    from lockstep.training.checks import check_fits
    from lockstep.training.rank import joined_ranks
    from lockstep.training.weights import facts_of

    with joined_ranks(plan) as session:
        plan, is_rank_zero = session.plan, plan.cluster.is_rank_zero
        checkpoint = load_on_all_ranks(str(plan.checkpoint))
        run = build_run(plan, session, trained_on=facts_of(checkpoint))
        check_fits(run.module, checkpoint["state_dict"], str(plan.checkpoint), plan.model_name)
        run.module.load_state_dict(checkpoint["state_dict"])
        run.trainer.test(run.module, datamodule=run.data, verbose=False)
        counts: Any = run.module.test_counts
        if counts is None:
            raise UserError("trainer.limit_test_batches=0 leaves nothing to test.")
        if is_rank_zero:
            ended = {"status": "finished", "phase": "end", "exit_code": 0, "finished_at": utc_now()}
            per_class = write_counts(counts, run.facts["class_names"], plan.folder)
            run.recorder.write(run.trainer, **ended, num_test=run.data.num_test, test_acc_per_class=per_class)
            metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
            log.info(" · ".join(f"{name} {value:.10g}" for name, value in metrics.items()))
    return 0


def find_checkpoint(words: list[str]) -> tuple[Path, Config, Config]:
    """Return the file of a checkpoint on this machine, the config of its run, and what it says of its training data.

    Raises:
        UserError: none is named, it cannot be found or read, or it carries no config.
    """
    composed = plain(compose("train", [word for word in words if key_of(word).split(".")[0] in FINDERS]))
    if not composed["ckpt_path"]:
        raise UserError("eval needs a checkpoint: ckpt_path=FILE, ckpt_path=<run_id> or ckpt_path=s3://….")
    logs = Path(composed["paths"]["log_dir"])
    path = locate_checkpoint(str(composed["ckpt_path"]), logs, composed.get("s3"), logs / "cache")
    from lockstep.storage.load import read_checkpoint
    from lockstep.training.weights import facts_of  # imports torch, which no refusal above waits for

    checkpoint = read_checkpoint(path)
    own = checkpoint.get("lockstep")
    config = config_of_checkpoint(path, own.get("config") if isinstance(own, dict) else None, logs)
    return path, config, facts_of(checkpoint)


def options_of(config: Config, words: list[str]) -> list[str]:
    """Return the checkpoint's option of each group that the command line does not choose."""
    named, chosen = {key_of(word) for word in words}, config.get("choices") or {}
    kept = {group: chosen.get(group) for group in OPTIONS if group not in named}
    return [f"{group}={name}" for group, name in kept.items() if (CONFIGS / group / f"{name}.yaml").is_file()]


def config_of(cfg: Any, path: Path, stored: Config, facts: Config, words: list[str]) -> dict[str, Any]:
    """Return the checkpoint's config with the command line's overrides.

    Args:
        cfg: composed from the checkpoint's options and the command line.
        path, stored, facts: as from `find_checkpoint`.
        words: the command-line overrides.
    """
    composed, named = plain(cfg), {key_of(word) for word in words}
    base = {**composed, **copy.deepcopy(dict(stored)), "trainer": {**composed["trainer"], **stored["trainer"]}}
    chosen, before = chosen_options(cfg), dict(stored.get("choices") or {})
    is_other = "data" in named and chosen.get("data") != before.get("data")
    config = overlay(base, composed, [word for word in words if is_other or key_of(word) != "data"])
    if is_other:  # the net keeps the images that it was trained on
        size_is_stated = named & {"data.image_size", "data.crop_pct"}
        kept = [key for key in IMAGES if f"data.{key}" not in named and not (key == "resize" and size_is_stated)]
        config["data"].update({key: facts[key] for key in kept if key in facts and key in config["data"]})
    every_run = plain(compose("train", []))["callbacks"]  # for training
    callbacks = {**(stored.get("callbacks") or {}), **(composed["callbacks"] or {})}
    config.update(
        ckpt_path=str(path), task_name="eval", resume=None, logger={}, scheduler={}, test=True, overrides=words,
        callbacks={name: node for name, node in callbacks.items() if name not in every_run},
    )  # fmt: skip
    if "trainer" not in named:
        config["trainer"] = in_one_process(config["trainer"], composed["trainer"]["accelerator"])
    config["trainer"]["accumulate_grad_batches"] = 1
    typed = {group: name for group, name in chosen.items() if group in named | {"trainer"}}
    config["choices"] = {**chosen, **before, **typed}
    return config


def overlay(base: Config, composed: Config, words: list[str]) -> dict[str, Any]:
    """Return `base` with each group or value that an override names taken from `composed`."""
    config = {**base, **{key: composed[key] for key in OF_THIS_EVALUATION if key in composed}}
    for word in words:
        key = key_of(word).split("@")[0]
        if key == "experiment":
            raise UserError("eval takes its experiment from the checkpoint: leave experiment= out.")
        target, source = config, composed
        *parents, last = key.split(".")
        for parent in parents:
            target, source = target.setdefault(parent, {}), source[parent]
        if last in source:
            target[last] = source[last]
        else:  # ~key
            target.pop(last, None)
    return config


def main(argv: list[str]) -> int:
    if path := plan_file():
        return run_supervised(path, evaluate)
    found: list[tuple[Path, Config, Config]] = []

    def completed(words: list[str]) -> list[str]:
        found.append(find_checkpoint(words))
        return [*options_of(found[0][1], words), *words]

    def task(cfg: Any) -> int:
        words = argv if found else list(cfg.hydra.overrides.task)
        return launch_config(config_of(cfg, *(found[0] if found else find_checkpoint(words)), words), evaluate)

    return run_script("train", argv, task, __doc__ or "", completed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
