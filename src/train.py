"""Train a task, test its best checkpoint, write its record.

python src/train.py [group=option …] [key=value …]      --help lists them all
"""

import logging
import sys
from functools import partial
from typing import Any

from lockstep.commands.command_line import run_script
from lockstep.config.compose import whole_config
from lockstep.runs.launcher import launch
from lockstep.runs.plan import RunPlan

log = logging.getLogger(__name__)


def train(plan: RunPlan) -> int:
    """Run one rank: fit, test the best checkpoint, complete the record."""
    from lockstep.process.files import utc_now
    from lockstep.runs.join import joined_ranks
    from lockstep.runs.start import write_config
    from lockstep.training.build import build_run

    with joined_ranks(plan) as session:
        plan = session.plan
        trainer, module, data, recorder = build_run(session)  # strategy, data, module, weights, callbacks, loggers
        if trainer.is_global_zero:
            if plan.resume_step is not None:  # a resume that trains no step leaves the config of what ran before
                recorder.on_first_step = partial(write_config, plan)
            recorder.write(**known_at_start(trainer, module, data, plan), hosts=session.hosts)
        resume_from = plan.checkpoint if plan.resume_step else None
        trainer.fit(module, datamodule=data, ckpt_path=resume_from, weights_only=True)
        for profile in sorted(plan.folder.path.glob("fit-profile*.txt")) if trainer.is_global_zero else ():
            log.info(profile.read_text())
        if plan.config["test"]:
            test_best(trainer, module, data)
        ended = {"status": "finished", "phase": "end", "exit_code": 0, "finished_at": utc_now(), "error": None}
        recorder.write(trainer, **ended)
    return 0


def known_at_start(trainer: Any, module: Any, data: Any, plan: RunPlan) -> dict[str, Any]:
    """Return fields of the record that are known when the parts of a run are built."""
    from lockstep.config.instantiate import options_of
    from lockstep.data.report import settings_of
    from lockstep.records.config import model_name

    parameters = list(getattr(module, "net", module).parameters())
    takes_model = "net" in options_of(type(module))[0].keys() - plan.config["task"].keys()
    of_module = {
        "model": model_name(plan.config) if takes_model else type(module).__name__,
        "precision": str(trainer.precision),  # what `auto` came to
        "num_parameters": sum(p.numel() for p in parameters),
        "num_trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }
    if not hasattr(data, "place"):
        return {**of_module, "global_batch_size": None, "per_device_batch_size": None}  # its loaders decide
    counts = {name: getattr(data, name) for name in ("num_train", "num_val", "num_test")}
    counts["left_out_per_epoch"] = data.num_train % data.global_batch_size
    images = settings_of(data, plan.choices.get("augmentation"))
    return {**of_module, **counts, "data_hash": data.data_hash, "images": images, "data_report": data.report}


def test_best(trainer: Any, module: Any, data: Any) -> None:
    """Test the best checkpoint, or the last weights if there is none."""
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.utilities.model_helpers import is_overridden

    if not is_overridden("test_step", module) or not is_overridden("test_dataloader", data):
        log.info("Nothing is tested: the task has no test_step, or the data no test_dataloader.")
        return
    best = next((path for path in (getattr(each, "best_path", None) for each in trainer.callbacks) if path), None)
    # A checkpoint's weights are the averaged ones where there is an average; the callback would swap them away.
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, WeightAveraging)]
    trainer.test(module, datamodule=data, ckpt_path=best, weights_only=True, verbose=False)


def main(argv: list[str]) -> int:
    from lockstep.runs.batch_search import search
    from lockstep.runs.start import find_stored

    return run_script("train", argv, lambda cfg: launch(whole_config(cfg), train, search), __doc__ or "", find_stored)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
