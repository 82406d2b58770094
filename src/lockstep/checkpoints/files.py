"""Checkpoint files of a run: their names, the file that makes each complete, and their faults.

`last-step00000120.ckpt` is complete once `last-step00000120.ckpt.json` lies beside it. That file is
written last, and its sha256 tells whether the bytes are still those that were written. No
checkpoint is overwritten: one of a step that was saved before is `last-step00000120-2.ckpt`.
Imports no torch.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.process.files import sha256_of, sync_folder, write_atomically

log = logging.getLogger(__name__)

CHECKPOINT_NAME = re.compile(r"(?P<kind>best|last)-step\d{8,}(-(?P<repeat>\d))?\.ckpt")
PART_NAME = re.compile(r"\.(best|last)-step\d{8,}(-\d)?\.ckpt(\.json)?(\.\w+)?\.part")
SHA256 = re.compile(r"[0-9a-f]{64}")
# A step has at most this many checkpoints of a kind.
MAX_CHECKPOINTS_OF_STEP = 9


@dataclass(frozen=True)
class Sidecar:
    """The small file beside a checkpoint.

    Attributes:
        metric: the metrics that a best checkpoint reached.
        weights_only: True if the checkpoint lacks the optimizer's state.
        name: the checkpoint's file name when it was written; empty in version 2.0.0.
    """

    step: int
    bytes: int = 0
    sha256: str = ""
    epoch: int = 0
    metric: dict[str, float] = field(default_factory=dict)
    weights_only: bool = False
    name: str = ""


def parse_sidecar(content: Any) -> Sidecar | None:
    """Return the sidecar in a JSON value; None unless every field is valid.

    Unknown fields are ignored, because a later version may have written them.
    """
    if not isinstance(content, dict):
        return None
    defaults = vars(Sidecar(0))
    values = {}
    for name, value in content.items():
        if name in defaults and value is not None:
            values[name] = value

    if not {"step", "bytes", "sha256"} <= values.keys():
        return None
    if any(type(value) is not type(defaults[name]) for name, value in values.items()):
        return None
    sidecar = Sidecar(**values)
    return sidecar if _is_valid(sidecar) else None


def _is_valid(sidecar: Sidecar) -> bool:
    """Return whether the values of a sidecar, which have the right types, are possible."""
    if not SHA256.fullmatch(sidecar.sha256):
        return False
    numbers = (sidecar.step, sidecar.bytes, sidecar.epoch)
    if not all(0 <= number < 2**63 for number in numbers):
        return False
    return all(isinstance(value, int | float) for value in sidecar.metric.values())


def checkpoint_name(kind: str, step: int) -> str:
    return f"{kind}-step{step:08d}.ckpt"


def unused_path(folder: Path, kind: str, step: int) -> Path:
    """Return a path that no checkpoint has, such as last-step00000120-2.ckpt.

    A run that stopped in the validation of a step saves that step again.
    """
    first_path = folder / checkpoint_name(kind, step)
    if not first_path.exists():
        return first_path
    numbers = range(2, MAX_CHECKPOINTS_OF_STEP + 1)
    repeats = (first_path.with_stem(f"{first_path.stem}-{number}") for number in numbers)
    return next(path for path in repeats if not path.exists())


def sidecar_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".json")


def write_sidecar(checkpoint: Path, sidecar: Sidecar) -> None:
    """Make a checkpoint complete; a sidecar without a sha256 gets the file's size and sha256."""
    if not sidecar.sha256:
        size = checkpoint.stat().st_size
        sidecar = replace(sidecar, bytes=size, sha256=sha256_of(checkpoint))
    sidecar = replace(sidecar, name=checkpoint.name)
    path = sidecar_path(checkpoint)
    write_atomically(path, lambda file: json.dump(asdict(sidecar), file, indent=1))
    _mark_path(checkpoint).unlink(missing_ok=True)


def is_copy(checkpoint: Path, sidecar: Sidecar) -> bool:
    """Return whether somebody copied a checkpoint and its sidecar to this name."""
    return sidecar.name not in ("", checkpoint.name)


def read_sidecar(checkpoint: Path) -> Sidecar | None:
    """Return a checkpoint's sidecar; None if it has no readable one and is not complete."""
    try:
        return parse_sidecar(json.loads(sidecar_path(checkpoint).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


def fault_of(checkpoint: Path) -> str | None:
    """Say why a checkpoint cannot be used; None if it is whole. Reads the whole file."""
    sidecar = read_sidecar(checkpoint)
    if sidecar is None:
        return "it has no readable " + sidecar_path(checkpoint).name
    if not checkpoint.is_file() or sha256_of(checkpoint) != sidecar.sha256:
        return "its sha256 is not the one that was written"
    return None


def complete_checkpoints(folder: Path, kind: str | None = None) -> Iterator[tuple[Path, Sidecar]]:
    """Yield the complete checkpoints of a run, newest first: by step, last before best."""
    checkpoints = []
    for path in folder.glob(f"{kind or '*'}-*.ckpt"):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        sidecar = read_sidecar(path)
        if match and sidecar:
            sort_key = (sidecar.step, match["kind"], match["repeat"] or "")
            checkpoints.append((sort_key, path, sidecar))

    checkpoints.sort(key=lambda item: item[0], reverse=True)
    for _, path, sidecar in checkpoints:
        yield path, sidecar


def newest_whole(folder: Path, kind: str | None = None) -> Path | None:
    """Return the newest checkpoint whose bytes are still right; log each one that is passed over.

    Without a kind, checkpoints of weights only are skipped, because no run can resume from them.
    """
    for path, sidecar in complete_checkpoints(folder, kind):
        if kind is None and sidecar.weights_only:
            continue
        fault = fault_of(path)
        if fault is None:
            return path
        log.warning(f"Skipped {path.name}: {fault}.")
    return None


def link(source: Path, target: Path) -> None:
    """Give a complete checkpoint a second name and sidecar; without hard links it is copied.

    Raises:
        FileNotFoundError: the source is not complete, or no longer complete.
    """
    sidecar = read_sidecar(source)
    if sidecar is None:
        raise FileNotFoundError(sidecar_path(source))
    target.parent.mkdir(parents=True, exist_ok=True)
    mark_unfinished(target)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    write_sidecar(target, sidecar)
    sync_folder(target.parent)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint: its sidecar first, so that a half-removed one is never complete."""
    mark_unfinished(checkpoint)
    sidecar_path(checkpoint).unlink(missing_ok=True)
    checkpoint.unlink(missing_ok=True)
    _mark_path(checkpoint).unlink(missing_ok=True)


def mark_unfinished(checkpoint: Path) -> None:
    """Mark a checkpoint that this run writes or removes, because a kill may leave a part of it."""
    _mark_path(checkpoint).touch()


def _mark_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.unfinished")


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files and marked checkpoints that a killed process of the run left.

    A checkpoint without a sidecar and without a mark is a file of the user's, and stays.
    """
    for mark in folder.glob(".*.ckpt.unfinished"):
        checkpoint = folder / mark.name.removeprefix(".").removesuffix(".unfinished")
        if CHECKPOINT_NAME.fullmatch(checkpoint.name) and not sidecar_path(checkpoint).exists():
            checkpoint.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
    for part in folder.glob(".*.part"):
        if PART_NAME.fullmatch(part.name):
            part.unlink(missing_ok=True)
