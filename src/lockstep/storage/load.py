"""Load checkpoint files: tensors and plain values, nothing that could run code."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.runs.errors import UserError

Checkpoint = dict[str, Any]  # as Lightning saves it; what Lockstep adds is under "lockstep"

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
DATA_FACTS = {"class_names": list, "num_classes": int, "image_size": int, "channels": int, "mean": list, "std": list}


def load_plain(source: str | Path | io.BytesIO, name: str | Path, map_location: Any = "cpu") -> Any:
    """Return what a file of torch.save holds, read with `weights_only=True`.

    Args:
        source: a path, or the bytes of the file.
        name: the path that the error names.

    Raises:
        UserError: the file is damaged, or holds objects that are neither tensors nor plain values.
    """
    try:
        return torch.load(source, map_location=map_location, weights_only=True)
    except Exception as error:  # a damaged file makes zipfile, pickle and torch raise nearly anything
        reason = " ".join(str(error).split())[:300]
        raise not_safe(name, f"{type(error).__name__}: {reason}") from None


def read_checkpoint(path: str | Path, map_location: Any = "cpu", content: io.BytesIO | None = None) -> Checkpoint:
    """Return the content of a checkpoint file of Lightning or Lockstep.

    Args:
        content: the bytes of the file, if another rank read them.

    Raises:
        UserError: the file does not exist, is damaged, or is not a checkpoint of tensors and plain values.
    """
    if content is None and not Path(path).is_file():
        raise UserError(f"There is no checkpoint {path}.")
    checkpoint = load_plain(content or path, path, map_location)
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict):
        raise not_safe(path, "it holds no state_dict")
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()):
        raise not_safe(path, "its state_dict is not tensors by name")
    own = checkpoint.get("lockstep", {})
    data = own.get("data", {}) if isinstance(own, dict) else {}
    for name, part in (("lockstep", own), ("config", isinstance(own, dict) and own.get("config", {})), ("data", data)):
        if not isinstance(part, dict):
            raise not_safe(path, f"it carries no config: its {name} is a {type(part).__name__}")
    for key, kind in DATA_FACTS.items():
        if not isinstance(data.get(key, kind()), kind):
            raise not_safe(path, f"its data.{key} is {str(data[key])[:60]!r}")
    _check_plain(checkpoint, path)
    return {**checkpoint, "state_dict": dict(state)}  # without the module versions that torch attaches to it


def _check_plain(value: Any, path: str | Path) -> None:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        for item in value:
            _check_plain(item, path)
    elif not isinstance(value, (*PLAIN, Tensor)):
        raise not_safe(path, f"it holds a {type(value).__name__}")


def not_safe(path: str | Path, reason: str) -> UserError:
    return UserError(f"{path} is no checkpoint that can be loaded safely: {reason}")
