"""Test a checkpoint: the same counts as its run, from the checkpoint alone.

    python src/eval.py ckpt_path=logs/train/runs/<run_id>/checkpoints/best-step00000460.ckpt [key=value …]

The checkpoint carries its composed config; what the command line says wins. ckpt_path also takes a run id and s3://….
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

import yaml

from lockstep.config.compose import CONFIGS, chosen_options, compose, plain, run_door
from lockstep.config.declared import Config, key_of
from lockstep.distributed import cluster as world
from lockstep.launch.launcher import launch_config, resume_in_rank
from lockstep.runs.errors import UserError
from lockstep.storage.fetch import locate_checkpoint

log = logging.getLogger(__name__)

FROM_COMMAND_LINE = (
    "paths", "tags", "ckpt_path", "run_id", "test", "resume", "sweep_dir", "s3", "logbook", "verbose", "quiet",
)  # fmt: skip
FINDERS = ("ckpt_path", "paths", "s3")  # what says where the checkpoint is
PARTS = ("trainer", "data", "model", "classifier", "optimizer")  # of a config that can be evaluated
KEPT_OPTIONS = ("data", "model", "optimizer", "scheduler")  # whose keys the command line may change without naming them


@dataclass(frozen=True)
class Checkpoint:
    """A file of this machine, and the composed config of the run that wrote it."""

    path: Path
    config: Config

    def options(self, words: list[str]) -> list[str]:
        """The run's options that `words` do not choose anew, as far as there are such options here."""
        choices = self.config.get("choices")
        chosen = choices if isinstance(choices, dict) else {}
        named = {key_of(word) for word in words}
        there = {path.stem for group in KEPT_OPTIONS for path in (CONFIGS / group).glob("*.yaml")}
        kept = {group: chosen.get(group) for group in KEPT_OPTIONS if group not in named}
        return [f"{group}={name}" for group, name in kept.items() if name in there]


def evaluate(config: dict[str, Any], cluster: Any, folder: Any) -> int:
    """One rank's evaluation."""
    from lockstep.callbacks.confusion import write_confusion
    from lockstep.runs.files import utc_now
    from lockstep.runs.old_configs import model_name
    from lockstep.training.build import build_run, load_weights
    from lockstep.training.rank import enter_world

    with enter_world(config, cluster, folder) as world:
        run = build_run(config, cluster, folder, world, None, trainable=False)
        before = load_weights(run.module, config["ckpt_path"], model_name(config))
        chosen = any(word.lstrip("+~").startswith("data") for word in config["overrides"])
        if cluster.is_rank_zero and not chosen and before.get("data_hash") not in (None, run.facts["data_hash"]):
            log.info("The images are not those of the training: it may have trained on some of this test.")
        run.trainer.test(run.module, datamodule=run.data, verbose=False)
        if run.module.test_confusion is None:
            raise UserError("trainer.limit_test_batches=0 leaves nothing to test.")
        if cluster.is_rank_zero:
            per_class = write_confusion(run.module.test_confusion, run.facts["class_names"], folder)
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
    from lockstep.training.build import read_checkpoint

    composed = plain(compose("train", [word for word in words if key_of(word).split(".")[0] in FINDERS]))
    if not composed["ckpt_path"]:
        raise UserError("eval needs to know which checkpoint: ckpt_path=FILE, ckpt_path=<run_id> or ckpt_path=s3://….")
    logs = Path(composed["paths"]["log_dir"])
    path = locate_checkpoint(str(composed["ckpt_path"]), logs, composed.get("s3"), logs / "cache")
    own = read_checkpoint(path).get("lockstep")
    stored = own.get("config") if isinstance(own, dict) else None
    if not isinstance(stored, dict) or not all(isinstance(stored.get(part), dict) for part in PARTS):
        raise UserError(f"{path} carries no config: it was not written by this project.")
    return Checkpoint(path, stored)


