"""Load checkpoint files: tensors and plain values, nothing that could run code."""

import io
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.process.errors import UserError
from lockstep.ranks.collectives import broadcast_object, has_ranks

CHUNK_BYTES = 64 * 2**20  # of a broadcast

# The content as Lightning saves it; what Lockstep adds is under "lockstep".
Checkpoint = dict[str, Any]

# The facts about the data that are read, with their types.
FACT_TYPES = {
    "class_names": list,
    "num_classes": int,
    "image_size": int,
    "channels": int,
    "mean": list,
    "std": list,
    "target_mean": float,
    "target_std": float,
}


def read_checkpoint(
    path: str | Path, map_location: Any = "cpu", content: io.BytesIO | None = None
) -> Checkpoint:
    """Return the content of a checkpoint file of Lightning or Lockstep.

    It is read with `weights_only=True`.

    Args:
        content: the bytes of the file, if another rank read them.

    Raises:
        UserError: the file does not exist, is damaged, or holds objects that are neither tensors
            nor plain values.
    """
    # A damaged file makes zipfile, pickle and torch raise nearly anything.
    try:
        checkpoint = torch.load(content or path, map_location=map_location, weights_only=True)
        fault = _fault_of_content(checkpoint)
    except Exception as error:
        fault = _fault_of_file(content or path) or _describe_error(error)
    if fault:
        raise UserError(f"{path} is not a checkpoint that can be loaded safely: {fault}.")

    # A new dict does not carry the versions that torch attaches to the state.
    return {**checkpoint, "state_dict": dict(checkpoint["state_dict"])}


def _unreadable_error(path: str | Path, error: OSError) -> UserError:
    if isinstance(error, FileNotFoundError | IsADirectoryError):
        return UserError(f"There is no checkpoint {path}.")
    return UserError(f"{path} cannot be read: {error.strerror or error}.")


def _describe_error(error: Exception) -> str:
    """Return the cause in one line, without torch's advice to load without this check."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch gives its reason in the last line but one; the lines before it are the advice.
    if len(lines) > 1 and lines[-1].startswith("Check the documentation"):
        reason = lines[-2]
    else:
        reason = " ".join(lines)
    return f"{type(error).__name__}: {reason[:300]}".rstrip(": .")


def _fault_of_file(source: str | Path | io.BytesIO) -> str | None:
    """Say why a file was not written by torch.save; None if it begins as a zip or a pickle.

    Raises:
        UserError: it cannot be read.
    """
    if isinstance(source, io.BytesIO):
        start = source.getvalue()[:2]
    else:
        try:
            with open(source, "rb") as file:
                start = file.read(2)
        except OSError as error:
            raise _unreadable_error(source, error) from None
    if not start:
        return "the file is empty"
    if start == b"PK" or start.startswith(b"\x80"):
        return None
    return "it was not written by torch.save. Pass a .ckpt file or the id of a run"


def _fault_of_content(checkpoint: Any) -> str | None:
    """Say why a file that torch could read is no checkpoint; None if it is one."""
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict):
        return "it holds no state_dict"
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            return "its state_dict does not map names to tensors"
    return _fault_of_config(checkpoint.get("lockstep", {}))


def _fault_of_config(lockstep_part: Any) -> str | None:
    """Say what is wrong with the config and the facts about the data; None if nothing is."""
    if not isinstance(lockstep_part, dict):
        return _wrong_type("lockstep", lockstep_part, dict)
    for name in ("config", "data"):
        part = lockstep_part.get(name, {})
        if not isinstance(part, dict):
            return _wrong_type(name, part, dict)

    facts = lockstep_part.get("data", {})
    for name, expected_type in FACT_TYPES.items():
        if name in facts and not isinstance(facts[name], expected_type):
            return _wrong_type(f"data.{name}", facts[name], expected_type)
    return None


def _wrong_type(name: str, value: Any, expected_type: type) -> str:
    """Return a sentence such as "its data.mean is a str ('abc') in place of a list"."""
    actual = f"{type(value).__name__} ({str(value)[:60]!r})"
    return f"its {name} is a {actual} in place of a {expected_type.__name__}"


def load_on_all_ranks(path: str | Path, map_location: Any = "cpu") -> Checkpoint:
    """Read a checkpoint on rank 0 and broadcast its bytes; every rank must call it.

    Raises:
        UserError: on every rank, if there is no such file or it cannot be loaded.
    """
    if not has_ranks():
        return read_checkpoint(path, map_location)

    # The other ranks send nothing, and get the chunks of rank 0.
    chunks: Iterable[Any] = repeat(None)
    if dist.get_rank() == 0:
        chunks = _read_chunks(Path(path))
    content = io.BytesIO()
    for chunk in map(broadcast_object, chunks):
        if isinstance(chunk, UserError):
            raise chunk
        if not chunk:
            break
        content.write(chunk)
    content.seek(0)
    return read_checkpoint(path, map_location, content)


def _read_chunks(path: Path) -> Iterator[bytes | UserError]:
    """Yield the bytes of a file and b"" at its end, or the error that every rank raises."""
    try:
        with path.open("rb") as file:
            while True:
                yield file.read(CHUNK_BYTES)
    except OSError as error:
        yield _unreadable_error(path, error)
