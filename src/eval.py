"""Test a checkpoint: the same counts as its run, from the checkpoint alone.

    python src/eval.py ckpt_path=logs/train/runs/<run_id>/checkpoints/best-step00000460.ckpt [key=value …]

The checkpoint carries its composed config; what the command line says wins. ckpt_path also takes a run id and s3://….
"""

import logging
import sys
from pathlib import Path
from typing import Any

from lockstep.config.compose import CONFIGS, run_door
from lockstep.distributed.cluster import plan_file
from lockstep.launch.launcher import launch_config, run_supervised
from lockstep.launch.plan import RunPlan
from lockstep.runs.errors import UserError
from lockstep.runs.leave import leave
from lockstep.storage.fetch import locate_checkpoint
from lockstep.strategies.placement import in_one_process

log = logging.getLogger(__name__)

FROM_COMMAND_LINE = ("paths", "tags", "ckpt_path", "run_id", "test", "resume", "sweep_dir", "s3")
PARTS = ("trainer", "data", "model", "classifier", "optimizer")  # of a config that can be evaluated


def evaluate(plan: RunPlan) -> int:
    """One rank's evaluation."""
    from lockstep.callbacks.confusion import write_confusion
    from lockstep.runs.files import utc_now
    from lockstep.training.build import build_run
    from lockstep.training.rank import joined_ranks
    from lockstep.training.weights import load_weights

    with joined_ranks(plan) as session:
        plan, is_rank_zero = session.plan, plan.cluster.is_rank_zero
        run = build_run(plan, session, trainable=False)
        before = load_weights(run.module, str(plan.checkpoint), plan.config["model"]["name"])
        chosen = any(word.lstrip("+~").startswith("data") for word in plan.overrides)
        if is_rank_zero and not chosen and before.get("data_hash") not in (None, run.facts["data_hash"]):
            log.info("The images are not those of the training: it may have trained on some of this test.")
        run.trainer.test(run.module, datamodule=run.data, verbose=False)
        counts: Any = run.module.test_confusion
        if counts is None:
            raise UserError("trainer.limit_test_batches=0 leaves nothing to test.")
        if is_rank_zero:
            per_class = write_confusion(counts, run.facts["class_names"], plan.folder)
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
    from lockstep.training.weights import read_checkpoint

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
    config.update(ckpt_path=str(path), task_name="eval", resume=None, logger={}, scheduler={}, test=True)
    config["callbacks"] = {}
    if not any(word.startswith("trainer=") for word in overrides):
        config["trainer"] = in_one_process(config["trainer"], composed["trainer"]["accelerator"])
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
    if path := plan_file():
        return run_supervised(path, evaluate)
    return run_door("train", argv, lambda cfg: launch_config(config_of(cfg), evaluate), __doc__ or "")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
