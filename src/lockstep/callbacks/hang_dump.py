"""Write the stacks of a rank that hangs, and of those that wait for it, into stack-rank<N>.txt by faulthandler.

The collective of the ranks that wait fails at about the same time, after `timeout_s`, and ends the run.
"""

import faulthandler
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lockstep.callbacks.resume_point import phase_of


class HangDump(pl.Callback):
    """Write the stack after `timeout_s` without a batch, into `folder` or the trainer's default_root_dir.

    Args:
        on_error: called early with an exception of this rank, whose attribute `phase` is set: other ranks may wait.
    """

    def __init__(
        self, folder: Path | None = None, timeout_s: float = 300.0, on_error: Callable[..., Any] | None = None
    ) -> None:
        self.folder, self.timeout_s, self.on_error = folder, timeout_s, on_error

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.path = Path(self.folder or trainer.default_root_dir) / f"stack-rank{trainer.global_rank}.txt"
        self.file, self.armed_at = self.path.open("a"), 0.0

    def _arm(self, *_: Any) -> None:
        if time.monotonic() - self.armed_at > 1:  # arming starts a thread: once a second costs nothing
            faulthandler.dump_traceback_later(self.timeout_s, file=self.file)
            self.armed_at = time.monotonic()

    on_train_batch_start = on_train_batch_end = on_validation_batch_start = on_validation_batch_end = _arm
    on_test_batch_start = on_test_batch_end = _arm

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        exception.phase = phase_of(trainer)  # type: ignore[attr-defined]
        if self.on_error is not None:
            self.on_error(exception)
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not hasattr(self, "file"):
            return  # Lightning refused the module before setup
        faulthandler.cancel_dump_traceback_later()
        self.file.close()
        if self.path.exists() and not self.path.stat().st_size:
            self.path.unlink()
