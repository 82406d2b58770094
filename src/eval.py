"""Test a checkpoint: the same counts as its run, from the checkpoint alone.

    python src/eval.py ckpt_path=logs/train/runs/<run_id>/checkpoints/best-step00000460.ckpt [key=value …]

The checkpoint carries its composed config; what the command line says wins. ckpt_path also takes a run id and s3://….
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import logging
import sys
from pathlib import Path
from typing import Any

from lockstep.config.compose import CONFIGS, run_door
from lockstep.distributed import cluster as world
from lockstep.launch.launcher import launch_config, resume_in_rank
from lockstep.runs.errors import UserError
from lockstep.runs.leave import leave
from lockstep.storage.fetch import locate_checkpoint

log = logging.getLogger(__name__)

FROM_COMMAND_LINE = ("paths", "tags", "ckpt_path", "run_id", "test", "resume", "sweep_dir", "s3")
PARTS = ("trainer", "data", "model", "classifier", "optimizer")  # of a config that can be evaluated


def evaluate(config: dict[str, Any], cluster: Any, folder: Any) -> int:
    """One rank's evaluation."""
    from lockstep.callbacks.confusion import write_confusion
    from lockstep.runs.files import utc_now
    from lockstep.training.build import build_run, load_weights
    from lockstep.training.rank import enter_world

    with enter_world(config, cluster, folder) as world:
        run = build_run(config, cluster, folder, world, None, trainable=False)
        before = load_weights(run.module, config["ckpt_path"], config["model"]["name"])
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


def config_of(cfg: Any) -> dict[str, Any]:
    """The checkpoint's config with the command line's choices over it."""
    from lockstep.config.compose import plain
    from lockstep.training.build import read_checkpoint

    composed = plain(cfg)
    if not composed["ckpt_path"]:
        raise UserError("eval needs to know which checkpoint: ckpt_path=FILE, ckpt_path=<run_id> or ckpt_path=s3://….")
    logs = Path(composed["paths"]["log_dir"])
    path = locate_checkpoint(str(composed["ckpt_path"]), logs, composed.get("s3"), logs / "cache")
    own = read_checkpoint(path).get("lockstep")
    stored = own.get("config") if isinstance(own, dict) else None
    if not isinstance(stored, dict) or not all(isinstance(stored.get(part), dict) for part in PARTS):
        raise UserError(f"{path} carries no config: it was not written by this project.")
    overrides = list(cfg.hydra.overrides.task)
    if not is_own(path, composed["paths"]):
        stored = {**stored, "data": at_home(stored["data"], composed["paths"])}
    config = overlay(stored, composed, overrides)
    config.update(
        ckpt_path=str(path), task_name="eval", resume=None, logger={}, scheduler={}, test=True, resume_step=None
    )
    config["callbacks"] = {}
    if not any(word.startswith("trainer=") for word in overrides):
        for key in ("num_gpus", "stage_devices", "micro_batches", "balance"):  # of strategies that are left out here
            config["trainer"].pop(key, None)
        config["trainer"].update(launch="one_process", accelerator=composed["trainer"]["accelerator"], devices=1,
                                 num_nodes=1, strategy=None)  # fmt: skip
    config["trainer"]["accumulate_grad_batches"] = 1
    if config["trainer"]["launch"] == "one_process" and any(word.startswith("data.") for word in overrides):
        config["data"]["global_batch_size"] = 1  # nothing is trained: fewer images than that are no error
    if "choices" in config:
        config["choices"] = {**config["choices"], "trainer": cfg.hydra.runtime.choices["trainer"]}
    config["overrides"] = overrides
    return config


def is_own(checkpoint: Path, paths: dict[str, Any]) -> bool:
    """Of a run of this machine: what it says of folders, a command line here has said."""
    return any(checkpoint.is_relative_to(Path(paths["log_dir"]).resolve() / door) for door in ("train", "eval"))


def at_home(data: dict[str, Any], paths: dict[str, Any]) -> dict[str, Any]:
    """Another's checkpoint says which data it was trained on; where anything is written, this machine says alone."""
    home = Path(paths["data_dir"])
    moved = {"cache_dir": str(home / "cache"), "download_dir": str(home / str(data.get("name")))}
    return {**data, **{key: place for key, place in moved.items() if key in data}}


def overlay(base: dict[str, Any], composed: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """`base` with everything that an override names taken from `composed`: whole groups, or single values."""
    config = {**base, **{key: composed[key] for key in FROM_COMMAND_LINE if key in composed}}
    groups = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    for word in overrides:
        key = word.split("=")[0].lstrip("+~").split("@")[0]
        if key == "experiment":
            raise UserError("eval takes its experiment from the checkpoint: leave experiment= out.")
        if key in groups:
            config[key] = composed[key]
            continue
        target, source = config, composed
        *parents, last = key.split(".")
        for parent in parents:
            target, source = target.setdefault(parent, {}), source[parent]
        target[last] = source[last]
    return config


def main(argv: list[str]) -> int:
    if config := world.supervised_config():
        return resume_in_rank(config, evaluate)
    return run_door("train", argv, lambda cfg: launch_config(config_of(cfg), evaluate), __doc__ or "")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
