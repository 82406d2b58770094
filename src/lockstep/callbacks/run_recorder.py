"""Keep run.json up to date during a run: at each phase, after each validation, and every few seconds."""

import csv
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lockstep.callbacks.resume_point import phase_of
from lockstep.runs.files import utc_now, write_atomically
from lockstep.runs.record import HEARTBEAT_INTERVAL_S, RunRecord, read_record, update_record, write_record
from lockstep.storage.checkpoint_files import Sidecar


class RunRecorder(pl.Callback):
    """Write run.json on rank zero, without collectives; what train.py has not begun this callback begins and ends.

    Args:
        on_first_step: called on rank zero after the first step of this start.
    """

    def __init__(self, path: str | Path, on_first_step: Callable[[], None] | None = None) -> None:
        self.path, self.on_first_step, self.phase, self.written_at = Path(path), on_first_step, "start", 0.0
        self.fit_started_at: float | None = None
        self.fit_before_s = 0.0  # seconds of fit in earlier starts of this run
        self.monitor, self.is_begun_here = "val/acc", False
        self.steps = 0  # as of the last write

    def write(self, trainer: pl.Trainer | None = None, **fields: object) -> None:
        """Set fields of the record; with a trainer, also those of every callback."""
        if trainer is not None and not trainer.is_global_zero:
            return
        with update_record(self.path) as record:
            if trainer is not None:
                self._add_progress(record, trainer)
            record.fit_seconds = self.elapsed() or record.fit_seconds
            record.take(fields)
            self.steps = record.steps or 0
        self.written_at = time.monotonic()

    def _add_progress(self, record: RunRecord, trainer: pl.Trainer) -> None:
        values: dict[str, Any] = {} if trainer.sanity_checking else dict(trainer.callback_metrics)
        for part in (*trainer.callbacks, trainer.strategy):
            values |= {n: v for n, v in getattr(part, "latest", {}).items() if n.startswith("train/")}
            if hasattr(part, "record_fields"):
                record.take(part.record_fields())
        for name, value in values.items():
            record.metrics[name] = float(value) if math.isfinite(value) else str(float(value))
        record.epochs = max(record.epochs or 0, trainer.current_epoch)
        if trainer.state.fn == "fit" and self.phase in ("training", "validation"):
            record.steps = trainer.global_step  # steps beyond the checkpoint before a restart are lost
        if record.upload.uri and record.upload.step == record.best_checkpoint.step:
            record.best_checkpoint.s3_uri = record.upload.uri

    def elapsed(self) -> float:
        """Return the seconds of fit in all starts of this run; 0 on other ranks than 0."""
        now_s = 0.0 if self.fit_started_at is None else time.monotonic() - self.fit_started_at
        return round(self.fit_before_s + now_s, 3)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.is_begun_here = not self.path.exists()
        if self.is_begun_here:
            chooser = next((each for each in trainer.callbacks if hasattr(each, "best_path")), None)
            begun = RunRecord(
                run_id=self.path.parent.name, task_name="train", status="running", started_at=utc_now(),
                model=type(pl_module).__name__, world_size=trainer.world_size, num_nodes=trainer.num_nodes,
                monitor=getattr(chooser, "monitor", "val/acc"),
            )  # fmt: skip
            write_record(self.path, begun)
        before = read_record(self.path)
        self.monitor, self.fit_before_s = before.monitor, before.fit_seconds or 0.0
        self.fit_started_at = time.monotonic()
        self.write(trainer, phase="start")

    def _beat(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write when the phase changes, and every few seconds."""
        if phase_of(trainer) != self.phase or time.monotonic() - self.written_at > HEARTBEAT_INTERVAL_S:
            self.phase = phase_of(trainer)
            self.write(trainer, phase=self.phase)

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = _beat

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.steps and trainer.global_step:  # from now on the run is one to resume
            self.write(trainer)
        if self.on_first_step is not None and trainer.is_global_zero:
            self.on_first_step()
            self.on_first_step = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.write(trainer)  # now: a stop in the next epoch writes no metrics

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        confusion, data = getattr(pl_module, "test_confusion", None), getattr(trainer, "datamodule", None)
        if trainer.is_global_zero and confusion is not None and hasattr(data, "class_names"):
            rows = [[name, *row] for name, row in zip(data.class_names, confusion, strict=True)]
            rows.insert(0, ["true \\ predicted", *data.class_names])
            path = self.path.with_name("confusion_matrix.csv")  # a row per true class, in images
            write_atomically(path, lambda file: csv.writer(file).writerows(rows))

    def on_checkpoint_complete(self, path: Path, sidecar: Sidecar, kind: str) -> None:
        """Record a best checkpoint at once, because the process may be killed, and its metric as `<metric>_best`."""
        fields: dict[str, object] = {"steps": max(sidecar.step, self.steps)}
        if kind == "best":
            metric = {name: value for name, value in sidecar.metric.items() if math.isfinite(value)}
            named = {key: getattr(sidecar, key) for key in ("bytes", "sha256", "epoch", "step")}
            fields["best_checkpoint"] = {"path": f"{path.parent.name}/{path.name}", **named, "metric": metric}
            best = {f"{name}_best": value for name, value in metric.items() if name in (self.monitor, "val/acc")}
            fields["metrics"] = {**read_record(self.path).metrics, **best}
        self.write(None, **fields)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero and self.phase in ("training", "validation"):
            self.write(None, steps=trainer.global_step)  # the launch writes how the run ended

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            ended = {"status": "finished", "exit_code": 0, "finished_at": utc_now()} if self.is_begun_here else {}
            self.write(trainer, phase="trained", epochs=trainer.current_epoch, steps=trainer.global_step, **ended)
            self.fit_before_s, self.fit_started_at = self.elapsed(), None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero and self.is_begun_here:
            self.write(trainer)  # what the upload has sent at the end
