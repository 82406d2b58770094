"""Write the stacks of a rank that hangs, and of the ranks that wait for it, with faulthandler.

Each rank writes into stack-rank<N>.txt after `timeout_s`. At about the same time the collective of
the waiting ranks fails, which ends the run.
"""

import faulthandler
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lockstep.checkpoints.resume_point import stage_name

# Arming starts a thread, so it is done at most once in this time.
ARMING_INTERVAL_S = 1.0


class HangDump(pl.Callback):
    """Write the stack after `timeout_s` without a batch.

    Args:
        folder: where the stacks are written; None: the trainer's default_root_dir.
        timeout_s: seconds without a batch.
        on_error: called at once with an exception of this rank, because other ranks may wait. Its
            attribute `phase` is set.
    """

    def __init__(
        self,
        folder: Path | None = None,
        timeout_s: float = 300.0,
        on_error: Callable[..., Any] | None = None,
    ) -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self.on_error = on_error

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = Path(self.folder or trainer.default_root_dir)
        self.path = folder / f"stack-rank{trainer.global_rank}.txt"
        self.file = self.path.open("a")
        self.armed_at = 0.0

    def _arm(self, *_: Any) -> None:
        now = time.monotonic()
        if now - self.armed_at > ARMING_INTERVAL_S:
            faulthandler.dump_traceback_later(self.timeout_s, file=self.file)
            self.armed_at = now

    on_train_batch_start = _arm
    on_train_batch_end = _arm
    on_validation_batch_start = _arm
    on_validation_batch_end = _arm
    on_test_batch_start = _arm
    on_test_batch_end = _arm

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        exception.phase = stage_name(trainer)  # type: ignore[attr-defined]
        if self.on_error is not None:
            self.on_error(exception)
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Lightning may refuse the module before it calls setup.
        if not hasattr(self, "file"):
            return

        faulthandler.cancel_dump_traceback_later()
        self.file.close()
        is_empty = self.path.exists() and self.path.stat().st_size == 0
        if is_empty:
            self.path.unlink()
