"""Weights from a checkpoint into a module: all of them, or those that fit a new run."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.callbacks import checkpoint_io
from lockstep.runs.config import Config
from lockstep.runs.hooks import AdaptsWeights
from lockstep.strategies.sharded_checkpoint import read as read_shards
from lockstep.training.checks import check_fits

Checkpoint = dict[str, Any]  # as Lightning saves it, with `lockstep`: the config and what the data were


def start_from(module: pl.LightningModule, path: str, model_name: str, data: Config, data_hash: str) -> str:
    """Put a checkpoint's weights into the module of a new run; where the classes are others, the head starts at zero,
    which gives each of them the same logit.

    A net that has `adapted` takes weights from another image size.

    Args:
        data: the run's data config: the same name under another seed has other validation images.
        data_hash: of the run's images.
    Returns:
        A sentence that says so.
    Raises:
        UserError: the checkpoint is of another model; names the first parameter that differs.
    """
    checkpoint = read_checkpoint(path)
    own, found = module.state_dict(), checkpoint["state_dict"]
    resampled = False
    if isinstance(module.net, AdaptsWeights):
        of_net = {name[4:]: value for name, value in found.items() if name.startswith("net.")}
        others = {name: value for name, value in found.items() if not name.startswith("net.")}
        adapted = module.net.adapted(of_net)
        resampled = adapted is not of_net
        found = {**others, **{f"net.{name}": value for name, value in adapted.items()}}
    facts = (checkpoint.get("lockstep") or {}).get("data") or {}
    there, here = facts.get("num_classes", module.num_classes), module.num_classes
    new = [
        name
        for name, value in found.items()
        if there != here and name in own and own[name].shape[1:] == value.shape[1:]
        and (own[name].shape[:1], value.shape[:1]) == ((here,), (there,))
    ]  # fmt: skip
    found = {**found, **{name: torch.zeros_like(own[name]) for name in new}}
    check_fits(module, found, path, model_name)
    module.load_state_dict(found)
    but = f"; of {there} classes there, {here} here: {', '.join(new)} start new" if new else ""
    but += "; position embeddings resampled" if resampled else ""
    before = ((checkpoint.get("lockstep") or {}).get("config") or {}).get("data") or {}
    if before.get("name") == data.get("name"):
        changed = [key for key in ("seed", "fold", "num_folds") if before.get(key) != data.get(key)]
        if changed:
            why = ", ".join(f"data.{key} was {before.get(key)}, is {data.get(key)}" for key in changed)
            but += f". It may have trained on images that validate here: {why}"
        elif facts.get("image_size") == data.get("image_size") and facts.get("data_hash") != data_hash:
            but += ". It may have trained on images that validate or test here, which are not those of then"
    return f"Starting from the weights of {path}{but}."


def read_checkpoint(path: str | Path) -> Checkpoint:
    """A file, or a folder of shards, as tensors and plain values in CPU memory."""
    return checkpoint_io.read_checkpoint(path, read_folder=read_shards)
