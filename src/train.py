"""Train a classifier, test its best checkpoint, write its record.

python src/train.py [group=option …] [key=value …]      --help lists them all
"""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.command_line import run_script
from lockstep.launch.launcher import launch
from lockstep.launch.plan import RunPlan

if TYPE_CHECKING:
    from lockstep.training.build import Run

log = logging.getLogger(__name__)


def train(plan: RunPlan) -> int:
    """One rank's whole run: fit, test the best checkpoint, finish the record."""
    from lockstep.launch.start import write_config
    from lockstep.runs.files import utc_now
    from lockstep.training.build import build_run
    from lockstep.training.rank import joined_ranks

    with joined_ranks(plan) as session:
        plan, folder, is_rank_zero = session.plan, plan.folder, plan.cluster.is_rank_zero
        run = build_run(plan, session)
        _take_weights(run, plan)
        if is_rank_zero:
            if plan.resume_step is not None:  # what a failed resume asked for is forgotten
                write_config(plan)
            run.recorder.write(**_known_at_start(run, plan), hosts=session.hosts)
        resume_from = plan.checkpoint if plan.resume_step else None
        run.trainer.fit(run.module, datamodule=run.data, ckpt_path=resume_from, weights_only=True)
        for profile in sorted(folder.path.glob("fit-profile*.txt")) if is_rank_zero else ():
            log.info(profile.read_text())
        if plan.config["test"]:
            _test(run, plan)
        if is_rank_zero:
            ended = {"status": "finished", "phase": "end", "exit_code": 0, "finished_at": utc_now(), "error": None}
            run.recorder.write(run.trainer, **ended)
    return 0


def _take_weights(run: "Run", plan: RunPlan) -> None:
    """Of a new run the weights that it begins with; of one that goes on, that its checkpoint fits: fit() loads it."""
    from lockstep.callbacks.checkpoint_io import load_on_all_ranks
    from lockstep.training.checks import check_data_of_run, check_fits
    from lockstep.training.weights import start_from

    path, model_name = plan.checkpoint, plan.model_name
    if path and plan.resume_step:
        checkpoint = load_on_all_ranks(path)
        check_fits(run.module, checkpoint["state_dict"], path, model_name)
        if "data_hash" in run.facts:
            check_data_of_run(checkpoint, run.facts, plan.folder)
    elif path:
        said = start_from(run.module, path, model_name, plan.config["data"], run.facts)
        if plan.cluster.is_rank_zero:
            log.info(said)


def _known_at_start(run: "Run", plan: RunPlan) -> dict[str, Any]:
    from lockstep.data.report import settings_of

    net: Any = getattr(run.module, "net", run.module)
    of_module = {
        "precision": str(run.trainer.precision),  # what `auto` came to
        "num_parameters": sum(p.numel() for p in net.parameters()),
        "num_trained_parameters": sum(p.numel() for p in net.parameters() if p.requires_grad),
    }
    if "data_hash" not in run.facts:
        return of_module
    return {
        **of_module,
        "num_train": run.data.num_train,
        "num_val": run.data.num_val,
        "num_test": run.data.num_test,
        "left_out_per_epoch": run.data.left_out_per_epoch,
        "data_hash": run.facts["data_hash"],
        "images": settings_of(run.data, plan.choices.get("augmentation")),
        "data_report": run.data.report,
    }


def _test(run: "Run", plan: RunPlan) -> None:
    """Test the best checkpoint (the last weights where nothing was validated) and keep the confusion matrix."""
    best: Path | None = run.checkpoints.best_path if run.checkpoints else None
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.utilities.model_helpers import is_overridden

    if not is_overridden("test_step", run.module) or not is_overridden("test_dataloader", run.data):
        log.info("Nothing is tested: the task has no test_step, or the data no test_dataloader.")
        return

    # A checkpoint's weights are the averaged ones where there is an average; the callback would swap them away.
    trainer: Any = run.trainer
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, WeightAveraging)]
    trainer.test(run.module, datamodule=run.data, ckpt_path=best, weights_only=True, verbose=False)
    counts: Any = getattr(run.module, "test_counts", None)
    if run.trainer.is_global_zero and counts is not None:  # limit_test_batches=0 tests nothing
        from lockstep.callbacks.confusion import write_counts

        per_class = write_counts(counts, run.facts["class_names"], plan.folder)
        run.recorder.write(run.trainer, test_acc_per_class=per_class)


def main(argv: list[str]) -> int:
    from lockstep.batch_size.search import search
    from lockstep.launch.resume import find_stored

    return run_script("train", argv, lambda cfg: launch(cfg, train, search), __doc__ or "", find_stored)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
