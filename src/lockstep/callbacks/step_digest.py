"""Record what each step of a run computes, so that src/prove.py can compare runs.

Each rank writes `steps-rank<n>.jsonl` in the run's folder. Tensors are recorded as a hash, their
norm and a projection, so that a large net needs no more room than a small one.
"""

import ast
import hashlib
import inspect
import json
import os
import random
import signal
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric

from lockstep.callbacks.unused_parameters import find_definition
from lockstep.checkpoints.loader_state import has_state, loaders_in
from lockstep.checkpoints.random_state import find_generators
from lockstep.checkpoints.resume_point import ends_step
from lockstep.strategies.sync_batchnorm import BATCH_NORMS, SyncBatchNorm

BATCHES = "batches"
DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
# Calls of these modules in a dataset draw random numbers. No seed reaches the calls of UNSEEDED.
RANDOM_MODULES = ("random.", "np.random.", "numpy.random.", "secrets.", "uuid.")
UNSEEDED = ("default_rng", "RandomState", "Random", "SystemRandom", "urandom", "uuid4", "time_ns")
INSTALLED = ("site-packages", "dist-packages", "/lib/python3")


class StepDigest(pl.Callback):
    """Write a line for each optimizer step and each validation of this rank.

    Args:
        folder: the folder of the run.
        keeps_batches: write the batches too, for a run that replays them.
        replay: the folder of a run whose batches replace those of the loader. A batch is cut into
            equal parts, one for each rank and micro-batch.
        stops_at: the optimizer step after which this process gets SIGTERM; None sends none.
        dies_in: the epoch at whose start this process gets SIGKILL; None sends none.
        more_workers: the number of loader processes beyond those of the run.
    """

    def __init__(
        self,
        folder: str,
        keeps_batches: bool = False,
        replay: str | None = None,
        stops_at: int | None = None,
        dies_in: int | None = None,
        more_workers: int = 0,
    ) -> None:
        self.folder = Path(folder)
        self.keeps_batches = keeps_batches
        self.replay = Path(replay) if replay else None
        self.stops_at = stops_at
        self.dies_in = dies_in
        self.more_workers = more_workers
        self.losses: list[float] = []
        self.samples: list[list[str]] = []
        self.learning_rates: list[float] = []
        self.random_before: Any = None
        self.has_drawn = False
        self.has_checked_gradients = False
        self.validation_loaders_seen = 0
        self.validation_sizes: list[int] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        disable_dropout(pl_module)
        if stage != "fit":
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"steps-rank{trainer.global_rank}.jsonl"
        if self.keeps_batches:
            (self.folder / BATCHES).mkdir(exist_ok=True)

        strategy = trainer.strategy
        original = strategy.process_dataloader
        strategy.process_dataloader = partial(self._process_loader, trainer, original)
        if self.replay:
            # The batches were recorded after these hooks.
            owner = trainer.datamodule or pl_module
            owner.on_before_batch_transfer = _return_batch
            owner.on_after_batch_transfer = _return_batch

    def _process_loader(
        self, trainer: pl.Trainer, original: Callable[[Any], Any], loader: Any
    ) -> Any:
        if self.replay:
            folder = self.replay / BATCHES
            return Replay(folder, self._stage_of_loader(trainer, folder), trainer)
        if trainer.training and self.more_workers and isinstance(loader, DataLoader):
            loader.num_workers += self.more_workers
            loader.prefetch_factor = loader.prefetch_factor or 2
        return original(loader)

    def _stage_of_loader(self, trainer: pl.Trainer, folder: Path) -> str:
        """Return train, or the name of the next validation loader: val0, val1 and so on.

        Args:
            folder: the recorded batches of all loaders.
        """
        if trainer.training:
            return "train"
        num_loaders = len({path.name.split("-")[0] for path in folder.glob("val*.pt")})
        number = self.validation_loaders_seen % max(num_loaders, 1)
        self.validation_loaders_seen += 1
        return f"val{number}"

    def _write_line(self, kind: str, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_line("start", step=trainer.global_step, **digest_state(trainer, pl_module))
        loaders = loaders_in(trainer.train_dataloader)
        norms = [
            name
            for name, layer in pl_module.named_modules()
            if isinstance(layer, BATCH_NORMS)
            and not isinstance(layer, nn.SyncBatchNorm | SyncBatchNorm)
        ]
        self._write_line(
            "facts",
            loaders=len(loaders),
            without_state=[type(each).__name__ for each in loaders if not has_state(each)],
            streams=[stream_name(each) for each in loaders if is_stream(each)],
            generators=sorted(
                find_generators([getattr(each, "dataset", None) for each in loaders])
            ),
            random_calls=random_calls(trainer, pl_module),
            batch_norms=norms,
            num_workers=[getattr(each, "num_workers", 0) for each in loaders],
            smallest_validation_batch=min(self.validation_sizes, default=0),
        )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The callback that saves an epoch's end comes first, so that checkpoint is complete.
        if trainer.current_epoch == self.dies_in:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.random_before = random_fingerprint()
        self.learning_rates = []
        for optimizer in trainer.optimizers:
            self.learning_rates += [float(group["lr"]) for group in optimizer.param_groups]
        self.samples += hash_samples(batch)
        self._save_batch("train", trainer, batch, batch_idx)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.has_checked_gradients:
            return
        self.has_checked_gradients = True
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                self._write_line("unused", name=name, line=find_definition(pl_module, name))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.has_drawn |= self.random_before != random_fingerprint()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            factor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.losses.append(float(loss.detach()) * factor)
        if not ends_step(trainer):
            return

        self._write_line(
            "step",
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            images=self.samples,
            draws=self.has_drawn,
            loss=self.losses,
            learning_rates=self.learning_rates,
            **digest_state(trainer, pl_module),
        )
        self.losses = []
        self.samples = []
        if trainer.global_step == self.stops_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking or trainer.state.fn == "fit":
            self.validation_sizes.append(count_samples(batch))
            self._save_batch(f"val{dataloader_idx}", trainer, batch, batch_idx)

    def _save_batch(self, stage: str, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        if self.keeps_batches:
            torch.save(batch, batch_path(self.folder / BATCHES, stage, trainer, batch_idx))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit":
            stage = "sanity" if trainer.sanity_checking else "validation"
            self._write_metrics(stage, trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_metrics("epoch", trainer)

    def _write_metrics(self, stage: str, trainer: pl.Trainer) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._write_line("metrics", stage=stage, step=trainer.global_step, values=values)


class Replay:
    """Read this rank's parts of recorded batches, in place of a loader.

    Args:
        folder: the folder of the batches.
        stage: train, or val0 for the first validation loader, val1 for the next.
    """

    def __init__(self, folder: Path, stage: str, trainer: pl.Trainer) -> None:
        self.folder = folder
        self.trainer = trainer
        self.rank = trainer.global_rank
        self.world_size = trainer.world_size
        self.micro_batches = trainer.accumulate_grad_batches if stage == "train" else 1
        self.stage = stage

    def _path(self, batch: int) -> Path:
        return batch_path(self.folder, self.stage, self.trainer, batch)

    def __len__(self) -> int:
        number = 0
        while self._path(number).exists() and not self._is_too_small(number):
            number += 1
        return number * self.micro_batches

    def _is_too_small(self, number: int) -> bool:
        """Return whether a validation batch has not a sample for each rank."""
        if self.stage == "train":
            return False
        batch = torch.load(self._path(number), weights_only=False)
        return 0 < count_samples(batch) < self.world_size

    def __iter__(self) -> Iterator[Any]:
        num_parts = self.micro_batches * self.world_size
        for number in range(len(self) // self.micro_batches):
            batch = torch.load(self._path(number), weights_only=False)
            for micro_batch in range(self.micro_batches):
                yield batch_part(batch, micro_batch * self.world_size + self.rank, num_parts)


def batch_path(folder: Path, stage: str, trainer: pl.Trainer, batch: int) -> Path:
    epoch = "sanity" if trainer.sanity_checking else trainer.current_epoch
    return folder / f"{stage}-{epoch}-{batch}.pt"


def list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors with at least one dimension in a batch."""
    if isinstance(tree, Tensor):
        return [tree] if tree.ndim else []
    items: list[Any] = []
    if isinstance(tree, dict):
        items = list(tree.values())
    elif isinstance(tree, list | tuple):
        items = list(tree)
    tensors = []
    for item in items:
        tensors += list_tensors(item)
    return tensors


def count_samples(batch: Any) -> int:
    tensors = list_tensors(batch)
    return len(tensors[0]) if tensors else 0


def batch_part(batch: Any, index: int, num_parts: int) -> Any:
    """Return one of several equal parts of a batch. Part 1 of 2 of 8 samples has the last 4."""
    size = count_samples(batch)
    samples = slice(index * size // num_parts, (index + 1) * size // num_parts)
    return _select_samples(batch, samples, size)


def _select_samples(tree: Any, samples: slice, size: int) -> Any:
    """Return nested values with the chosen samples of each member that has `size` items."""
    if isinstance(tree, Tensor):
        if tree.ndim and len(tree) == size:
            return tree[samples]
    elif isinstance(tree, dict):
        return {name: _select_samples(item, samples, size) for name, item in tree.items()}
    elif isinstance(tree, list | tuple):
        return _select_from_list(tree, samples, size)
    return tree


def _select_from_list(items: Any, samples: slice, size: int) -> Any:
    """Return a list with its members cut; a list without tensors gives its chosen items."""
    if list_tensors(items):
        parts = [_select_samples(item, samples, size) for item in items]
        if hasattr(items, "_fields"):
            return type(items)(*parts)
        return type(items)(parts)
    if len(items) == size:
        return items[samples]
    return items


def hash_samples(batch: Any) -> list[list[str]]:
    """Return the hashes of each sample of a batch, one for each of its tensors.

    Two images with labels give [["1f…", "a0…"], ["9c…", "a0…"]].
    """
    arrays = [to_numpy(tensor) for tensor in list_tensors(batch)]
    size = count_samples(batch)
    columns = [array for array in arrays if len(array) == size]
    hashes = []
    for number in range(size):
        hashes.append([short_hash(column[number]) for column in columns])
    return hashes


def short_hash(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:8]


def to_numpy(tensor: Tensor) -> Any:
    """Return a tensor as an array; floating-point numbers become float64."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    tensor = tensor.cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def digest(tensor: Tensor) -> list[Any]:
    """Return a tensor's hash, norm and projection on a fixed direction."""
    array = to_numpy(tensor)
    flat = np.abs(array.ravel()) if np.iscomplexobj(array) else array.ravel().astype(np.float64)
    direction = np.cos(np.arange(flat.size, dtype=np.float64))
    return [short_hash(array), float(np.linalg.norm(flat)), float(flat @ direction)]


def digest_state(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """Return digests of weights, buffers and the optimizer's state, and plain attributes."""
    weights = {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())}
    names: dict[Tensor, str] = {parameter: name for name, parameter in pl_module.named_parameters()}
    moments = {}
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    moments[f"{names.get(parameter, '?')}/{key}"] = digest(value)
    return {
        "weights": {name: digest(value) for name, value in weights.items()},
        "optimizer": moments,
        "attributes": digest_attributes(pl_module),
    }


def digest_attributes(pl_module: pl.LightningModule) -> dict[str, Any]:
    """Return the numbers and tensors that a module and its layers hold as plain attributes."""
    values = {}
    for name, layer in pl_module.named_modules():
        if isinstance(layer, Metric):
            continue
        for key, value in vars(layer).items():
            if key.startswith("_") or key == "training":
                continue
            if isinstance(value, Tensor):
                values[f"{name}.{key}".lstrip(".")] = digest(value)
            elif isinstance(value, int | float):
                values[f"{name}.{key}".lstrip(".")] = value
    return values


def disable_dropout(pl_module: pl.LightningModule) -> None:
    """Disable dropout in this process, because its random numbers differ between ranks."""
    for name in DROPOUTS:
        setattr(nn.functional, name, _return_input)
    for layer in pl_module.modules():
        if isinstance(layer, nn.MultiheadAttention):
            layer.dropout = 0.0
        if "drop" in type(layer).__name__.lower():
            for name in ("p", "drop_prob"):
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)


def _return_batch(batch: Any, _: int) -> Any:
    return batch


def _return_input(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def random_fingerprint() -> Any:
    """Return the states of the global generators, which differ once a number has been drawn."""
    name, keys, *rest = np.random.get_state()
    return short_hash(torch.get_rng_state().numpy()), short_hash(keys), rest, random.getstate()


def is_stream(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def stream_name(loader: Any) -> str:
    return type(loader.dataset).__name__


def random_calls(trainer: pl.Trainer, pl_module: pl.LightningModule) -> list[str]:
    """Return file:line of calls of random number generators in the classes of data and module.

    Calls that no seed reaches come first.
    """
    objects: list[Any] = []
    for loader in loaders_in(trainer.train_dataloader):
        dataset = getattr(loader, "dataset", None)
        objects += [dataset, getattr(dataset, "dataset", None), getattr(dataset, "transform", None)]
        objects.append(loader)
    calls: list[RandomCall] = []
    for value in (*objects, trainer.datamodule, pl_module):
        for cls in type(value).__mro__:
            calls += find_random_calls(cls)
    return [call.line for call in sorted(calls, key=lambda call: not call.is_unseeded)]


class RandomCall(NamedTuple):
    """A call of a random number generator.

    Attributes:
        is_unseeded: no seed reaches the call.
        line: the file and line of the call, as file:line.
    """

    is_unseeded: bool
    line: str


def find_random_calls(cls: type) -> list[RandomCall]:
    """Return the calls of random number generators in the source of a class of the user."""
    try:
        path = str(inspect.getsourcefile(cls))
        lines, first_line = inspect.getsourcelines(cls)
    except (TypeError, OSError):
        return []
    if any(part in path for part in INSTALLED):
        return []

    calls = []
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_unseeded = name.rpartition(".")[2] in UNSEEDED and not node.args and not node.keywords
        is_unseeded = is_unseeded or name == "os.urandom"
        if is_unseeded or name.startswith(RANDOM_MODULES):
            calls.append(RandomCall(is_unseeded, f"{path}:{first_line + node.lineno - 1}"))
    return calls
