"""Find parameters that get no gradient in the first training step, with the line that makes them."""

import inspect
import json
from pathlib import Path

import lightning.pytorch as pl
from torch import nn


class UnusedParameters(pl.Callback):
    """Write {name: file:line} of the parameters of any rank into `path`."""

    def __init__(self, path: str) -> None:
        self.path, self.has_looked = Path(path), False

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self.has_looked:
            self.has_looked = True
            named = module.named_parameters()
            unused = {name: made_at(module, name) for name, p in named if p.requires_grad and p.grad is None}
            if unused:
                self.path.write_text(json.dumps(unused))


def made_at(module: nn.Module, parameter: str) -> str | None:
    """Return file:line where a class of the user makes the parameter or the layer that holds it."""
    parts = parameter.split(".")
    for depth in reversed(range(len(parts))):
        for cls in type(module.get_submodule(".".join(parts[:depth]))).__mro__:
            if cls.__module__.split(".")[0] in ("torch", "lightning", "builtins"):
                continue
            lines, first = inspect.getsourcelines(cls)
            for offset, line in enumerate(lines):
                if line.strip().startswith(tuple(f"self.{parts[depth]}{sign}" for sign in (" =", ":", "="))):
                    return f"{inspect.getsourcefile(cls)}:{first + offset}"
    return None
