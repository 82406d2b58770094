"""The best checkpoint and the last one: each is written whole and verified before its predecessor is deleted."""

import contextlib
import logging
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lockstep.checkpoints import files as files
from lockstep.checkpoints import resume_point as place
from lockstep.checkpoints.files import Sidecar
from lockstep.checkpoints.io import (
    CheckpointFiles,
    check_loadable,
    on_host,
    write_checkpoint,
)
from lockstep.checkpoints.load import Checkpoint
from lockstep.checkpoints.loader_state import LoaderState
from lockstep.loggers.metrics_csv import MetricsCsv
from lockstep.process.errors import Diverged, UserError
from lockstep.ranks.collectives import gather_objects
from lockstep.records.config import Config

log = logging.getLogger(__name__)


class Checkpoints(pl.Callback):
    """Save `last` after every n-th epoch and every few minutes, and `best` when the monitored metric improves.

    Without validation each `last` at the end of an epoch is also the `best`.

    Args:
        folder: checkpoints/ of the run.
        weights_only: leave the optimizer's state out of `best`, which then has a third of its bytes under AdamW. A run
            resumes from `last`, which is saved with every best.
        asynchronous: train on while a thread writes a copy in host memory ("auto": on GPUs). The next save and the end
            of training wait for it, but an epoch's last is left out; an error in it ends training at the next step.
        contents: plain values that every checkpoint carries (composed config, class names, normalisation, …).
    """

    def __init__(
        self, folder: str | Path, monitor: str = "val/acc", mode: str = "max", every_n_epochs: int = 1,
        every_minutes: float | None = 10.0, weights_only: bool = False, asynchronous: bool | str = "auto",
        contents: Config | None = None,
    ) -> None:  # fmt: skip
        if mode not in ("max", "min"):
            raise UserError(f"callbacks.checkpoints.mode={mode!r}: max or min.")
        if mode == "max" and monitor.endswith("loss"):
            raise UserError(f"callbacks.checkpoints.monitor={monitor}: the best is the smallest, give mode=min.")
        if every_n_epochs < 1:
            raise UserError(f"callbacks.checkpoints.every_n_epochs={every_n_epochs}: 1 or more.")
        self.folder, self.monitor, self.mode = Path(folder), monitor, mode
        self.every_n_epochs, self.every_minutes = every_n_epochs, every_minutes
        self.weights_only, self.asynchronous, self.contents = weights_only, asynchronous, contents or {}
        self.best_value, self.best_path = None, None
        self.loaded: dict[str, Any] | None = None  # Lockstep's part of the checkpoint that fit resumes
        self.loader_state = LoaderState()
        self.saved_step, self.validated_step, self.is_checked = -1, -1, False
        self.is_unsynchronised = False  # ranks had values of their own
        self.ended: tuple[int, list[str], dict[str, Any]] | None = None  # epoch, what to save of its end, its metrics
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._patient: Any = None  # a group whose ranks wait for a long write
        self._writing: tuple[Future[None], pl.Trainer, dict[str, Path]] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.asynchronous == "auto":
            self.asynchronous = trainer.strategy.root_device.type == "cuda"
        if not isinstance(trainer.strategy.checkpoint_io, CheckpointFiles):
            trainer.strategy.checkpoint_io = CheckpointFiles()
        if stage == "fit":
            self._set_up_fit(trainer)

    def _set_up_fit(self, trainer: pl.Trainer) -> None:
        self.loader_state.attach(trainer)
        if not any(getattr(each, "checkpoints", None) is self for each in trainer.callbacks):
            trainer.callbacks = [AfterEpoch(self), *trainer.callbacks]
        if self._patient is None and trainer.world_size > 1 and dist.is_initialized():
            self._patient = dist.new_group(backend="gloo", timeout=timedelta(hours=2))
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove_leftovers(self.folder)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.ckpt_path is None:
            return
        best = next(files.complete(self.folder, "best"), None) if trainer.is_global_zero else None
        # Of another metric there is no best value yet, and its first one is the best; the old best stays until then.
        known = (best[0], best[1].metric.get(self.monitor)) if best else (None, None)
        self.best_path, self.best_value = trainer.strategy.broadcast(known, src=0)
        if best:
            self._announce(trainer, {"best": best[0]})  # again: a kill may have come before

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.saved_at = time.monotonic()
        self.loader_state.log_what_holds()
        if self.loaded is not None:
            self.saved_step = trainer.global_step

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking and self.monitor.startswith("val"):
            self._finds_best(trainer)  # a metric that is not there is noticed before training
        elif trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.validated_step = trainer.global_step
            if not place.ends_epoch(trainer) and self._finds_best(trainer):
                self.save(trainer, "best")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._writing and self._writing[0].done():
            self.finish_writing()
        if place.steps_are_over(trainer):
            trainer.should_stop = True  # else Lightning would not validate a run that ends in mid-epoch
            return
        # Every rank looks at the clock of rank 0, and only at log points: other steps have no collective.
        is_log_point = place.ends_step(trainer) and trainer.global_step % trainer.log_every_n_steps == 0
        if is_log_point and self.every_minutes is not None and trainer.global_step != self.saved_step:
            due = time.monotonic() - self.saved_at > 60 * self.every_minutes
            if not place.ends_epoch(trainer) and trainer.strategy.broadcast(due, src=0):
                self.save(trainer, "last")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epochs = trainer.current_epoch + 1
        due = epochs == trainer.max_epochs or place.steps_are_over(trainer) or trainer.should_stop
        if not due and epochs % self.every_n_epochs == 0:
            is_idle = not self._writing or self._writing[0].done()
            due = not self.asynchronous or trainer.strategy.broadcast(is_idle, src=0)
        validates = place.is_validation_epoch(trainer)
        is_best = self._finds_best(trainer) if validates else due and not trainer.enable_validation
        kinds = [*(["best"] if is_best else []), *(["last"] if due else [])]
        if place.ends_epoch(trainer):
            self.ended = trainer.current_epoch, kinds, dict(trainer.callback_metrics)
        elif kinds:
            self.save(trainer, *kinds)
        trainer.fit_loop.on_iteration_done()  # in the first epoch of a resume Lightning would skip plateau schedules

    def save_ended(self, trainer: pl.Trainer, is_last: bool) -> None:
        """Save what is due of the epoch that has ended, and its last state if no epoch follows."""
        if self.ended:
            kinds = self.ended[1]
            kinds += ["last"] if is_last and "last" not in kinds else []
            if kinds:
                self.save(trainer, *kinds)
            self.ended = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.finish_together()
        if trainer.enable_validation and self.best_path is None:
            self._warn_without_best(trainer)

    def _warn_without_best(self, trainer: pl.Trainer) -> None:
        """Name the metrics that the task logs if the monitored one is not among them."""
        if trainer.is_global_zero and self.monitor not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            log.warning(f"No best checkpoint: task.monitor={self.monitor} is not logged; there is {logged}.")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(Exception):  # the exception that ends the run is the one to report
            self.finish_writing()

    def _finds_best(self, trainer: pl.Trainer) -> bool:
        """Return whether the metric of the validation is the best so far."""
        metrics, best = trainer.callback_metrics, self.best_value
        validations = sorted(name for name in metrics if name.startswith("val"))
        if validations and self.monitor not in metrics:
            raise UserError(f"task.monitor={self.monitor}: there are {', '.join(validations)}.")
        if trainer.sanity_checking:
            if len(trainer.num_sanity_val_batches) < 2:  # Lightning has no metrics of several loaders there
                self._warn_without_best(trainer)
            return False
        value = self._mean_over_ranks(trainer)
        is_better = best is None or (value > best if self.mode == "max" else value < best)
        if not is_better or value != value:
            return False
        self.best_value = value
        return True

    def _mean_over_ranks(self, trainer: pl.Trainer) -> float:
        """Return the monitored metric: where ranks have logged their own, its mean; nan without one.

        A collective.
        """
        value = trainer.callback_metrics.get(self.monitor)
        of_ranks = gather_objects(None if value is None else float(value))
        values = [value for value in of_ranks if value is not None]
        if not values:
            return math.nan
        if len(set(values)) == 1:
            return values[0]

        mean = sum(values) / len(values)
        if trainer.is_global_zero and not self.is_unsynchronised:
            log.warning(
                f"{self.monitor} was logged without sync_dist=True, and each rank has its own value "
                f"({min(values):.4g} to {max(values):.4g}): the mean over the ranks chooses the "
                "best checkpoint."
            )
        self.is_unsynchronised = True
        return mean

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Checkpoint
    ) -> None:
        """Add Lockstep's part; a collective unless fit has failed."""
        if self.ended:
            point = place.point_after_epoch(trainer, epoch=self.ended[0])
        else:
            point = place.point_in_epoch(trainer, self.validated_step)
        # A resume repeats this validation, or a longer run would not have it.
        is_repeated = point["phase"] == place.VALIDATION and trainer.validating
        is_validated = not self.ended and self.validated_step == trainer.global_step
        is_extra = is_validated and not place.is_validation_due(trainer)
        before_validation = is_repeated or is_extra
        state = self.loader_state.state_dict(point, before_validation=before_validation)
        checkpoint["lockstep"] = {**self.contents, "point": point, **state}
        keep_plain_hyperparameters(pl_module, checkpoint)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Checkpoint
    ) -> None:
        self.loaded = checkpoint.get("lockstep")
        if self.loaded is None:
            return
        point = self.loaded["point"]
        loops = checkpoint["loops"]
        accumulate = trainer.accumulate_grad_batches
        loops["fit_loop"] = place.loop_state(loops["fit_loop"], point, accumulate)
        self.loader_state.load_state_dict(point, self.loaded)
        # EarlyStopping ended the run, and this start asks for no more epochs or steps.
        trainer.should_stop = point.get("ended") == [trainer.max_epochs, trainer.max_steps]

    def save(self, trainer: pl.Trainer, *kinds: str) -> None:
        """Save a checkpoint as best, as last or as both; every rank calls it at the same step."""
        self.finish_together()
        refuse_non_finite(trainer)
        kinds = ("best", "last") if self.weights_only and "best" in kinds else kinds
        paths = {kind: files.new_path(self.folder, kind, trainer.global_step) for kind in kinds}
        self.best_path = paths.get("best", self.best_path)
        epoch, _, found = self.ended or (trainer.current_epoch, (), trainer.callback_metrics)
        found = found if "best" in paths and trainer.enable_validation else {}
        metric = {name: float(value) for name, value in found.items() if name == self.monitor or name.startswith("val")}
        if self.monitor in metric and self.is_unsynchronised:
            metric[self.monitor] = self.best_value
        sidecar = Sidecar(trainer.global_step, epoch=epoch, metric=metric)

        def begin(checkpoint: Checkpoint, _path: Path) -> None:
            content = on_host(checkpoint, always=bool(self.asynchronous))
            self._writing = self._thread.submit(self._write, content, paths, sidecar), trainer, paths

        # The rows up to this step are on the disk before the checkpoint is there to resume from.
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCsv):
                logger.sync()
        checkpoint_io: Any = trainer.strategy.checkpoint_io
        checkpoint_io.write = begin
        trainer.save_checkpoint(paths[kinds[0]])
        checkpoint_io.write = None
        if not self.asynchronous:
            self.finish_together()
        if "last" in paths:
            self.saved_step, self.saved_at = trainer.global_step, time.monotonic()

    def _write(self, content: Checkpoint, paths: dict[str, Path], sidecar: Sidecar) -> None:
        for kind, path in paths.items():
            if kind == "last" and "best" in paths and not self.weights_only:
                files.link(paths["best"], path)
                continue
            held, weights_only = content, kind == "best" and self.weights_only
            if weights_only:  # nor the weights beside an average of weights
                held = {**content, "optimizer_states": []}
                held.pop("current_model_state", None)
            if not self.is_checked:
                check_loadable(held)
                self.is_checked = True
            files.mark_unfinished(path)
            write_checkpoint(held, path)
            files.write_sidecar(path, replace(sidecar, weights_only=weights_only))

    def finish_writing(self) -> None:
        """Wait for the checkpoint that is being written; raise its error."""
        if self._writing:
            (job, trainer, paths), self._writing = self._writing, None
            job.result()
            self._announce(trainer, paths)

    def finish_together(self) -> None:
        """Wait on every rank for the checkpoint that rank 0 writes, longer than other collectives do."""
        self.finish_writing()
        if self._patient is not None:
            dist.barrier(self._patient)

    def _announce(self, trainer: pl.Trainer, paths: dict[str, Path]) -> None:
        """Tell the callbacks that record it, then delete its predecessors."""
        for kind, path in paths.items():
            sidecar = files.read_sidecar(path)
            for callback in trainer.callbacks:
                if hasattr(callback, "on_checkpoint_complete"):
                    callback.on_checkpoint_complete(path, sidecar, kind)
            for older, older_sidecar in files.complete(self.folder, kind):
                if older != path and not files.is_copy(older, older_sidecar):
                    files.remove(older)


