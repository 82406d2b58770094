"""Test a checkpoint: the same counts as its run, from the checkpoint alone.

    python src/eval.py ckpt_path=logs/train/runs/<run_id>/checkpoints/best-step00000460.ckpt [key=value …]

The checkpoint names its options, or its run's folder has them; what the command line says wins. ckpt_path also takes a
run id and s3://….
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import copy
import logging
import sys
from dataclasses import dataclass
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

FROM_COMMAND_LINE = (
    "paths", "tags", "ckpt_path", "run_id", "test", "resume", "sweep_dir", "s3", "logbook", "verbose", "quiet",
)  # fmt: skip
FINDERS = ("ckpt_path", "paths", "s3")  # what says where the checkpoint is
# Whose keys the command line may change without naming them.
KEPT_OPTIONS = ("data", "augmentation", "model", "loss", "optimizer", "scheduler")


@dataclass(frozen=True)
class Checkpoint:
    """A file of this machine, and the config to build its net with."""

    path: Path
    config: Config

    def options(self, words: list[str]) -> list[str]:
        """The options that `words` do not choose anew, as far as there are such options here."""
        named = {key_of(word) for word in words}
        chosen = self.config.get("choices") or {}
        kept = {group: chosen.get(group) for group in KEPT_OPTIONS if group not in named}
        return [f"{group}={name}" for group, name in kept.items() if (CONFIGS / group / f"{name}.yaml").is_file()]


def evaluate(plan: RunPlan) -> int:
    """One rank's evaluation."""
    from lockstep.callbacks.confusion import write_counts
    from lockstep.runs.files import utc_now
    from lockstep.training.build import build_run
    from lockstep.training.checks import check_fits
    from lockstep.training.rank import joined_ranks
    from lockstep.training.weights import read_checkpoint

    with joined_ranks(plan) as session:
        plan, is_rank_zero = session.plan, plan.cluster.is_rank_zero
        checkpoint = read_checkpoint(str(plan.checkpoint))
        run = build_run(plan, session, tested=checkpoint["state_dict"])
        check_fits(run.module, checkpoint["state_dict"], str(plan.checkpoint), plan.model_name)
        run.module.load_state_dict(checkpoint["state_dict"])
        before = checkpoint.get("lockstep", {}).get("data", {})
        chosen = any(word.lstrip("+~").startswith("data") for word in plan.overrides)
        if is_rank_zero and not chosen and before.get("data_hash") not in (None, run.facts["data_hash"]):
            log.info("The images are not those of the training: it may have trained on some of this test.")
        run.trainer.test(run.module, datamodule=run.data, verbose=False)
        counts: Any = run.module.test_counts
        if counts is None:
            raise UserError("trainer.limit_test_batches=0 leaves nothing to test.")
        if is_rank_zero:
            per_class = write_counts(counts, run.facts["class_names"], plan.folder)
            run.recorder.write(
                run.trainer,
                status="finished",
                exit_code=0,
                finished_at=utc_now(),
                phase="end",
                num_test=run.data.num_test,
                test_acc_per_class=per_class,
            )
            metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
            log.info(" · ".join(f"{name} {value:.10g}" for name, value in metrics.items()))
    return 0


def find_checkpoint(words: list[str]) -> Checkpoint:
    """
    Raises:
        UserError: none is named, it cannot be found or read, or it carries no config.
    """
    composed = plain(compose("train", [word for word in words if key_of(word).split(".")[0] in FINDERS]))
    if not composed["ckpt_path"]:
        raise UserError("eval needs to know which checkpoint: ckpt_path=FILE, ckpt_path=<run_id> or ckpt_path=s3://….")
    logs = Path(composed["paths"]["log_dir"])
    path = locate_checkpoint(str(composed["ckpt_path"]), logs, composed.get("s3"), logs / "cache")
    from lockstep.training.weights import read_checkpoint  # brings torch, which no refusal above waits for

    own = read_checkpoint(path).get("lockstep")
    return Checkpoint(path, config_of_checkpoint(path, own.get("config") if isinstance(own, dict) else None, logs))


def config_of(cfg: Any, checkpoint: Checkpoint, words: list[str]) -> dict[str, Any]:
    """The checkpoint's config with the command line's choices over it.

    Args:
        cfg: composed from the checkpoint's options and the command line.
        words: the command line's.
    """
    composed = plain(cfg)
    stored = checkpoint.config  # what its version did not have yet is as composed here
    base = {**composed, **copy.deepcopy(stored), "trainer": {**composed["trainer"], **stored["trainer"]}}
    config = overlay(base, composed, words)
    config.update(
        ckpt_path=str(checkpoint.path), task_name="eval", resume=None, logger={}, scheduler={}, test=True,
        callbacks=callbacks_of(checkpoint, composed), overrides=words,
    )  # fmt: skip
    if not any(word.startswith("trainer=") for word in words):
        config["trainer"] = in_one_process(config["trainer"], composed["trainer"]["accelerator"])
    config["trainer"]["accumulate_grad_batches"] = 1
    if config["trainer"]["launch"] == "one_process" and any(word.startswith("data.") for word in words):
        config["data"]["global_batch_size"] = 1  # nothing is trained: fewer images than that are no error
    named = {key_of(word) for word in words} | {"trainer"}
    chosen = chosen_options(cfg)
    typed = {group: name for group, name in chosen.items() if group in named}
    config["choices"] = {**chosen, **(config.get("choices") or {}), **typed}
    return config


def callbacks_of(checkpoint: Checkpoint, composed: Config) -> Config:
    """Those asked for here and those the run had, beside every run's, which are for training."""
    import yaml

    every_run = yaml.safe_load((CONFIGS / "callbacks" / "default.yaml").read_text())
    asked = {**(checkpoint.config.get("callbacks") or {}), **(composed["callbacks"] or {})}
    return {name: node for name, node in asked.items() if name not in every_run}


def overlay(base: Config, composed: Config, overrides: list[str]) -> dict[str, Any]:
    """`base` with everything that an override names taken from `composed`: whole groups, or single values."""
    config = {**base, **{key: composed[key] for key in FROM_COMMAND_LINE if key in composed}}
    groups = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    for word in overrides:
        key = key_of(word).split("@")[0]
        if key == "experiment":
            raise UserError("eval takes its experiment from the checkpoint: leave experiment= out.")
        if key in groups:
            config[key] = composed[key]
            continue
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
    found: list[Checkpoint] = []

    def completed(words: list[str]) -> list[str]:
        found.append(find_checkpoint(words))
        return [*found[0].options(words), *words]

    def task(cfg: Any) -> int:
        words = argv if found else list(cfg.hydra.overrides.task)
        return launch_config(config_of(cfg, found[0] if found else find_checkpoint(words), words), evaluate)

    return run_script("train", argv, task, __doc__ or "", completed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
