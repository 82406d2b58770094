"""The best checkpoint and the last one, each complete and verified before the one before it goes."""

import base64
import random
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from lockstep.callbacks.checkpoint_io import Checkpoint
from lockstep.callbacks.resume_point import (
    EPOCH_END,
    TRAINING,
    VALIDATION,
    ends_step,
    loop_state,
    resume_point,
    validates,
)
from lockstep.distributed.json_collectives import gather_json
from lockstep.runs.config import Config
from lockstep.runs.errors import Diverged, UserError
from lockstep.runs.hooks import OnCheckpointComplete, OnShardsComplete
from lockstep.storage.checkpoint_files import (
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

State = dict[str, Any]  # plain values by their names, as a checkpoint holds them


class Checkpoints(Callback):
    """Saves `last` after every n-th epoch and every few minutes, `best` when the monitored metric improves.

    A run without validation has nothing to choose by: each `last` of an epoch's end is its `best`.

    Args:
        folder: checkpoints/ of the run.
        monitor, mode: which metric chooses the best, and whether its largest (max) or smallest (min) value does.
        weights_only: leave the optimizer's state out of `best`: a third of AdamW's bytes stays. A run goes on from
            `last`, which is then saved with every best.
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
        self.kind = "last"  # of the checkpoint that is being written
        self.best_value: float | None = None
        self.best: State | None = None  # {file, value, epoch, step}
        self.saved_step = -1
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

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True  # else Lightning would not validate what ends in mid-epoch
            return
        if self.every_minutes is None or trainer.global_step == self.saved_step or self._is_last_batch(trainer):
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
        value = trainer.callback_metrics.get(self.monitor)
        validated = validates(trainer)
        validations = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
        if validated and value is None and validations:
            raise UserError(f"callbacks.checkpoints.monitor={self.monitor}: there are {', '.join(validations)}.")
        is_end = trainer.current_epoch + 1 == trainer.max_epochs or trainer.global_step == trainer.max_steps
        due = is_end or (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if not trainer.enable_validation:
            is_best, self.best_value = due or trainer.should_stop, None
        else:
            is_best = validated and value is not None and self._improves(float(value))
            self.best_value = float(value) if is_best else self.best_value
        if is_best:
            self.best = {
                "metric": self.monitor, "file": checkpoint_name("best", trainer.global_step), "value": self.best_value,
                "epoch": trainer.current_epoch, "step": trainer.global_step,
            }  # fmt: skip
            self._save(trainer, "best")
        if due or (is_best and (self.weights_only or not trainer.enable_validation)):
            self.save_last(trainer, same_as_best=bool(is_best) and not self.weights_only)

    def save_last(self, trainer: pl.Trainer, same_as_best: bool = False) -> None:
        """Every rank calls it at the same step. A last that equals the best is a second name for its bytes."""
        if not same_as_best:
            self._save(trainer, "last")
        else:
            best, name = self.folder / self.best["file"], self.folder / checkpoint_name("last", trainer.global_step)
            if trainer.is_global_zero:
                link(best, name)
                self._announce(trainer, name, "last")
            elif trainer.local_rank == 0 and has_only_own_shards(best):
                link(best, name)
                remove_own_shards(self.folder, "last", name)
        self.saved_step, self.saved_at = trainer.global_step, time.monotonic()

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
        refuse_non_finite(trainer)
        self._random_states, self.kind = gather_random_states(trainer), kind
        path = self.folder / checkpoint_name(kind, trainer.global_step)
        if trainer.is_global_zero or (trainer.local_rank == 0 and has_only_own_shards(path)):
            set_aside(path)  # of a run that stopped in this step's validation, and goes on
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            written = getattr(trainer.strategy.checkpoint_io, "written", {}).get(str(path)) or measure(path)
            metric = {self.monitor: self.best_value} if kind == "best" and self.best_value is not None else {}
            known = {**self._point(trainer), "world_size": trainer.world_size, "metric": metric}
            left_out = self._leaves_out_optimizer(kind) or None
            write_sidecar(path, Sidecar.of(written, step=trainer.global_step, weights_only=left_out, **known))
        trainer.strategy.barrier("checkpoint is complete")
        self.stalled_s += time.monotonic() - started
        if trainer.is_global_zero:
            self._announce(trainer, path, kind)
        elif path.is_dir():
            for callback in trainer.callbacks:
                if isinstance(callback, OnShardsComplete):
                    callback.on_shards_complete(path, kind, trainer.global_step)
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
        is_last = trainer.global_step == trainer.max_steps
        if done < per_epoch and not (phase == VALIDATION and is_last):  # max_steps: a longer run goes on from here
            phase = TRAINING
        elif phase == TRAINING:
            phase = VALIDATION if validates(trainer) else EPOCH_END
        return resume_point(trainer.current_epoch, done, per_epoch, phase)

    def _is_last_batch(self, trainer: pl.Trainer) -> bool:
        return trainer.fit_loop.epoch_loop.batch_progress.current.ready >= trainer.num_training_batches

    def record_fields(self) -> dict[str, object]:
        """best_checkpoint of the run record: relative path, bytes, sha256, where it stands, what it reached."""
        if self.best is None:
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
    """One synchronisation per save. Raises Diverged on every rank if any weight on any rank is not finite."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.lightning_module.parameters()]
    largest = torch.nn.utils.get_total_norm([p.detach() for p in local if p.numel()], norm_type=float("inf"))
    finite = bool(torch.isfinite(largest))
    if not trainer.strategy.reduce_boolean_decision(finite, all=True):
        raise Diverged(
            f"weights became nan or inf by step {trainer.global_step}: nothing was saved; lower optimizer.lr"
        )


def random_state() -> State:
    """Every generator that this process draws from, as plain values and byte tensors."""
    numpy_state = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda_state(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "python": _as_lists(random.getstate()),
    }


def cuda_state() -> torch.Tensor | list[torch.Tensor] | None:
    """Of this process's GPU; of all GPUs where it uses several (dp, model_parallel)."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    several = not torch.distributed.is_initialized() and torch.cuda.device_count() > 1
    return torch.cuda.get_rng_state_all() if several else torch.cuda.get_rng_state()


def set_random_state(state: State) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        states = state["cuda"] if isinstance(state["cuda"], list) else [state["cuda"]]
        for device, own in zip(range(torch.cuda.device_count()), states, strict=False):  # there may be fewer here
            torch.cuda.set_rng_state(own.cpu(), device if len(states) > 1 else "cuda")
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def gather_random_states(trainer: pl.Trainer) -> list[State]:
    """One state per rank, in rank order, on every rank."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return [random_state()]
    return [state_from_json(state) for state in gather_json(state_to_json(random_state()))]


def state_to_json(state: State) -> dict[str, Any]:
    """A random state whose byte tensors are text."""
    cuda = state["cuda"]
    several = [_to_text(each) for each in cuda] if isinstance(cuda, list) else None
    return {
        **state, "torch": _to_text(state["torch"]),
        "cuda": several if several is not None or cuda is None else _to_text(cuda),
    }  # fmt: skip


def state_from_json(state: dict[str, Any]) -> State:
    """
    Raises:
        RuntimeError: it is no random state.
    """
    try:
        cuda = state["cuda"]
        name, keys, *rest = state["numpy"]
        version, internal, gauss = state["python"]
        return {
            "torch": _from_text(state["torch"]),
            "cuda": [_from_text(each) for each in cuda] if isinstance(cuda, list) else cuda and _from_text(cuda),
            "numpy": [str(name), [int(key) for key in keys], int(rest[0]), int(rest[1]), float(rest[2])],
            "python": [int(version), [int(part) for part in internal], None if gauss is None else float(gauss)],
        }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RuntimeError(f"a rank sent no random state ({type(error).__name__}: {error})") from None


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
