"""Load checkpoint files: tensors and plain values, nothing that could run code."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.runs.errors import UserError

Checkpoint = dict[str, Any]  # as Lightning saves it; what Lockstep adds is under "lockstep"

DATA_FACTS = {"class_names": list, "num_classes": int, "image_size": int, "channels": int, "mean": list, "std": list}


def read_checkpoint(path: str | Path, map_location: Any = "cpu", content: io.BytesIO | None = None) -> Checkpoint:
    """Return the content of a checkpoint file of Lightning or Lockstep, read with `weights_only=True`.

    Args:
        content: the bytes of the file, if another rank read them.
    Raises:
        UserError: the file does not exist, is damaged, or holds objects that are neither tensors nor plain values.
    """
    if content is None and not Path(path).is_file():
        raise UserError(f"There is no checkpoint {path}.")
    try:
        checkpoint = torch.load(content or path, map_location=map_location, weights_only=True)
        fault = _fault_of(checkpoint)
    except Exception as error:  # a damaged file makes zipfile, pickle and torch raise nearly anything
        lines = [line for line in map(str.strip, str(error).splitlines()) if line] or [""]
        # torch's reason is the last line but one; the lines before it advise to load without this check.
        reason = lines[-2] if lines[-1].startswith("Check the documentation") else " ".join(lines)
        fault = _fault_of_file(content or path)
        fault = fault or f"{type(error).__name__}: {reason[:300]}".removesuffix(": ")
    if fault:
        raise UserError(f"{path} is not a checkpoint that can be loaded safely: {fault}")
    return {**checkpoint, "state_dict": dict(checkpoint["state_dict"])}  # without the versions that torch attaches


def _fault_of_file(source: str | Path | io.BytesIO) -> str:
    """Return a sentence if a file does not begin as torch.save writes: as a zip, or as a pickle."""
    if isinstance(source, io.BytesIO):
        start = source.getvalue()[:2]
    else:
        with open(source, "rb") as file:
            start = file.read(2)
    if not start:
        return "the file is empty."
    if start == b"PK" or start.startswith(b"\x80"):
        return ""
    return "it is no file of torch.save. Pass a .ckpt file or the id of a run."


def _fault_of(checkpoint: Any) -> str | None:
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict):
        return "it holds no state_dict"
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()):
        return "its state_dict is not tensors by name"
    own, facts = checkpoint.get("lockstep", {}), {}
    for name in ("lockstep", "config", "data"):
        facts = own if name == "lockstep" else own.get(name, {})
        if not isinstance(facts, dict):
            return f"it carries no config: its {name} is a {type(facts).__name__}"
    wrong = [key for key, kind in DATA_FACTS.items() if key in facts and not isinstance(facts[key], kind)]
    return f"its data.{wrong[0]} is {str(facts[wrong[0]])[:60]!r}" if wrong else None