class AfterEpoch(pl.Callback):
    """The first of all callbacks: it saves an epoch's end before anything begins the next one or ends training.

    In on_train_epoch_end EarlyStopping, plateau schedules and the module itself have not yet had their turn.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.checkpoints.save_ended(trainer, is_last=False)
        self.checkpoints.loader_state.set_epoch_random_state()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.checkpoints.save_ended(trainer, is_last=True)


def keep_plain_hyperparameters(pl_module: pl.LightningModule, checkpoint: Checkpoint) -> None:
    """Remove optimizers, nets and the like from the hyperparameters, as they would not load safely."""
    of_module = pl_module.CHECKPOINT_HYPER_PARAMS_KEY
    of_data = pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY
    for key in (of_module, of_data):
        if key in checkpoint:
            values = checkpoint[key].items()
            checkpoint[key] = {name: value for name, value in values if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Return whether a hyperparameter is a number, a text, or a list or dict of these."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, str | int | float | None)


def refuse_non_finite(trainer: pl.Trainer) -> None:
    """Raise Diverged on every rank if a weight on any rank is nan or inf."""
    local = (p.to_local() if hasattr(p, "to_local") else p for p in trainer.lightning_module.parameters())
    if not trainer.strategy.reduce_boolean_decision(all(bool(p.isfinite().all()) for p in local), all=True):
        step = trainer.global_step
        raise Diverged(f"weights became nan or inf by step {step}: nothing was saved; lower optimizer.lr")