def config_of(cfg: Any, checkpoint: Checkpoint, words: list[str]) -> dict[str, Any]:
    """The checkpoint's config with the command line's choices over it.

    Args:
        cfg: composed from the checkpoint's options and the command line.
        words: the command line's.
    """
    composed = plain(cfg)
    config = overlay(base_of(checkpoint, composed), composed, words)
    config.update(
        ckpt_path=str(checkpoint.path), task_name="eval", resume=None, logger={}, scheduler={}, test=True,
        resume_step=None, callbacks=callbacks_of(checkpoint, composed), overrides=words,
    )  # fmt: skip
    if not any(word.startswith("trainer=") for word in words):
        for key in ("num_gpus", "stage_devices", "micro_batches", "balance"):  # of strategies that are left out here
            config["trainer"].pop(key, None)
        config["trainer"].update(launch="one_process", accelerator=composed["trainer"]["accelerator"], devices=1,
                                 num_nodes=1, strategy=None)  # fmt: skip
    config["trainer"]["accumulate_grad_batches"] = 1
    if config["trainer"]["launch"] == "one_process" and any(word.startswith("data.") for word in words):
        config["data"]["global_batch_size"] = 1  # nothing is trained: fewer images than that are no error
    named = {key_of(word) for word in words} | {"trainer"}
    chosen = chosen_options(cfg)
    typed = {group: name for group, name in chosen.items() if group in named}
    config["choices"] = {**chosen, **(config.get("choices") or {}), **typed}
    return config


def base_of(checkpoint: Checkpoint, composed: Config) -> Config:
    """The checkpoint's config; what its version did not have yet is as composed here."""
    stored = copy.deepcopy(checkpoint.config)
    if not is_own(checkpoint.path, composed["paths"]):
        stored = {**stored, "data": at_home(stored["data"], composed["paths"])}
    return {**composed, **stored, "trainer": {**composed["trainer"], **stored["trainer"]}}


def callbacks_of(checkpoint: Checkpoint, composed: Config) -> Config:
    """Those asked for here and, of a run of this machine, those it had beside every run's, which are for training."""
    every_run = yaml.safe_load((CONFIGS / "callbacks" / "default.yaml").read_text())
    own = checkpoint.config.get("callbacks") if is_own(checkpoint.path, composed["paths"]) else None
    asked = {**(own or {}), **(composed["callbacks"] or {})}
    return {name: node for name, node in asked.items() if name not in every_run}


def is_own(checkpoint: Path, paths: Config) -> bool:
    """Of a run of this machine: what it says of folders, a command line here has said."""
    return any(checkpoint.is_relative_to(Path(paths["log_dir"]).resolve() / door) for door in ("train", "eval"))


def at_home(data: Config, paths: Config) -> Config:
    """Another's checkpoint says which data it was trained on; where anything is written, this machine says alone."""
    home = Path(paths["data_dir"])
    moved = {"cache_dir": str(home / "cache"), "download_dir": str(home / str(data.get("name")))}
    return {**data, **{key: place for key, place in moved.items() if key in data}}


def overlay(base: Config, composed: Config, overrides: list[str]) -> dict[str, Any]:
    """`base` with everything that an override names taken from `composed`: whole groups, or single values."""
    config: dict[str, Any] = {**base, **{key: composed[key] for key in FROM_COMMAND_LINE if key in composed}}
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
    if config := world.supervised_config():
        return resume_in_rank(config, evaluate)
    found: list[Checkpoint] = []

    def completed(words: list[str]) -> list[str]:
        found.append(find_checkpoint(words))
        return [*found[0].options(words), *words]

    def task(cfg: Any) -> int:
        words = argv if found else list(cfg.hydra.overrides.task)
        return launch_config(config_of(cfg, found[0] if found else find_checkpoint(words), words), evaluate)

    return run_door("train", argv, task, __doc__ or "", completed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
