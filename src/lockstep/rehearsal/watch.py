"""A callback of every rank of a rehearsal: what its device held, and which parameters got no gradient.

The notes go to watch-rank<rank>.json after each change: a rank may end at any step.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

MIB = 2**20


class Watch(Callback):
    """
    Args:
        folder: for the notes.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.notes: dict[str, list] = {"held_mib": [], "peak_mib": [], "without_gradient": [], "kept": []}
        self.looked = False
        self.lengths: dict[tuple[int, str], int] = {}

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self.looked:
            self.looked = True
            named = module.named_parameters()
            left = [name for name, p in named if p.requires_grad and p.grad is None]
            self.notes["without_gradient"] = [[name, where_made(module, name)] for name in left]
            self._write(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.notes["held_mib"].append(torch.cuda.memory_allocated() / MIB)
        found = {(id(owner), name): (owner, name, length) for owner, name, length in lists_of_tensors(trainer)}
        grown = [entry for key, entry in found.items() if 0 < self.lengths.get(key, 0) < entry[2]]
        self.lengths = {key: entry[2] for key, entry in found.items()}
        self.notes["kept"] = [line_of(type(owner), f"self.{name}.", f"self.{name} +=") for owner, name, _ in grown]
        self._write(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    on_test_end = on_fit_end = on_validation_end

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        self.notes["peak_mib"] = [torch.cuda.max_memory_reserved(i) / MIB for i in devices_of(trainer)]
        path = self.folder / f"watch-rank{trainer.global_rank}.json"
        path.write_text(json.dumps(self.notes))


def devices_of(trainer: pl.Trainer) -> list[int]:
    """Indices of the devices that this process computes on."""
    alone = trainer.world_size == 1
    return list(range(torch.cuda.device_count())) if alone else [torch.cuda.current_device()]


def where_made(module: nn.Module, parameter: str) -> str | None:
    """file:line where the user's class makes the parameter or the layer that holds it; None where none does."""
    parts = parameter.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        owner = module.get_submodule(".".join(parts[:depth]))
        for cls in type(owner).__mro__:
            if cls.__module__.split(".")[0] in ("torch", "lightning"):
                continue
            target = f"self.{parts[depth]}"
            if found := line_of(cls, f"{target} =", f"{target}:", f"{target}="):
                return found
    return None


def line_of(cls: type, *starts: str) -> str | None:
    """file:line of the first line in the class's source that begins with one of these."""
    try:
        lines, first = inspect.getsourcelines(cls)
        path = inspect.getsourcefile(cls)
    except (OSError, TypeError):
        return None
    for offset, line in enumerate(lines):
        if line.strip().startswith(starts):
            return f"{path}:{first + offset}"
    return None


def lists_of_tensors(trainer: Any) -> Iterator[tuple[Any, str, int]]:
    """(owner, attribute, length) of the lists of a GPU's tensors that modules and callbacks hold."""
    for owner in (*trainer.lightning_module.modules(), *trainer.callbacks):
        for name, value in vars(owner).items():
            if isinstance(value, list) and value and isinstance(value[-1], torch.Tensor) and value[-1].is_cuda:
                yield owner, name, len(value)
