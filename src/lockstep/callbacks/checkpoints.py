"""Save the best checkpoint and the last one.

Each is written whole and verified before its predecessor is deleted.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from lockstep.callbacks.early_stopping import keep_new_patience
from lockstep.checkpoints import files, resume_point
from lockstep.checkpoints.files import Sidecar
from lockstep.checkpoints.frozen import FrozenState, frozen_state, set_frozen_state
from lockstep.checkpoints.io import CheckpointFiles, copy_to_host
from lockstep.checkpoints.load import Checkpoint
from lockstep.checkpoints.loader_state import LoaderState
from lockstep.checkpoints.resume_point import ResumePoint
from lockstep.checkpoints.schedule_length import refuse_other_lengths, schedule_lengths
from lockstep.checkpoints.writer import CheckpointWriter, Paths
from lockstep.loggers.metrics_csv import MetricsCsv
from lockstep.process.errors import Diverged, UserError
from lockstep.ranks.collectives import gather_objects
from lockstep.ranks.process_group import all_or_none, has_heartbeat, wait_for_all
from lockstep.records.config import Config
from lockstep.records.metric_names import better_direction, is_metric_of

log = logging.getLogger(__name__)

# Between log points a save waits this much longer.
LATE_S = 30.0


@dataclass
class EndedEpoch:
    """An epoch that has ended, and that is saved once all callbacks have seen its end.

    Attributes:
        kinds: the kinds of checkpoint to save: "best", "last", both or none.
        metrics: the metrics that were logged in it.
    """

    epoch: int
    kinds: list[str]
    metrics: dict[str, Tensor]


class Checkpoints(pl.Callback):
    """Save `last` every n epochs and every few minutes, and `best` when the metric improves.

    Without validation each `last` at the end of an epoch is also the `best`.

    Args:
        folder: checkpoints/ of the run.
        weights_only: leave the optimizer's state out of `best`, which then has a third of its bytes
            under AdamW. A run resumes from `last`, which is saved with every best.
        asynchronous: train on while a thread writes a copy in host memory ("auto": on GPUs). The
            next save and the end of training wait for the thread. If it still writes at the end of
            an epoch, that `last` is skipped. An error in it ends training at the next step.
        contents: plain values that every checkpoint carries (composed config, class names,
            normalisation, …).

    Attributes:
        saved_step: the step of the newest `last`.
        validated_step: the step of the latest validation.
        ended_epoch: the epoch whose end is still to be saved.
        pending_frozen_state: the checkpoint's frozen state, until the optimizers are built.
        schedule_lengths: the lengths of a resume's schedules before their states are loaded.
    """

    def __init__(
        self,
        folder: str | Path,
        monitor: str = "val/acc",
        mode: str = "max",
        every_n_epochs: int = 1,
        every_minutes: float | None = 10.0,
        weights_only: bool = False,
        asynchronous: bool | str = "auto",
        contents: Config | None = None,
    ) -> None:
        option = "callbacks.checkpoints"
        if mode not in ("max", "min"):
            raise UserError(f"{option}.mode={mode!r}: give max or min.")
        if better_direction(monitor) not in (mode, None):
            best = "largest" if mode == "min" else "smallest"
            raise UserError(
                f"{option}.monitor={monitor}: the {best} value is the best one: give task.mode="
                f"{better_direction(monitor)} (in a script mode=)."
            )
        if every_n_epochs < 1:
            raise UserError(f"{option}.every_n_epochs={every_n_epochs}: give 1 or more.")
        self.folder = Path(folder)
        self.monitor = monitor
        self.mode = mode
        self.every_n_epochs = every_n_epochs
        self.every_minutes = every_minutes
        self.weights_only = weights_only
        self.asynchronous = asynchronous
        self.contents = contents or {}
        self.best_value: float | None = None
        self.best_path: Path | None = None
        self.saved_step = -1
        self._stops_after_epoch = False
        self.validated_step = -1
        self.ended_epoch: EndedEpoch | None = None
        # It is True once the ranks have logged different values of the monitored metric.
        self.is_unsynchronised = False
        self.loader_state = LoaderState()
        self.pending_frozen_state: FrozenState | None = None
        self.schedule_lengths: list[str] = []
        self.writer = CheckpointWriter(weights_only)
        # Ranks without a heartbeat wait for a long write in this process group.
        self._long_timeout_group: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.asynchronous == "auto":
            self.asynchronous = trainer.strategy.root_device.type == "cuda"
        if not isinstance(trainer.strategy.checkpoint_io, CheckpointFiles):
            trainer.strategy.checkpoint_io = CheckpointFiles()
        if stage == "fit":
            self._set_up_fit(trainer)

    def _set_up_fit(self, trainer: pl.Trainer) -> None:
        self._stops_after_epoch = False
        self.loader_state.attach(trainer)
        callbacks = trainer.callbacks
        if not any(getattr(each, "checkpoints", None) is self for each in callbacks):
            trainer.callbacks = [DeferredEpochSave(self), *callbacks]
        has_group = trainer.world_size > 1 and dist.is_initialized()
        if self._long_timeout_group is None and has_group and not has_heartbeat():
            timeout = timedelta(hours=2)
            with all_or_none():
                self._long_timeout_group = dist.new_group(backend="gloo", timeout=timeout)
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove_leftovers(self.folder)

    # These methods decide when a checkpoint is saved.

    def stop_after_epoch(self) -> None:
        """Save the end of this epoch as last, because the run stops after it."""
        self._stops_after_epoch = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.ckpt_path is None:
            return
        # Lightning loads the states of the schedules after this hook.
        self.schedule_lengths = schedule_lengths(trainer)
        if self.pending_frozen_state is not None:
            set_frozen_state(trainer, self.pending_frozen_state)
            self.pending_frozen_state = None
        path = None
        value = None
        if trainer.is_global_zero:
            path = files.newest_whole(self.folder, "best")
            sidecar = (files.read_sidecar(path) if path else None) or Sidecar(0)
            # If the monitored metric has changed, the first value counts as the best.
            # The old best checkpoint stays until then.
            value = sidecar.metric.get(self.monitor)
        self.best_path, self.best_value = trainer.strategy.broadcast((path, value), src=0)
        if trainer.is_global_zero and path is not None:
            # A kill of the earlier start may have come before it told the callbacks.
            self._report_and_prune(trainer, {"best": path})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.ckpt_path is not None:
            refuse_other_lengths(trainer, self.schedule_lengths)
            # Lightning sets it when an epoch begins, and not within one.
            trainer.accumulate_grad_batches = accumulation_in_epoch(trainer, trainer.current_epoch)
        _log_inexact_schedules(trainer)
        self.saved_at = time.monotonic()
        self.loader_state.log_resume_exactness()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            self._check_before_training(trainer, pl_module)
        elif trainer.state.fn == "fit":
            self.validated_step = trainer.global_step
            if not resume_point.ends_epoch(trainer) and self._update_best(trainer):
                self.save(trainer, "best")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if self.writer.is_idle:
            self.finish_writing(trainer)
        if resume_point.steps_are_over(trainer):
            # Otherwise Lightning would not validate a run that ends in mid-epoch.
            trainer.should_stop = True
        elif not resume_point.ends_epoch(trainer) and self._is_save_due(trainer):
            call_after_module_hook(pl_module, lambda: self.save(trainer, "last"))

    def _is_save_due(self, trainer: pl.Trainer) -> bool:
        """Return whether every_minutes have passed on rank 0.

        Log points ask, because each answer is a collective. Where they are rare, the ranks vote
        once a save is late.
        """
        if self.every_minutes is None or not resume_point.ends_step(trainer):
            return False
        if trainer.global_step == self.saved_step:
            return False
        late_s = time.monotonic() - self.saved_at - 60 * self.every_minutes
        is_log_point = trainer.global_step % trainer.log_every_n_steps == 0
        if is_log_point:
            return trainer.strategy.broadcast(late_s > 0, src=0)
        return self._vote_on_save(trainer, late_s > LATE_S)

    def _vote_on_save(self, trainer: pl.Trainer, is_late: bool) -> bool:
        callbacks: list[Any] = trainer.callbacks
        interruption = next((one for one in callbacks if hasattr(one, "votes")), None)
        if interruption is None:
            return False
        return interruption.votes["save"](is_late and trainer.is_global_zero)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_due = self._is_last_due(trainer)
        if resume_point.is_validation_epoch(trainer):
            is_best = self._update_best(trainer)
        else:
            is_best = is_due and not trainer.enable_validation
        kinds = []
        if is_best:
            kinds.append("best")
        if is_due:
            kinds.append("last")

        if resume_point.ends_epoch(trainer):
            self.ended_epoch = EndedEpoch(
                trainer.current_epoch, kinds, dict(trainer.callback_metrics)
            )
        elif kinds:
            self.save(trainer, *kinds)
        # Otherwise Lightning skips plateau schedules in the first epoch of a resume.
        trainer.fit_loop.on_iteration_done()

    def _is_last_due(self, trainer: pl.Trainer) -> bool:
        """Return whether the end of this epoch is saved as last."""
        epochs = trainer.current_epoch + 1
        if (
            epochs == trainer.max_epochs
            or resume_point.steps_are_over(trainer)
            or resume_point.stops_now(trainer)
            or self._stops_after_epoch
        ):
            return True
        if epochs % self.every_n_epochs:
            return False
        return not self.asynchronous or trainer.strategy.broadcast(self.writer.is_idle, src=0)

    def save_ended_epoch(self, trainer: pl.Trainer, is_last: bool) -> None:
        """Save the kinds that are due for the ended epoch; also as last if no epoch follows."""
        if self.ended_epoch is None:
            return
        kinds = self.ended_epoch.kinds
        if is_last and "last" not in kinds:
            kinds.append("last")
        if kinds:
            self.save(trainer, *kinds)
        self.ended_epoch = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.finish_together(trainer)
        if trainer.enable_validation and self.best_path is None:
            self._warn_without_best(trainer)

    # These methods decide which checkpoint is the best.

    def _check_before_training(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Check in the sanity check, before training, that the monitored metric is logged."""
        if not is_metric_of("val", self.monitor):
            return
        # A module of the user's may log a metric only in whole validations.
        if hasattr(module, "log_exactly"):
            self._check_monitor(trainer)
        # With several loaders Lightning has no metrics before the training.
        if len(trainer.num_sanity_val_batches) < 2:
            self._warn_without_best(trainer)

    def _check_monitor(self, trainer: pl.Trainer) -> None:
        metrics = trainer.callback_metrics
        validations = sorted(name for name in metrics if is_metric_of("val", name))
        if validations and self.monitor not in metrics:
            raise UserError(
                f"task.monitor={self.monitor} is not logged: there are {', '.join(validations)}."
            )

    def _warn_without_best(self, trainer: pl.Trainer) -> None:
        """Warn that there is no best checkpoint if the monitored metric is not logged."""
        if trainer.is_global_zero and self.monitor not in trainer.callback_metrics:
            logged_metrics = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            log.warning(
                f"No best checkpoint: task.monitor={self.monitor} is not logged; there is "
                f"{logged_metrics}."
            )

    def _update_best(self, trainer: pl.Trainer) -> bool:
        """Keep the metric of this validation if it is the best so far; return whether it is."""
        self._check_monitor(trainer)
        value = self._mean_over_ranks(trainer)
        if math.isnan(value):
            self._warn_of_nan(trainer)
            return False
        if self.best_value is not None:
            is_better = value > self.best_value if self.mode == "max" else value < self.best_value
            if not is_better:
                return False
        self.best_value = value
        return True

    def _warn_of_nan(self, trainer: pl.Trainer) -> None:
        is_logged = self.monitor in trainer.callback_metrics
        if self.best_value is None and is_logged and trainer.is_global_zero:
            log.warning(f"No best checkpoint yet: task.monitor={self.monitor} is nan.")

    def _mean_over_ranks(self, trainer: pl.Trainer) -> float:
        """Return the monitored metric, or its mean if the ranks have logged different values.

        The result is nan if no rank logged it, or if a rank logged nan. This is a collective.
        """
        value = trainer.callback_metrics.get(self.monitor)
        rank_values = gather_objects(None if value is None else float(value))
        values = [value for value in rank_values if value is not None]
        if not values or any(map(math.isnan, values)):
            return math.nan
        # Sums in another order differ in their last digits.
        if math.isclose(min(values), max(values), rel_tol=1e-6):
            return values[0]

        mean = sum(values) / len(values)
        if trainer.is_global_zero and not self.is_unsynchronised:
            log.warning(
                f"{self.monitor} was logged without sync_dist=True, and each rank has its own "
                f"value ({min(values):.4g} to {max(values):.4g}): the mean over the ranks chooses "
                "the best checkpoint."
            )
        self.is_unsynchronised = True
        return mean

    # These methods decide what a checkpoint holds.

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Checkpoint
    ) -> None:
        """Add Lockstep's part to a checkpoint. It is a collective unless fit has failed."""
        point = self._resume_point(trainer)
        is_before_validation = self._is_before_validation(trainer, point)
        state = self.loader_state.state_dict(point, is_before_validation=is_before_validation)
        frozen = frozen_state(trainer)
        position = {"point": point.to_checkpoint(), "frozen": frozen}
        checkpoint["lockstep"] = {**self.contents, **position, **state}
        removed_names = keep_plain_hyperparameters(checkpoint)
        if removed_names and not self.writer.is_checked and trainer.is_global_zero:
            arguments = ", ".join(f"{name}=…" for name in removed_names)
            log.info(
                f"The hyperparameters {', '.join(removed_names)} are objects, which checkpoints "
                "omit. Load one by "
                f"{type(pl_module).__name__}.load_from_checkpoint(PATH, {arguments})."
            )

    def _resume_point(self, trainer: pl.Trainer) -> ResumePoint:
        if self.ended_epoch:
            return resume_point.point_after_epoch(trainer, epoch=self.ended_epoch.epoch)
        return resume_point.point_in_epoch(trainer, self.validated_step)

    def _is_before_validation(self, trainer: pl.Trainer, point: ResumePoint) -> bool:
        """Return whether a resume needs the random state before the latest validation."""
        # A resume repeats a validation that was stopped.
        if point.phase == resume_point.VALIDATION and trainer.validating:
            return True
        # A run that was longer would not validate where this one ends.
        is_validated = not self.ended_epoch and self.validated_step == trainer.global_step
        return is_validated and not resume_point.is_validation_due(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Checkpoint
    ) -> None:
        lockstep_part = checkpoint.get("lockstep")
        # A test or validation of a checkpoint leaves the training as it is.
        if lockstep_part is None or trainer.state.fn != "fit":
            return
        point = ResumePoint.from_checkpoint(lockstep_part["point"])
        loops = checkpoint["loops"]
        accumulate = accumulation_in_epoch(trainer, point.epoch)
        loops["fit_loop"] = resume_point.loop_state(loops["fit_loop"], point, accumulate)
        self.loader_state.load_state_dict(point, lockstep_part)
        self.saved_step = checkpoint["global_step"]
        self._load_frozen(trainer, lockstep_part.get("frozen"))
        resume_point.restore_end(trainer, point)
        keep_new_patience(trainer, checkpoint)

    def _load_frozen(self, trainer: pl.Trainer, state: FrozenState | None) -> None:
        """Freeze layers as the checkpoint says, once the optimizers are built.

        Checkpoints of earlier versions do not say it.
        """
        if state is None:
            return
        if trainer.strategy.restore_checkpoint_after_setup:
            set_frozen_state(trainer, state)
        else:
            self.pending_frozen_state = state

    # These methods save a checkpoint.

    def save(self, trainer: pl.Trainer, *kinds: str) -> None:
        """Save a checkpoint as best, as last or as both; every rank calls it at the same step."""
        if self.asynchronous:
            self.finish_together(trainer)
        refuse_non_finite(trainer)
        if self.weights_only and "best" in kinds:
            kinds = ("best", "last")
        step = trainer.global_step
        paths = {kind: files.unused_path(self.folder, kind, step) for kind in kinds}
        self.best_path = paths.get("best", self.best_path)
        sidecar = self._sidecar(trainer, is_best="best" in paths)

        def begin(checkpoint: Checkpoint, _path: Path) -> None:
            content = copy_to_host(checkpoint, copy_cpu_tensors=bool(self.asynchronous))
            self.writer.begin(content, paths, sidecar)

        # The rows up to this step are on the disk before the checkpoint can be resumed from.
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCsv):
                logger.sync()
        checkpoint_io: Any = trainer.strategy.checkpoint_io
        with checkpoint_io.redirect_writes(begin):
            trainer.save_checkpoint(paths[kinds[0]])
        if not self.asynchronous:
            self.finish_together(trainer)
        if "last" in paths:
            self.saved_step = step
            self.saved_at = time.monotonic()

    def _sidecar(self, trainer: pl.Trainer, *, is_best: bool) -> Sidecar:
        """Return the step, the epoch and, for a best checkpoint, the metrics of its validation."""
        epoch = trainer.current_epoch
        logged_metrics: dict[str, Any] = trainer.callback_metrics
        if self.ended_epoch:
            epoch = self.ended_epoch.epoch
            logged_metrics = self.ended_epoch.metrics
        metric = {}
        if is_best and trainer.enable_validation:
            for name, value in logged_metrics.items():
                if name == self.monitor or is_metric_of("val", name):
                    metric[name] = float(value)
        if self.monitor in metric and self.is_unsynchronised:
            metric[self.monitor] = self.best_value
        return Sidecar(trainer.global_step, epoch=epoch, metric=metric)

    def finish_writing(self, trainer: pl.Trainer) -> None:
        """Wait for the checkpoint that is being written; raise its error."""
        self._report_and_prune(trainer, self.writer.finish())

    def finish_together(self, trainer: pl.Trainer) -> None:
        """Wait on every rank for rank 0's checkpoint, longer than other collectives do."""
        self.finish_writing(trainer)
        wait_for_all()
        if self._long_timeout_group is not None:
            dist.barrier(self._long_timeout_group)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # The exception that ends the run is the one to report.
        with contextlib.suppress(Exception):
            self.finish_writing(trainer)

    def _report_and_prune(self, trainer: pl.Trainer, paths: Paths) -> None:
        """Tell the callbacks of written checkpoints, then delete those of earlier steps.

        Args:
            paths: the paths of the written checkpoints, by kind.
        """
        for kind, path in paths.items():
            sidecar = files.read_sidecar(path)
            for callback in trainer.callbacks:
                if hasattr(callback, "on_checkpoint_complete"):
                    callback.on_checkpoint_complete(path, sidecar, kind)
            for older, older_sidecar in files.complete_checkpoints(self.folder, kind):
                if older != path and not files.is_copy(older, older_sidecar):
                    files.remove(older)


