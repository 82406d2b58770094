"""Resume points: the position of a checkpoint in training, and the loop state and random states to resume there.

Lightning infers from its progress counters, which change meaning with accumulate_grad_batches, whether a validation is
skipped or repeated. Checkpoints of this project store the position, and `loop_state` computes the counters from it.
"""

import math
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

TRAINING, VALIDATION, EPOCH_END = "training", "validation", "epoch_end"
STAGES = {"train": TRAINING, "validate": VALIDATION, "sanity_check": VALIDATION, "test": "test"}


def phase_of(trainer: pl.Trainer) -> str:
    """Return what the trainer does now: training, validation, test, else start; not the phase of a point."""
    return STAGES.get(str(trainer.state.stage and trainer.state.stage.value), "start")


def batches_done(trainer: pl.Trainer) -> int:
    """Return the micro-batches of this epoch so far, with the one that has just ended."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def ends_step(trainer: pl.Trainer) -> bool:
    """Return whether the batch that has just ended was the last micro-batch of an optimizer step."""
    return batches_done(trainer) % trainer.accumulate_grad_batches == 0 or ends_epoch(trainer)


def ends_epoch(trainer: pl.Trainer) -> bool:
    if trainer.num_training_batches == math.inf:  # data without a length
        return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return batches_done(trainer) >= trainer.num_training_batches


def epoch_of(trainer: pl.Trainer) -> str:
    """Return "1/3", or "1" where trainer.max_epochs names no last epoch."""
    last = trainer.max_epochs or -1
    return f"{min(trainer.current_epoch + 1, last)}/{last}" if last > 0 else str(trainer.current_epoch + 1)


def steps_are_over(trainer: pl.Trainer) -> bool:
    """Return whether trainer.max_steps are done; a module with several optimizers may pass them by."""
    return 0 <= trainer.max_steps <= trainer.global_step


def is_validation_epoch(trainer: pl.Trainer) -> bool:
    """Return whether this epoch is validated: at its end, and within it if trainer.val_check_interval says so."""
    every = trainer.check_val_every_n_epoch or 1
    return trainer.enable_validation and (trainer.current_epoch + 1) % every == 0


def loop_state(fit_loop: dict[str, Any], point: dict[str, Any], accumulate: int) -> dict[str, Any]:
    """Return the state of Lightning's `loops.fit_loop` that resumes at `point`.

    Args:
        point: `epoch`, the current epoch from 0 (at EPOCH_END the one that has just ended); `batches_done`, the
            optimizer steps done in it; `is_last`, whether they end it; `lacking`, the micro-batches that its last step
            has fewer than `accumulate`; `phase`. TRAINING resumes after `batches_done`,
            VALIDATION repeats the whole validation at that point, EPOCH_END starts the next epoch.
    """

    def progress(ready: int, processed: int, completed: int, earlier: int = 0, **more: bool) -> dict[str, Any]:
        counts = {"ready": ready, "started": ready, "processed": processed, "completed": completed}
        return {"total": {name: earlier + count for name, count in counts.items()}, "current": counts, **more}

    phase, started, micro = point["phase"], point["epoch"] + 1, point["batches_done"] * accumulate
    ended, completed, is_last = point["epoch"], micro, False
    if phase == EPOCH_END:
        ended, micro, completed = started, 0, 0
    elif phase == TRAINING:
        completed = micro - 1  # this is how Lightning recognises a checkpoint saved in on_train_batch_end
    else:
        is_last = point.get("is_last", point["batches_done"] >= point.get("batches_per_epoch", math.inf))  # version 1
        micro = completed = micro - point.get("lacking", 0)
    before = fit_loop["epoch_loop.batch_progress"]  # of earlier epochs: check_val_every_n_epoch=null counts on
    earlier = before["total"]["ready"] - (0 if phase == EPOCH_END else before["current"]["ready"])
    return {
        **fit_loop,
        "epoch_progress": progress(started, ended, ended),
        "epoch_loop.batch_progress": progress(micro, micro, completed, earlier, is_last_batch=is_last),
        "epoch_loop.val_loop.batch_progress": progress(int(phase == VALIDATION), 0, 0, is_last_batch=False),
    }


def random_state() -> dict[str, Any]:
    """Return the state of every generator that this process draws from."""
    cuda: Any = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # one process may use several GPUs (dp)
        is_one_of_several = torch.distributed.is_initialized()
        cuda = torch.cuda.get_rng_state() if is_one_of_several else torch.cuda.get_rng_state_all()
    name, keys, *rest = np.random.get_state()
    numpy = [name, keys.tolist(), *rest]
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": numpy, "python": random.getstate()}


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        states = state["cuda"] if isinstance(state["cuda"], list) else [state["cuda"]]
        for device, own in zip(range(torch.cuda.device_count()), states, strict=False):  # there may be fewer here
            torch.cuda.set_rng_state(own.cpu(), device if len(states) > 1 else "cuda")
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
