"""The best checkpoint and the last one: each is written whole and verified before its predecessor is deleted."""

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lockstep.callbacks.checkpoint_io import Checkpoint, CheckpointFiles, Writer
from lockstep.callbacks.random_states import State, gather_random_states, set_random_state
from lockstep.callbacks.resume_point import (
    EPOCH_END,
    TRAINING,
    VALIDATION,
    ends_epoch,
    ends_step,
    is_due,
    loop_state,
    resume_point,
    validates,
)
from lockstep.runs.config import Config
from lockstep.runs.errors import Diverged, UserError
from lockstep.storage.checkpoint_files import (
    Sidecar,
    checkpoint_name,
    complete,
    link,
    read_sidecar,
    remove,
    remove_leftovers,
    set_aside,
    write_sidecar,
)

log = logging.getLogger(__name__)


class Checkpoints(Callback):
    """Save `last` after every n-th epoch and every few minutes, and `best` when the monitored metric improves.

    Without validation each `last` at the end of an epoch is also the `best`.

    Args:
        folder: checkpoints/ of the run.
        monitor: the metric that chooses the best checkpoint.
        mode: max or min.
        weights_only: leave the optimizer's state out of `best`, which then has a third of its bytes under AdamW. A run
            resumes from `last`, which is saved with every best.
        asynchronous: stop training only until the checkpoint is copied to host memory (which must have room for it);
            a thread hashes and writes it. The next checkpoint and the end of training wait for it, and an error in it
            ends training at the next step.
        contents: plain values that every checkpoint carries (composed config, class names, normalisation, …).
    """

    def __init__(
        self,
        folder: str | Path,
        monitor: str = "val/acc",
        mode: str = "max",
        every_n_epochs: int = 1,
        every_minutes: float | None = 10.0,
        weights_only: bool = False,
        asynchronous: bool = False,
        contents: Config | None = None,
    ) -> None:
        if mode not in ("max", "min"):
            raise UserError(f"callbacks.checkpoints.mode={mode!r}: max or min.")
        if mode == "max" and monitor.endswith("loss"):
            raise UserError(f"callbacks.checkpoints.monitor={monitor}: the best is the smallest, give mode=min.")
        if every_n_epochs < 1:
            raise UserError(f"callbacks.checkpoints.every_n_epochs={every_n_epochs}: 1 or more.")
        self.folder, self.monitor, self.mode = Path(folder), monitor, mode
        self.every_n_epochs, self.every_minutes = every_n_epochs, every_minutes
        self.weights_only, self.contents = weights_only, contents or {}
        self.asynchronous, self.writer = asynchronous, Writer()
        self.kind = "last"  # of the checkpoint that is being saved
        self.best_value: float | None = None
        self.best: State | None = None  # {metric, file, value, epoch, step}
        self.saved_step = self.validated_step = self.writing_step = -1
        self.loaded: Checkpoint | None = None
        self.phase = TRAINING
        self.stalled_s = 0.0  # seconds that training stood still to write

    # --- what a checkpoint holds

    def state_dict(self) -> State:
        return {"best_value": self.best_value, "best": self.best, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state: State) -> None:
        self.best_value, self.best = state["best_value"], state["best"]
        if state.get("monitor", self.monitor) != self.monitor or state.get("mode", self.mode) != self.mode:
            self.best_value = None  # the first value of the new metric is its best; the old best stays until then

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Checkpoint) -> None:
        loader: Any = trainer.train_dataloader
        checkpoint["lockstep"] = {
            **self.contents,
            "point": self._point(trainer),
            "loader": loader.state_dict() if hasattr(loader, "state_dict") else {},
            "random": self._random_states,
        }
        if self._leaves_out_optimizer(self.kind):
            checkpoint["optimizer_states"] = []
            checkpoint.pop("current_model_state", None)  # the weights beside an average of weights

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Checkpoint) -> None:
        self.loaded = checkpoint.get("lockstep")
        if self.loaded is not None:
            loops = checkpoint["loops"]
            loops["fit_loop"] = loop_state(loops["fit_loop"], self.loaded["point"], trainer.accumulate_grad_batches)

    # --- when

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy.checkpoint_io, CheckpointFiles):
            trainer.strategy.checkpoint_io = CheckpointFiles()
        if trainer.is_global_zero and stage == "fit":
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.saved_at = time.monotonic()
        if self.loaded is not None:
            self.saved_step = trainer.global_step
            # Lightning loses the loader's state if something asked for the number of steps before fit began.
            loader: Any = trainer.train_dataloader
            if hasattr(loader, "load_state_dict"):
                loader.load_state_dict(self.loaded["loader"])
            states = self.loaded["random"]
            if len(states) == trainer.world_size:
                set_random_state(states[trainer.global_rank])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.phase = TRAINING

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.phase = VALIDATION

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking and self.monitor.startswith("val"):
            self._check_monitor(trainer)
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self.validated_step = trainer.global_step
        if not ends_epoch(trainer) and self._keep_if_best(trainer) and self.weights_only:
            self.save_last(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.writer.check()
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True  # else Lightning would not validate a run that ends in mid-epoch
            return
        if self.every_minutes is None or trainer.global_step == self.saved_step or ends_epoch(trainer):
            return
        # Every rank looks at the clock of rank 0, and only at log points: other steps have no collective.
        if ends_step(trainer) and trainer.global_step % trainer.log_every_n_steps == 0:
            due = time.monotonic() - self.saved_at > 60 * self.every_minutes
            if trainer.strategy.broadcast(due, src=0):
                self.save_last(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.phase = EPOCH_END
        is_end = trainer.current_epoch + 1 == trainer.max_epochs or trainer.global_step == trainer.max_steps
        due = is_end or trainer.should_stop or (trainer.current_epoch + 1) % self.every_n_epochs == 0
        is_best = validates(trainer) and self._keep_if_best(trainer)
        if due and not trainer.enable_validation:
            self._keep_best(trainer, None)
        if due or (is_best and self.weights_only):
            is_here = self.best is not None and self.best["step"] == trainer.global_step
            self.save_last(trainer, same_as_best=is_here and not self.weights_only)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.finish_writing()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        try:
            self.finish_writing()
        except BaseException as error:  # the exception that ends the run is the one to report
            log.info(f"The last checkpoint was not written ({type(error).__name__}: {error}).")

    def finish_writing(self) -> None:
        """Wait for the checkpoints that are being written; raise what went wrong with them."""
        started = time.monotonic()
        self.writer.check(wait=True)
        self.stalled_s += time.monotonic() - started

    # --- how

    def _keep_if_best(self, trainer: pl.Trainer) -> bool:
        """Save the best after a validation; return whether it was the best so far.

        Raises:
            UserError: the validation has no such metric.
        """
        value = trainer.callback_metrics.get(self.monitor)
        self._check_monitor(trainer)
        if value is None or not self._improves(float(value)):
            return False
        self._keep_best(trainer, float(value))
        return True

    def _check_monitor(self, trainer: pl.Trainer) -> None:
        validations = sorted(name for name in trainer.callback_metrics if name.startswith("val"))
        if validations and self.monitor not in trainer.callback_metrics:
            raise UserError(f"callbacks.checkpoints.monitor={self.monitor}: there are {', '.join(validations)}.")

    def _improves(self, value: float) -> bool:
        if value != value:
            return False
        if self.best_value is None:
            return True
        return value > self.best_value if self.mode == "max" else value < self.best_value

    def _keep_best(self, trainer: pl.Trainer, value: float | None) -> None:
        self.best_value = value
        self.best = {
            "metric": self.monitor, "file": checkpoint_name("best", trainer.global_step), "value": value,
            "epoch": trainer.current_epoch, "step": trainer.global_step,
        }  # fmt: skip
        self._save(trainer, "best")

    def save_last(self, trainer: pl.Trainer, same_as_best: bool = False) -> None:
        """Save the last checkpoint; every rank calls it at the same step.

        Args:
            same_as_best: the best of this step has the same content, so that a second name for it is enough.
        """
        if not same_as_best:
            self._save(trainer, "last")
        elif trainer.is_global_zero:
            name = self.folder / checkpoint_name("last", trainer.global_step)
            self._do(trainer, partial(link, self.best_path, name), name, "last")
        self.saved_step, self.saved_at = trainer.global_step, time.monotonic()

    def _save(self, trainer: pl.Trainer, kind: str) -> None:
        started = time.monotonic()
        if self.writing_step != trainer.global_step:  # the best and the last of one step may be written together
            self.writer.check(wait=True)
        refuse_non_finite(trainer)
        self._random_states, self.kind = gather_random_states(), kind
        path = self.folder / checkpoint_name(kind, trainer.global_step)
        if trainer.is_global_zero:
            set_aside(path)  # the run stopped in this step's validation before, and goes on
        files: Any = trainer.strategy.checkpoint_io
        files.asynchronous = self.asynchronous
        trainer.save_checkpoint(path)
        files.asynchronous = False
        if trainer.is_global_zero:
            metric = {self.monitor: self.best_value} if kind == "best" and self.best_value is not None else {}
            known = {**self._point(trainer), "step": trainer.global_step, "world_size": trainer.world_size}
            known |= {"metric": metric, "weights_only": self._leaves_out_optimizer(kind) or None}
            write, files.write = files.write, None
            self._do(trainer, lambda: write_sidecar(path, Sidecar.of(write(), **known)), path, kind)
        if not self.asynchronous:
            trainer.strategy.barrier("checkpoint is complete")
        self.stalled_s += time.monotonic() - started

    def _do(self, trainer: pl.Trainer, work: Any, path: Path, kind: str) -> None:
        """Do what makes the checkpoint complete, in the thread if `asynchronous`, then announce it."""
        if self.asynchronous:
            self.writing_step = trainer.global_step
            self.writer.submit(work, partial(self._announce, trainer, path, kind))
        else:
            work()
            self._announce(trainer, path, kind)

    def _announce(self, trainer: pl.Trainer, path: Path, kind: str) -> None:
        """Tell the callbacks that upload or record it, then delete its predecessors."""
        sidecar = read_sidecar(path)
        for callback in trainer.callbacks:
            if hasattr(callback, "on_checkpoint_complete"):
                callback.on_checkpoint_complete(path, sidecar, kind)
        for older, _ in list(complete(self.folder, kind)):
            if older != path:
                remove(older)

    def _leaves_out_optimizer(self, kind: str) -> bool:
        return self.weights_only and kind == "best"

    def _point(self, trainer: pl.Trainer) -> State:
        per_epoch = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready // trainer.accumulate_grad_batches
        phase = self.phase
        if done < per_epoch:  # a run that max_steps or max_time ends here can be made longer and goes on from here
            phase = VALIDATION if is_due(trainer) and self.validated_step != trainer.global_step else TRAINING
        elif phase == TRAINING:
            phase = VALIDATION if validates(trainer) else EPOCH_END
        return resume_point(trainer.current_epoch, done, per_epoch, phase)

    def record_fields(self) -> dict[str, object]:
        """Return best_checkpoint of the run record: relative path, bytes, sha256, position, metric."""
        if self.best is None or self.writer.is_busy:  # a crash may still take away one that is being written
            return {}
        sidecar, value = read_sidecar(self.folder / self.best["file"]), self.best["value"]
        return {
            "best_checkpoint": {
                "path": f"{self.folder.name}/{self.best['file']}", "bytes": sidecar and sidecar.bytes,
                "sha256": sidecar and sidecar.sha256, "epoch": self.best["epoch"], "step": self.best["step"],
                "metric": {} if value is None else {self.best.get("metric", self.monitor): value},
            },
            "checkpoint_stall_s": round(self.stalled_s, 3),
        }  # fmt: skip

    @property
    def best_path(self) -> Path | None:
        return None if self.best is None else self.folder / self.best["file"]


def refuse_non_finite(trainer: pl.Trainer) -> None:
    """Check the weights before they are saved; costs one synchronisation.

    Raises:
        Diverged: on every rank, if a weight on any rank is not finite.
    """
    local = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.lightning_module.parameters()]
    # The norm reads each weight once; it can overflow where no weight does, and only then each is looked at.
    finite = bool(torch.nn.utils.get_total_norm(local).isfinite()) or all(bool(p.isfinite().all()) for p in local)
    if not trainer.strategy.reduce_boolean_decision(finite, all=True):
        raise Diverged(
            f"weights became nan or inf by step {trainer.global_step}: nothing was saved; lower optimizer.lr"
        )