def accumulation_in_epoch(trainer: pl.Trainer, epoch: int) -> int:
    """Return the micro-batches of a step in an epoch, which Lightning's callback may schedule."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return trainer.accumulate_grad_batches


def _log_inexact_schedules(trainer: pl.Trainer) -> None:
    """Say where a schedule is not as without a stop after a resume in mid-epoch.

    Lightning calls a plateau schedule of steps once the checkpoint of this step is saved.
    """
    has_plateau = any(
        config.reduce_on_plateau and config.interval == "step"
        for config in trainer.lr_scheduler_configs
    )
    if has_plateau and trainer.is_global_zero:
        log.info(
            "A ReduceLROnPlateau with interval=step may miss one value in a resume in mid-epoch; "
            "with interval=epoch it is exact."
        )


class DeferredEpochSave(pl.Callback):
    """Save an epoch's end when the next epoch begins, before any other callback.

    In on_train_epoch_end it would be too early: EarlyStopping, plateau schedules and the module's
    own hook have not run yet.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.checkpoints.save_ended_epoch(trainer, is_last=False)
        self.checkpoints.loader_state.set_epoch_random_state()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.checkpoints.save_ended_epoch(trainer, is_last=True)


def call_after_module_hook(pl_module: pl.LightningModule, function: Callable[[], None]) -> None:
    """Call a function once, when the module's own on_train_batch_end has returned.

    Lightning calls the module's hook after the hooks of all callbacks. It may update a moving
    average of the weights, which a checkpoint of this step must hold.
    """
    hook = pl_module.on_train_batch_end

    def hook_and_function(*arguments: Any) -> None:
        vars(pl_module).pop("on_train_batch_end", None)
        hook(*arguments)
        function()

    pl_module.on_train_batch_end = hook_and_function  # type: ignore[method-assign]


