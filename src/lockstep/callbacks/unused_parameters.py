"""Find parameters without a gradient in the first training step, and the line that makes them."""

import inspect
import json
from pathlib import Path

import lightning.pytorch as pl
from torch import nn

from lockstep.callbacks.training_log import TrainingLog

LIBRARIES = ("torch", "lightning", "builtins")


class UnusedParameters(pl.Callback):
    """Write {name: file:line} of the parameters without a gradient into `path`.

    Args:
        checks_loss: end the run if the loss is nan or inf, as every run does.
    """

    def __init__(self, path: str, checks_loss: bool = True) -> None:
        self.path = Path(path)
        self.checks_loss = checks_loss
        self.has_checked_gradients = False

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, TrainingLog):
                callback.checks_loss = self.checks_loss

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.has_checked_gradients:
            return
        self.has_checked_gradients = True

        unused = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                unused[name] = find_definition(module, name)
        if unused:
            self.path.write_text(json.dumps(unused))


def find_definition(module: nn.Module, parameter: str) -> str | None:
    """Return file:line where a class of the user makes the parameter or the layer that holds it."""
    parts = parameter.split(".")
    for depth in reversed(range(len(parts))):
        owner = module.get_submodule(".".join(parts[:depth]))
        for cls in type(owner).__mro__:
            line = _line_of_assignment(cls, parts[depth])
            if line is not None:
                return line
    return None


def _line_of_assignment(cls: type, attribute: str) -> str | None:
    """Return file:line where a class of the user assigns self.<attribute>."""
    if cls.__module__.split(".")[0] in LIBRARIES:
        return None

    beginnings = (f"self.{attribute} =", f"self.{attribute}:", f"self.{attribute}=")
    lines, first_line = inspect.getsourcelines(cls)
    for number, line in enumerate(lines, start=first_line):
        if line.strip().startswith(beginnings):
            return f"{inspect.getsourcefile(cls)}:{number}"
    return None
