"""Keeps run.json true while the run lives: at the start, after every epoch, and as a heartbeat in between."""

import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lockstep.runs.costs import derived_fields
from lockstep.runs.record import HEARTBEAT_INTERVAL_S, read_record, write_record
from lockstep.storage.checkpoint_files import Sidecar


class RunRecorder(Callback):
    """Writes on rank zero only, and never calls a collective.

    Args:
        path: run.json, which the launch has begun.
        global_batch_size: images per optimizer step.
        hardware: the instance type with its price, for the cost.
    """

    def __init__(self, path: str | Path, global_batch_size: int, hardware: dict[str, Any] | None = None) -> None:
        self.hardware = hardware
        self.path, self.global_batch_size = Path(path), global_batch_size
        self.written_at = 0.0
        self.fit_started_at: float | None = None
        self.fit_before_s = 0.0  # seconds of fit in earlier starts of this run
        self.best_metrics: dict[str, float] = {}
        self.training = False

    def write(self, trainer: pl.Trainer | None = None, **fields: Any) -> None:
        """Merge fields, and what every callback contributes, into the record."""
        if trainer is not None and not trainer.is_global_zero:
            return
        record = read_record(self.path)
        if trainer is not None:
            record["metrics"] = {**record.get("metrics", {}), **self._metrics(trainer)}
            record["epochs"] = max(record.get("epochs", 0), trainer.current_epoch)
            record["steps"] = self._steps(trainer, record.get("steps", 0))
            for part in (*trainer.callbacks, trainer.strategy):
                if part is not self and hasattr(part, "record_fields"):
                    record.update(part.record_fields())
            _add_uri(record)
        record.update(self._fit(), **fields)
        record.update(derived_fields(record, self.hardware))
        write_record(self.path, record)
        self.written_at = time.monotonic()

    def _steps(self, trainer: pl.Trainer, before: int) -> int:
        """In training where it stands: what was done beyond the checkpoint before a restart is lost, and counted so."""
        in_training = self.training and trainer.state.fn == "fit"
        return trainer.global_step if in_training else before

    def _metrics(self, trainer: pl.Trainer) -> dict[str, Any]:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        for callback in trainer.callbacks:
            values.update({n: v for n, v in getattr(callback, "latest", {}).items() if n.startswith("train/")})
        values.update(self.best_metrics)
        return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}

    def _fit(self) -> dict[str, float]:
        if self.fit_started_at is None:
            return {}
        return {"fit_seconds": round(self.fit_before_s + time.monotonic() - self.fit_started_at, 3)}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            before = read_record(self.path)
            self.fit_before_s = float(before.get("fit_seconds") or 0.0)
            self.best_metrics = {n: v for n, v in before.get("metrics", {}).items() if n == "val/acc_best"}
            self.fit_started_at = time.monotonic()
            restarts = before.get("restarts") or [{}]
            self.write(trainer, phase="start", steps=restarts[-1].get("resumed_step", before.get("steps") or 0))

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
            self.write(trainer, phase="training")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        accuracy = trainer.callback_metrics.get("val/acc")
        if accuracy is not None:
            best = max(float(accuracy), self.best_metrics.get("val/acc_best", 0.0))
            self.best_metrics = {"val/acc_best": best}

    def on_checkpoint_complete(self, path: Path, sidecar: Sidecar, kind: str) -> None:
        """A best that is not yet in the record would be lost with the process."""
        fields: dict[str, Any] = {"steps": max(sidecar.step, self._steps_so_far())}
        if kind == "best":
            named = {key: getattr(sidecar, key) for key in ("bytes", "sha256", "epoch", "step", "metric")}
            fields["best_checkpoint"] = {"path": f"{path.parent.name}/{path.name}", **named}
        self.write(None, **fields)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """How far it came; who started the run writes how it ended."""
        if trainer.is_global_zero:
            self.write(None, steps=self._steps(trainer, self._steps_so_far()))

    def _steps_so_far(self) -> int:
        return int(read_record(self.path).get("steps") or 0)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.write(trainer, phase="trained", epochs=trainer.current_epoch, steps=trainer.global_step)
            self.fit_before_s, self.fit_started_at = self._fit()["fit_seconds"], None

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write(trainer, phase="test")


def _add_uri(record: dict[str, Any]) -> None:
    """Where the best checkpoint lies in the bucket, once this one is there."""
    best, upload = record.get("best_checkpoint") or {}, record.get("upload") or {}
    if upload.get("uri") and upload.get("step") == best.get("step"):
        best["s3_uri"] = upload["uri"]
