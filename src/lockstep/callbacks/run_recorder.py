"""Keeps run.json true while the run lives: at the start, after every epoch, and as a heartbeat in between."""

import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lockstep.runs.hooks import HasRecordFields
from lockstep.runs.record import HEARTBEAT_INTERVAL_S, RunRecord, read_record, update_record
from lockstep.storage.checkpoint_files import Sidecar


class RunRecorder(Callback):
    """Writes on rank zero only, and never calls a collective.

    Args:
        path: run.json, which the launch has begun.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.written_at = 0.0
        self.fit_started_at: float | None = None
        self.fit_before_s = 0.0  # seconds of fit in earlier starts of this run
        self.monitor, self.mode = "val/acc", "max"
        self.best_metrics: dict[str, float] = {}
        self.training = False

    def write(self, trainer: pl.Trainer | None = None, **fields: object) -> None:
        """Set fields of the record, and what every callback contributes.

        Raises:
            WrongValue: one is not of its field's type.
        """
        if trainer is not None and not trainer.is_global_zero:
            return
        with update_record(self.path) as record:
            if trainer is not None:
                self._add_progress(record, trainer)
            if self.fit_started_at is not None:
                record.fit_seconds = self._fit_seconds(self.fit_started_at)
            record.take(fields)
        self.written_at = time.monotonic()

    def _add_progress(self, record: RunRecord, trainer: pl.Trainer) -> None:
        record.metrics |= self._metrics(trainer)
        record.epochs = max(record.epochs or 0, trainer.current_epoch)
        record.steps = self._steps(trainer, record.steps or 0)
        for part in (*trainer.callbacks, trainer.strategy):
            if part is not self and isinstance(part, HasRecordFields):
                record.take(part.record_fields())
        _add_uri(record)

    def _steps(self, trainer: pl.Trainer, before: int) -> int:
        """In training where it stands: what was done beyond the checkpoint before a restart is lost, and counted so."""
        in_training = self.training and trainer.state.fn == "fit"
        return trainer.global_step if in_training else before

    def _metrics(self, trainer: pl.Trainer) -> dict[str, float | str]:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        for callback in trainer.callbacks:
            values.update({n: v for n, v in getattr(callback, "latest", {}).items() if n.startswith("train/")})
        values.update(self.best_metrics)
        return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}

    def elapsed(self) -> float:
        """Seconds of fit in all starts of this run; 0 on other ranks than 0."""
        return 0.0 if self.fit_started_at is None else self._fit_seconds(self.fit_started_at)

    def _fit_seconds(self, started_at: float) -> float:
        return round(self.fit_before_s + time.monotonic() - started_at, 3)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            before = read_record(self.path)
            self.monitor, self.mode = before.monitor, before.monitor_mode
            self.fit_before_s = before.fit_seconds or 0.0
            best = ((name, before.metrics.get(name)) for name in (f"{self.monitor}_best", "val/acc_best"))
            self.best_metrics = {name: value for name, value in best if isinstance(value, int | float)}
            self.fit_started_at = time.monotonic()
            steps = before.restarts[-1].resumed_step if before.restarts else before.steps
            self.write(trainer, phase="start", steps=steps or 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.training = True
        self.write(trainer, phase="training")

    def _beat(self, trainer: pl.Trainer, phase: str) -> None:
        if trainer.is_global_zero and time.monotonic() - self.written_at > HEARTBEAT_INTERVAL_S:
            self.write(trainer, phase=phase)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._beat(trainer, "training")

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._beat(trainer, "validation")

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._beat(trainer, "test")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write(trainer, phase="validation")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit":
            if not trainer.sanity_checking:  # now: a stop in the next epoch writes no metrics
                self._take_best(trainer)
            self.write(trainer, phase="training")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._take_best(trainer)  # of what training logs

    def _take_best(self, trainer: pl.Trainer) -> None:
        """`<monitor>_best` is the best of what is monitored, and val/acc_best the accuracy of that validation."""
        value, best = trainer.callback_metrics.get(self.monitor), self.best_metrics.get(f"{self.monitor}_best")
        if value is not None and improves(self.mode, float(value), best):
            reached = {self.monitor: value, "val/acc": trainer.callback_metrics.get("val/acc")}
            self.best_metrics = {f"{name}_best": float(value) for name, value in reached.items() if value is not None}

    def on_checkpoint_complete(self, path: Path, sidecar: Sidecar, kind: str) -> None:
        """A best that is not yet in the record would be lost with the process."""
        fields: dict[str, object] = {"steps": max(sidecar.step, self._steps_so_far())}
        if kind == "best":
            named = {key: getattr(sidecar, key) for key in ("bytes", "sha256", "epoch", "step", "metric")}
            fields["best_checkpoint"] = {"path": f"{path.parent.name}/{path.name}", **named}
        self.write(None, **fields)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """How far it came; who started the run writes how it ended."""
        if trainer.is_global_zero:
            self.write(None, steps=self._steps(trainer, self._steps_so_far()))

    def _steps_so_far(self) -> int:
        return read_record(self.path).steps or 0

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.write(trainer, phase="trained", epochs=trainer.current_epoch, steps=trainer.global_step)
            self.fit_before_s, self.fit_started_at = read_record(self.path).fit_seconds or 0.0, None

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write(trainer, phase="test")


def improves(mode: str, value: float, best: float | None) -> bool:
    """mode: max or min, as callbacks.checkpoints has it. A nan never does."""
    if math.isnan(value):
        return False
    return best is None or (value > best if mode == "max" else value < best)


def _add_uri(record: RunRecord) -> None:
    """Where the best checkpoint lies in the bucket, once this one is there."""
    if record.upload.uri and record.upload.step == record.best_checkpoint.step:
        record.best_checkpoint.s3_uri = record.upload.uri
