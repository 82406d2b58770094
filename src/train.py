"""Train a classifier, test its best checkpoint, write its record.

python src/train.py [group=option …] [key=value …]      --help lists them all
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import logging
import sys
from pathlib import Path
from typing import Any

from lockstep.config.compose import run_door
from lockstep.distributed import cluster as world
from lockstep.launch.launcher import launch, resume_in_rank
from lockstep.runs.old_configs import model_name

log = logging.getLogger(__name__)


def train(config: dict[str, Any], cluster: Any, folder: Any) -> int:
    """One rank's whole run: fit, test the best checkpoint, finish the record."""
    from lockstep.runs.files import utc_now
    from lockstep.training.build import build_run, read_checkpoint, start_from
    from lockstep.training.checks import check_data_of_run, check_fits
    from lockstep.training.rank import enter_world

    with enter_world(config, cluster, folder) as world:
        run = build_run(config, cluster, folder, world, config.get("resume_step"))
        path, goes_on = config.get("ckpt_path"), bool(config.get("resume_step"))
        if path and goes_on:
            checkpoint = read_checkpoint(path)
            check_fits(run.module, checkpoint["state_dict"], path, model_name(config))
            check_data_of_run(checkpoint, run.facts, folder)
            del checkpoint
        elif path:
            said = start_from(run.module, path, model_name(config), config["data"], run.facts["data_hash"])
            if cluster.is_rank_zero:
                log.info(said)
        if cluster.is_rank_zero:
            run.recorder.write(**_known_at_start(run), hosts=world.hosts)
        run.trainer.fit(run.module, datamodule=run.data, ckpt_path=path if goes_on else None, weights_only=True)
        for profile in sorted(folder.path.glob("fit-profile*.txt")) if cluster.is_rank_zero else ():
            log.info(profile.read_text())
        if config["test"]:
            _test(run, cluster, folder)
        if cluster.is_rank_zero:
            ended = {"status": "finished", "phase": "end", "exit_code": 0, "finished_at": utc_now(), "error": None}
            run.recorder.write(run.trainer, **ended)
    return 0


def _known_at_start(run: Any) -> dict[str, Any]:
    return {
        "precision": str(run.trainer.precision),  # what `auto` came to
        "num_parameters": sum(p.numel() for p in run.module.net.parameters()),
        "num_train": run.data.num_train,
        "num_val": run.data.num_val,
        "num_test": run.data.num_test,
        "left_out_per_epoch": run.data.left_out_per_epoch,
        "data_hash": run.facts["data_hash"],
    }


def _test(run: Any, cluster: Any, folder: Any) -> None:
    """Test the best checkpoint (the last weights where nothing was validated) and keep the confusion matrix."""
    best: Path | None = run.checkpoints.best_path if run.checkpoints else None
    if best is not None and cluster.num_nodes > 1:
        from lockstep.training.share_checkpoint import fetch_from_rank_zero

        best = fetch_from_rank_zero(best, cluster, folder)
    from lightning.pytorch.callbacks import WeightAveraging

    # A checkpoint's weights are the averaged ones where there is an average; the callback would swap them away.
    run.trainer.callbacks = [
        callback for callback in run.trainer.callbacks if not isinstance(callback, WeightAveraging)
    ]
    run.trainer.test(run.module, datamodule=run.data, ckpt_path=best, weights_only=True, verbose=False)
    if run.trainer.is_global_zero and run.module.test_confusion is not None:  # limit_test_batches=0 tests nothing
        from lockstep.callbacks.confusion import write_confusion

        per_class = write_confusion(run.module.test_confusion, run.facts["class_names"], folder)
        run.recorder.write(run.trainer, test_acc_per_class=per_class)


def main(argv: list[str]) -> int:
    if config := world.supervised_config():
        return resume_in_rank(config, train)
    from lockstep.batch_size.sessions import find_largest
    from lockstep.launch.resume import with_options_of_run

    return run_door("train", argv, lambda cfg: launch(cfg, train, find_largest), __doc__ or "", with_options_of_run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