def keep_plain_hyperparameters(checkpoint: Checkpoint) -> list[str]:
    """Remove optimizers, nets and the like from the hyperparameters, as they would not load safely.

    Returns:
        The names of the module's hyperparameters that were removed.
    """
    removed_names: list[str] = []
    for owner in (pl.LightningModule, pl.LightningDataModule):
        # This value is a class, such as OmegaConf's DictConfig.
        checkpoint.pop(owner.CHECKPOINT_HYPER_PARAMS_TYPE, None)
        key = owner.CHECKPOINT_HYPER_PARAMS_KEY
        if key not in checkpoint:
            continue
        values = {name: _to_plain(value) for name, value in checkpoint[key].items()}
        checkpoint[key] = {name: value for name, value in values.items() if is_plain(value)}
        if owner is pl.LightningModule:
            removed_names = [name for name in values if name not in checkpoint[key]]
    return removed_names


def _to_plain(value: Any) -> Any:
    """Return NumPy's numbers as Python numbers, and OmegaConf's nodes as dicts and lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, DictConfig | ListConfig):
        # A node with a missing value is left out, as objects are.
        with contextlib.suppress(OmegaConfBaseException):
            return OmegaConf.to_container(value, resolve=True)
    return value


def is_plain(value: Any) -> bool:
    """Return whether a hyperparameter is a number, a text, or a list or dict of these.

    A subclass, such as np.float64 or an enum of texts, would not load safely.
    """
    if type(value) is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def refuse_non_finite(trainer: pl.Trainer) -> None:
    """Raise Diverged on every rank if a weight on any rank is nan or inf."""
    is_finite = True
    for parameter in trainer.lightning_module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        is_finite = is_finite and bool(local.isfinite().all())
    if not trainer.strategy.reduce_boolean_decision(is_finite, all=True):
        step = trainer.global_step
        raise Diverged(
            f"weights became nan or inf by step {step}: nothing was saved; lower optimizer.lr"
        )
