"""The best checkpoint and the last one, each complete and verified before the one before it goes."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lockstep.callbacks.background_writes import BackgroundWrites
from lockstep.callbacks.checkpoint_io import Checkpoint, Deferred
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
from lockstep.runs.hooks import OnCheckpointComplete, OnShardsComplete
from lockstep.storage.checkpoint_files import (
    NAME,
    Sidecar,
    checkpoint_name,
    complete,
    has_only_own_shards,
    link,
    measure,
    read_sidecar,
    remove,
    remove_leftovers,
    remove_own_shards,
    set_aside,
    write_sidecar,
)

log = logging.getLogger(__name__)


class Checkpoints(Callback):
    """Saves `last` after every n-th epoch and every few minutes, `best` when the monitored metric improves, also within
    an epoch.

    A run without validation has nothing to choose by: each `last` of an epoch's end is its `best`.

    Args:
        folder: checkpoints/ of the run.
        monitor, mode: which metric chooses the best, and whether its largest (max) or smallest (min) value does.
        weights_only: leave the optimizer's state out of `best`: a third of AdamW's bytes stays. A run goes on from
            `last`, which is then saved with every best.
        asynchronous: training stands still only until the checkpoint is copied into the host's memory; hashing, writing
            and upload go on beside it. Costs a checkpoint's size in memory. The next checkpoint and the end of the
            training wait for it; what goes wrong in it ends the training at its next step.
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
        self.asynchronous, self.writes = asynchronous, BackgroundWrites()
        self.kind = "last"  # of the checkpoint that is being written
        self.best_value: float | None = None
        self.best: State | None = None  # {file, value, epoch, step}
        self.saved_step = -1
        self.validated_step = -1
        self.loaded: Checkpoint | None = None
        self.phase = TRAINING
        self.stalled_s = 0.0  # seconds that training stood still to write

    # What a checkpoint says of itself

    def state_dict(self) -> State:
        return {"best_value": self.best_value, "best": self.best, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state: State) -> None:
        self.best_value, self.best = state["best_value"], state["best"]
        if state.get("monitor", self.monitor) != self.monitor or state.get("mode", self.mode) != self.mode:
            self.best_value = None  # the next value of the new metric is the best; until then the old best stays

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Checkpoint) -> None:
        checkpoint["lockstep"] = {
            **self.contents,
            "point": self._point(trainer),
            "loader": trainer.train_dataloader.state_dict(),
            "random": self._random_states,
        }
        if self._leaves_out_optimizer(self.kind):
            checkpoint["optimizer_states"] = []
            checkpoint.pop("current_model_state", None)  # what an average of weights is trained beside

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Checkpoint) -> None:
        own = checkpoint.get("lockstep")
        if own is None:
            return
        self.loaded = own
        loops = checkpoint["loops"]
        loops["fit_loop"] = loop_state(loops["fit_loop"], own["point"], trainer.accumulate_grad_batches)

    # When

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero and stage == "fit":
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.saved_at = time.monotonic()
        if self.loaded is not None:
            self.saved_step = trainer.global_step
            # Lightning forgets the loader's state where something asked for the number of steps before fit began.
            trainer.train_dataloader.load_state_dict(self.loaded["loader"])
            states = self.loaded["random"]
            if len(states) == trainer.world_size:
                set_random_state(states[trainer.global_rank])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.phase = TRAINING

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.phase = VALIDATION

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self.validated_step = trainer.global_step
        if not ends_epoch(trainer) and self._keep_if_best(trainer) and self.weights_only:
            self.save_last(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.writes.look()
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True  # else Lightning would not validate what ends in mid-epoch
            return
        if self.every_minutes is None or trainer.global_step == self.saved_step or ends_epoch(trainer):
            return
        if not ends_step(trainer):
            return
        # Every rank looks at the clock of rank 0, and only at log points: no collective in other steps.
        if trainer.global_step % trainer.log_every_n_steps == 0:
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
            self.writes.wait()
        except BaseException as error:  # the exception that ends the run is the one to tell of
            log.info(f"The last checkpoint was not written ({type(error).__name__}: {error}).")

    def finish_writing(self) -> None:
        """Wait for what is being written. Raises what went wrong with it."""
        started = time.monotonic()
        self.writes.wait()
        self.stalled_s += time.monotonic() - started

    def _keep_if_best(self, trainer: pl.Trainer) -> bool:
        """After a validation; whether it was the best so far.

        Raises:
            UserError: it has no such metric.
        """
        value = trainer.callback_metrics.get(self.monitor)
        validations = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
        if value is None and validations:
            raise UserError(f"callbacks.checkpoints.monitor={self.monitor}: there are {', '.join(validations)}.")
        if value is None or not self._improves(float(value)):
            return False
        self._keep_best(trainer, float(value))
        return True

    def _keep_best(self, trainer: pl.Trainer, value: float | None) -> None:
        self.best_value = value
        self.best = {
            "metric": self.monitor, "file": checkpoint_name("best", trainer.global_step), "value": value,
            "epoch": trainer.current_epoch, "step": trainer.global_step,
        }  # fmt: skip
        self._save(trainer, "best")

    def save_last(self, trainer: pl.Trainer, same_as_best: bool = False) -> None:
        """Every rank calls it at the same step. A last that equals the best is a second name for its bytes."""
        if same_as_best:
            self._link_last(trainer)
        else:
            self._save(trainer, "last")
        self.saved_step, self.saved_at = trainer.global_step, time.monotonic()

    def _link_last(self, trainer: pl.Trainer) -> None:
        best, name = self.folder / self.best["file"], self.folder / checkpoint_name("last", trainer.global_step)

        def work() -> None:
            if trainer.is_global_zero or (trainer.local_rank == 0 and has_only_own_shards(best)):
                link(best, name)

        def then() -> None:
            if trainer.is_global_zero:
                self._announce(trainer, name, "last")
            elif trainer.local_rank == 0 and has_only_own_shards(best):
                remove_own_shards(self.folder, "last", name)

        self._do(trainer, work, then)

    # How

    def _leaves_out_optimizer(self, kind: str) -> bool:
        return self.weights_only and kind == "best"

    def _improves(self, value: float) -> bool:
        if value != value:
            return False
        if self.best_value is None:
            return True
        return value > self.best_value if self.mode == "max" else value < self.best_value

    def _save(self, trainer: pl.Trainer, kind: str) -> None:
        started = time.monotonic()
        self.writes.wait(but_of_step=trainer.global_step)
        refuse_non_finite(trainer)
        self._random_states, self.kind = gather_random_states(trainer), kind
        path = self.folder / checkpoint_name(kind, trainer.global_step)
        if trainer.is_global_zero or (trainer.local_rank == 0 and has_only_own_shards(path)):
            set_aside(path)  # of a run that stopped in this step's validation, and goes on
        files = trainer.strategy.checkpoint_io
        files.defers = self.asynchronous
        trainer.save_checkpoint(path)
        metric = {self.monitor: self.best_value} if kind == "best" and self.best_value is not None else {}
        known = {**self._point(trainer), "step": trainer.global_step, "world_size": trainer.world_size}
        known |= {"metric": metric, "weights_only": self._leaves_out_optimizer(kind) or None}
        work = partial(self._complete, trainer, path, files.take_deferred(), known)
        self._do(trainer, work, partial(self._completed, trainer, path, kind))
        self.stalled_s += time.monotonic() - started

    def _do(self, trainer: pl.Trainer, work: Callable[[], None], then: Callable[[], None]) -> None:
        if self.asynchronous:
            self.writes.begin(trainer.global_step, work, then)
        else:
            work()
            then()

    def _complete(self, trainer: pl.Trainer, path: Path, deferred: Deferred | None, known: State) -> None:
        """Write what was deferred, then the sidecar, which makes the checkpoint complete."""
        measured = deferred.write() if deferred else trainer.strategy.checkpoint_io.written.get(str(path))
        if trainer.is_global_zero:
            write_sidecar(path, Sidecar.of(measured or measure(path), **known))
        if not self.asynchronous:
            trainer.strategy.barrier("checkpoint is complete")
        elif deferred and deferred.group is not None:
            torch.distributed.barrier(group=deferred.group)

    def _completed(self, trainer: pl.Trainer, path: Path, kind: str) -> None:
        if trainer.is_global_zero:
            self._announce(trainer, path, kind)
        elif path.is_dir():
            step = int(NAME.fullmatch(path.name)["step"])
            for callback in trainer.callbacks:
                if isinstance(callback, OnShardsComplete):
                    callback.on_shards_complete(path, kind, step)
            if trainer.local_rank == 0:
                remove_own_shards(self.folder, kind, path)

    def _announce(self, trainer: pl.Trainer, path: Path, kind: str) -> None:
        """Only now may the one before go; whoever sends checkpoints elsewhere hears of the new one first."""
        sidecar = read_sidecar(path)
        for callback in trainer.callbacks:
            if isinstance(callback, OnCheckpointComplete):
                callback.on_checkpoint_complete(path, sidecar, kind)
        for older, _ in list(complete(self.folder, kind)):
            if older != path:
                remove(older)

    def _point(self, trainer: pl.Trainer) -> State:
        per_epoch = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready // trainer.accumulate_grad_batches
        phase = self.phase
        if done < per_epoch:  # what max_steps or max_time ends there goes on from there, if it is made longer
            phase = VALIDATION if is_due(trainer) and self.validated_step != trainer.global_step else TRAINING
        elif phase == TRAINING:
            phase = VALIDATION if validates(trainer) else EPOCH_END
        return resume_point(trainer.current_epoch, done, per_epoch, phase)

    def record_fields(self) -> dict[str, object]:
        """best_checkpoint of the run record: relative path, bytes, sha256, where it stands, what it reached."""
        if self.best is None or self.writes.are_open:  # one that a crash may still take away is not named
            return {}
        path, value = self.folder / self.best["file"], self.best["value"]
        sidecar = next((sidecar for found, sidecar in complete(self.folder, "best") if found == path), None)
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
    """One synchronisation per save while all is well.

    Raises:
        Diverged: on every rank, if any weight on any rank is not finite.
    """
    local = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.lightning_module.parameters()]
    if not trainer.strategy.reduce_boolean_decision(_all_finite(local), all=True):
        raise Diverged(
            f"weights became nan or inf by step {trainer.global_step}: nothing was saved; lower optimizer.lr"
        )


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    """Their norm reads each once; it can overflow where they do not, and only then each is looked at."""
    if torch.nn.utils.get_total_norm(tensors).isfinite():
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
