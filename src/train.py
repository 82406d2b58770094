"""Train a task, test its best checkpoint, write its record.

python src/train.py [group=option …] [key=value …]      --help lists them all
"""

import logging
import sys
from functools import partial
from typing import TYPE_CHECKING

from lockstep.commands.command_line import read_command
from lockstep.process.files import utc_now
from lockstep.process.script import script
from lockstep.ranks.find import find_ranks
from lockstep.runs.checks import check_before_start
from lockstep.runs.finishing import finish_again
from lockstep.runs.first_record import write_config
from lockstep.runs.opening import open_run
from lockstep.runs.resume import fetch_newer_checkpoints, find_stored_config
from lockstep.runs.run import Run
from lockstep.runs.starting import start_ranks

if TYPE_CHECKING:
    from lockstep.training.build import Parts

log = logging.getLogger(__name__)


@script
def main(argv: list[str]) -> int:
    """Train as one process of a run, or start the processes of this node; return the exit code."""
    command = read_command("train", argv, __doc__ or "")
    config = command.compose(stored=find_stored_config(command.overrides))
    cluster = find_ranks(config)
    check_before_start(config, cluster)

    code = finish_again(config, cluster)
    if code is not None:
        return code
    fetch_newer_checkpoints(config)
    if cluster.starts_ranks:
        return start_ranks(config, cluster)

    with open_run(config, cluster) as run:
        # torch and Lightning are imported here, after every early refusal.
        from lockstep.training.build import build

        parts = build(run)
        record_start(run, parts)
        trainer, module, data = parts
        trainer.fit(module, datamodule=data, ckpt_path=run.resume_from, weights_only=True)
        log_profiles(run)
        if config["test"]:
            test_best(parts)
        run.update(
            trainer, status="finished", phase="end", exit_code=0, finished_at=utc_now(), error=None
        )
    return run.exit_code


def record_start(run: Run, parts: "Parts") -> None:
    """Record what is known when the parts of a run are built."""
    if not run.cluster.is_rank_zero:
        return
    if run.resume_step is not None:
        # A resume that trains no step keeps the config of the earlier start.
        run.recorder.on_first_step = partial(write_config, run)

    from lockstep.training.build import describe_parts

    run.update(hosts=run.hosts, **describe_parts(run, parts))


def log_profiles(run: Run) -> None:
    """Log what trainer.profiler= has measured."""
    if not run.cluster.is_rank_zero:
        return
    for profile in sorted(run.folder.path.glob("fit-profile*.txt")):
        log.info(profile.read_text())


def test_best(parts: "Parts") -> None:
    """Test the best checkpoint, or the last weights if there is none."""
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.utilities.model_helpers import is_overridden

    trainer, module, data = parts
    if any(getattr(callback, "is_pruned", False) for callback in trainer.callbacks):
        log.info("Nothing is tested: the trial is pruned.")
        return
    # Without a data module the module has its own loaders.
    loaders = module if data is None else data
    if not is_overridden("test_step", module) or not is_overridden("test_dataloader", loaders):
        log.info("Nothing is tested: the task has no test_step, or the data no test_dataloader.")
        return

    paths = [getattr(callback, "best_path", None) for callback in trainer.callbacks]
    best = next((path for path in paths if path), None)
    # If there is an average of the weights, the checkpoint's weights are averaged. This callback
    # would replace them.
    trainer.callbacks = [
        callback for callback in trainer.callbacks if not isinstance(callback, WeightAveraging)
    ]
    # The data may draw their splits again, which are those of the training then.
    reset_seed()
    trainer.test(module, datamodule=data, ckpt_path=best, weights_only=True, verbose=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
