"""Resume points: the position of a checkpoint in training, and the loop state and random states to resume there.

Lightning infers from its progress counters in which hook a checkpoint was saved, and skips or repeats a validation
accordingly; the counters also change meaning with accumulate_grad_batches. Checkpoints of this project therefore
store the position explicitly (see `loop_state`), and the counters are computed from it when a checkpoint is loaded.
"""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

TRAINING, VALIDATION, EPOCH_END = "training", "validation", "epoch_end"


def ends_step(trainer: pl.Trainer) -> bool:
    """Return whether the batch that has just ended was the last micro-batch of an optimizer step."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return batches % trainer.accumulate_grad_batches == 0 or ends_epoch(trainer)


def ends_epoch(trainer: pl.Trainer) -> bool:
    """Return whether the batch that has just ended was the epoch's last."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready >= trainer.num_training_batches


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Return whether a validation follows the batch that has just ended, as trainer.val_check_interval says."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return is_validation_epoch(trainer) and batches % trainer.val_check_batch == 0


def is_validation_epoch(trainer: pl.Trainer) -> bool:
    """Return whether this epoch is validated: at its end, and within it if trainer.val_check_interval says so."""
    every = trainer.check_val_every_n_epoch or 1
    return trainer.enable_validation and (trainer.current_epoch + 1) % every == 0


def loop_state(fit_loop: dict[str, Any], point: dict[str, Any], accumulate: int) -> dict[str, Any]:
    """Return the state of Lightning's `loops.fit_loop` that resumes at `point`.

    Args:
        fit_loop: the state stored in the checkpoint.
        point: `epoch`, the current epoch from 0 (at EPOCH_END the one that has just ended); `batches_done`, the
            optimizer steps done in it; `batches_per_epoch`; `phase`. TRAINING resumes after `batches_done`,
            VALIDATION repeats the whole validation at that point, EPOCH_END starts the next epoch.
        accumulate: micro-batches per optimizer step.
    """
    epoch, micro = point["epoch"], point["batches_done"] * accumulate
    if point["phase"] == EPOCH_END:
        epochs, batches, last = _counts(epoch + 1, epoch + 1), _counts(0, 0), False
    elif point["phase"] == VALIDATION:
        last = point["batches_done"] >= point["batches_per_epoch"]
        epochs, batches = _counts(epoch + 1, epoch), _counts(micro, micro)
    else:
        # completed = processed - 1 is how Lightning recognises a checkpoint saved in on_train_batch_end
        epochs, batches, last = _counts(epoch + 1, epoch), _counts(micro, micro, completed=micro - 1), False
    validation = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    if point["phase"] != VALIDATION:
        validation = dict.fromkeys(validation, 0)
    state = dict(fit_loop)
    state["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
    state["epoch_loop.batch_progress"] = {"total": dict(batches), "current": dict(batches), "is_last_batch": last}
    state["epoch_loop.val_loop.batch_progress"] = {
        "total": dict(validation), "current": dict(validation), "is_last_batch": False
    }  # fmt: skip
    return state


def _counts(started: int, processed: int, completed: int | None = None) -> dict[str, int]:
    completed = processed if completed is None else completed
    return {"ready": started, "started": started, "processed": processed, "completed": completed}


def random_state() -> dict[str, Any]:
    """Return the state of every generator that this process draws from."""
    cuda: Any = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # one process may use several GPUs (dp)
        several = not torch.distributed.is_initialized() and torch.cuda.device_count() > 1
        cuda = torch.cuda.get_rng_state_all() if several else torch.cuda.get_rng_state()
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(), "cuda": cuda, "numpy": [name, keys.tolist(), *rest],
        "python": random.getstate(),
    }  # fmt: skip


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
