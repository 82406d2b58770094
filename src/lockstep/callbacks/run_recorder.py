"""Keep run.json up to date: at each phase, after each validation, every few seconds."""

import contextlib
import csv
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lockstep.callbacks.early_stopping import reason_of_early_stop
from lockstep.checkpoints.files import Sidecar, read_sidecar
from lockstep.checkpoints.resume_point import stage_name
from lockstep.process.errors import EXIT_FAILED, EXIT_OK, Interrupted
from lockstep.process.files import utc_now, write_atomically
from lockstep.process.redact import redact_text
from lockstep.records.record import (
    HEARTBEAT_INTERVAL_S,
    RunRecord,
    locked_record,
    merge_restart,
    read_record,
    update_record,
    write_record,
)

log = logging.getLogger(__name__)

STOP_EXCEPTIONS = (Interrupted, KeyboardInterrupt, SIGTERMException)


class RunRecorder(pl.Callback):
    """Write run.json on rank zero, without collectives.

    Args:
        path: run.json in the run's folder.
        on_first_step: called on rank zero after the first step of this start.
        owns_run: begin the record when fit starts, or an evaluation without a fit, and write how
            the run ended. A plain script needs it; False where the launch does both.
    """

    def __init__(
        self,
        path: str | Path,
        on_first_step: Callable[[], None] | None = None,
        owns_run: bool = True,
    ) -> None:
        self.path = Path(path)
        self.on_first_step = on_first_step
        self.owns_run = owns_run
        self.phase = "start"
        self.written_at = 0.0
        self.fit_started_at: float | None = None
        self.earlier_fit_s = 0.0  # seconds of fit in earlier starts of this run
        self.monitor = "val/acc"
        self.steps = 0  # as of the last write
        # It is True for an evaluation without a fit before it.
        self.is_evaluation_alone = False

    def write(self, trainer: pl.Trainer | None = None, **fields: object) -> None:
        """Set fields of the record; with a trainer, also those of every callback."""
        if trainer is None:
            with self._update_on_disk() as record:
                record.update(fields)
        elif trainer.is_global_zero:
            # Collect the values before the lock is taken, because callbacks may take their time.
            metrics = collect_metrics(trainer)
            collected_fields = collect_record_fields(trainer)
            with self._update_on_disk() as record:
                self._set_progress(record, trainer)
                record.metrics |= metrics
                record.update(collected_fields)
                set_uri_of_best(record)
                record.update(fields)

    @contextlib.contextmanager
    def _update_on_disk(self) -> Iterator[RunRecord]:
        """Let the block change the record on the disk."""
        with update_record(self.path) as record:
            yield record
            record.fit_seconds = self.elapsed() or record.fit_seconds
            self.steps = record.steps or 0
        self.written_at = time.monotonic()

    def _set_progress(self, record: RunRecord, trainer: pl.Trainer) -> None:
        record.epochs = max(record.epochs or 0, trainer.current_epoch)
        if trainer.state.fn == "fit" and self.phase in ("training", "validation"):
            # After a restart this may be a smaller number: steps beyond its checkpoint are lost.
            record.steps = trainer.global_step

    def elapsed(self) -> float:
        """Return the seconds of fit in all starts of this run; 0 on other ranks than 0."""
        current_fit_s = 0.0
        if self.fit_started_at is not None:
            current_fit_s = time.monotonic() - self.fit_started_at
        return round(self.earlier_fit_s + current_fit_s, 3)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self.owns_run:
            self._begin(trainer, pl_module)
        record = read_record(self.path)
        self.monitor = record.monitor
        self.earlier_fit_s = record.fit_seconds or 0.0
        self.fit_started_at = time.monotonic()
        counts: dict[str, object] = {}
        is_made_late = is_overridden("configure_model", pl_module)
        if is_made_late or not record.num_parameters:
            # A plain script has no launch that counts them, and such a module makes layers late.
            counts |= parameter_counts(pl_module)
        self.write(trainer, phase="start", **counts)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning calls this only where something is left to train.
        self.write(trainer, ended_by=None)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the first record of this start, or continue the record of an earlier start."""
        monitors = [item.monitor for item in trainer.callbacks if hasattr(item, "best_path")]
        record = RunRecord(
            run_id=self.path.parent.name,
            task_name="train" if trainer.state.fn == "fit" else "eval",
            status="running",
            started_at=utc_now(),
            model=type(pl_module).__name__,
            world_size=trainer.world_size,
            num_nodes=trainer.num_nodes,
            monitor=monitors[0] if monitors else "val/acc",
        )
        with locked_record(self.path):
            if self.path.exists():
                previous = read_record(self.path)
                record = merge_restart(previous, record, step=resume_step(trainer, previous))
            write_record(self.path, record)

    def _begin_evaluation(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the record of trainer.test() or trainer.validate() where no fit has made one."""
        is_fit = trainer.state.fn == "fit"
        if is_fit or not (trainer.is_global_zero and self.owns_run) or self.path.exists():
            return
        self._begin(trainer, pl_module)
        self.is_evaluation_alone = True

    def _end_evaluation(self, trainer: pl.Trainer) -> None:
        if self.is_evaluation_alone:
            end_fields: dict[str, object] = {"status": "finished", "exit_code": EXIT_OK}
            self.write(trainer, phase="end", finished_at=utc_now(), **end_fields)

    on_test_start = _begin_evaluation
    on_validation_start = _begin_evaluation

    def _write_heartbeat(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write when the phase changes, and every few seconds."""
        is_due = time.monotonic() - self.written_at > HEARTBEAT_INTERVAL_S
        if is_due or stage_name(trainer) != self.phase:
            self.phase = stage_name(trainer)
            self.write(trainer, phase=self.phase)

    on_train_batch_start = _write_heartbeat
    on_validation_batch_start = _write_heartbeat
    on_test_batch_start = _write_heartbeat

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.steps and trainer.global_step:
            # From now on the run can be resumed.
            self.write(trainer)
        if self.on_first_step is not None and trainer.is_global_zero:
            self.on_first_step()
            self.on_first_step = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            # Write it now, because a stop in the next epoch writes no metrics.
            self.write(trainer)
        self._end_evaluation(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        confusion = getattr(pl_module, "test_confusion", None)
        data = getattr(trainer, "datamodule", None)
        if trainer.is_global_zero and confusion is not None and hasattr(data, "class_names"):
            path = self.path.with_name("confusion_matrix.csv")
            write_confusion(path, data.class_names, confusion)
        self._end_evaluation(trainer)

    def on_checkpoint_complete(self, path: Path, sidecar: Sidecar, kind: str) -> None:
        """Record a best checkpoint at once, because the process may be killed.

        Its metric is recorded as `<metric>_best`.
        """
        with self._update_on_disk() as record:
            record.steps = max(sidecar.step, self.steps)
            if kind == "best":
                self._set_best(record, path, sidecar)

    def _set_best(self, record: RunRecord, path: Path, sidecar: Sidecar) -> None:
        finite = {name: value for name, value in sidecar.metric.items() if math.isfinite(value)}
        best = {
            "path": f"{path.parent.name}/{path.name}",
            "bytes": sidecar.bytes,
            "sha256": sidecar.sha256,
            "epoch": sidecar.epoch,
            "step": sidecar.step,
            "metric": finite,
        }
        record.update({"best_checkpoint": best})
        for name in finite.keys() & {self.monitor, "val/acc"}:
            record.metrics[f"{name}_best"] = finite[name]

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if not trainer.is_global_zero or not self.path.exists():
            return
        fields: dict[str, object] = {}
        if isinstance(exception, Interrupted) and exception.is_agreed:
            # Callbacks have gathered fields from all ranks, and no later hook writes them.
            fields |= collect_record_fields(trainer)
        if self.phase in ("training", "validation"):
            fields["steps"] = trainer.global_step
        if self.owns_run:
            fields |= self._failure_fields(exception)
        if fields:
            self.write(None, **fields)

    def _failure_fields(self, exception: BaseException) -> dict[str, object]:
        """Return the fields of the record that say how an exception ended a plain script's run."""
        if isinstance(exception, STOP_EXCEPTIONS):
            # The script decides on its exit code.
            return {"status": "interrupted", "exit_code": None, "finished_at": utc_now()}
        error = {
            "message": redact_text(f"{type(exception).__name__}: {exception}"),
            "rank": 0,
            "host": socket.gethostname(),
            "phase": self.phase,
        }
        return {
            "status": "failed",
            "exit_code": EXIT_FAILED,
            "finished_at": utc_now(),
            "error": error,
        }

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        fields: dict[str, object] = {
            "phase": "trained",
            # An epoch that was left early counts too, also where a resume trains nothing.
            "epochs": trainer.fit_loop.epoch_progress.current.ready,
            "steps": trainer.global_step,
        }
        reason = reason_of_early_stop(trainer)
        if reason:
            fields["ended_by"] = "early_stopping"
            log.info(f"Early stopping ended the training at step {trainer.global_step}: {reason}")
        if self.owns_run:
            fields |= {"status": "finished", "exit_code": EXIT_OK, "finished_at": utc_now()}
        self.write(trainer, **fields)
        self.earlier_fit_s = self.elapsed()
        self.fit_started_at = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero and self.owns_run and self.path.exists():
            # Only now it is known what the last upload has sent.
            self.write(trainer)


def parameter_counts(module: Any) -> dict[str, int]:
    """Return the fields of the record that count the parameters of a module's net."""
    parameters = list(getattr(module, "net", module).parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return {
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "num_trained_parameters": sum(parameter.numel() for parameter in trained),
    }


def collect_metrics(trainer: pl.Trainer) -> dict[str, float | str]:
    """Return the latest metrics of training and evaluations. A nan becomes text: JSON has none."""
    values: dict[str, Any] = {}
    if not trainer.sanity_checking:
        values |= trainer.callback_metrics
    for part in (*trainer.callbacks, trainer.strategy):
        latest_row = getattr(part, "latest_row", {})
        values |= {name: value for name, value in latest_row.items() if name.startswith("train/")}
    return {
        name: float(value) if math.isfinite(value) else str(float(value))
        for name, value in values.items()
    }


def collect_record_fields(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the fields of the record that callbacks and the strategy know."""
    fields: dict[str, Any] = {}
    for part in (*trainer.callbacks, trainer.strategy):
        if hasattr(part, "record_fields"):
            fields |= part.record_fields()
    return fields


def set_uri_of_best(record: RunRecord) -> None:
    """Set the address of the best checkpoint if it has been uploaded."""
    if record.upload.uri and record.upload.step == record.best_checkpoint.step:
        record.best_checkpoint.s3_uri = record.upload.uri


def resume_step(trainer: pl.Trainer, previous: RunRecord) -> int:
    """Return the step at which fit goes on, before Lightning has read the checkpoint."""
    if trainer.ckpt_path is None:
        return 0
    sidecar = read_sidecar(Path(trainer.ckpt_path))
    return sidecar.step if sidecar else previous.steps or 0


def write_confusion(path: Path, class_names: list[str], confusion: Any) -> None:
    """Write a confusion matrix in images, with a row for each true class."""
    rows = [["true \\ predicted", *class_names]]
    for name, counts in zip(class_names, confusion, strict=True):
        rows.append([name, *counts])
    write_atomically(path, lambda file: csv.writer(file).writerows(rows))
