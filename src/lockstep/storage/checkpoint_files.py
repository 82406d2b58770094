"""Checkpoint files of a run: their names, the small file that makes each complete, and which of them are whole.

`last-step00000120.ckpt` is complete once `last-step00000120.ckpt.json` lies beside it. That file is written last, and
its sha256 tells whether the bytes are still those that were written. No checkpoint is overwritten: one of a step that
was saved before is `last-step00000120-2.ckpt`. Imports no torch.
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

from lockstep.runs.files import sha256_of, sync_folder, write_atomically

log = logging.getLogger(__name__)

NAME = re.compile(r"(?P<kind>best|last)-step\d{8,}(-(?P<again>\d))?\.ckpt")
PART = re.compile(r"\.(best|last)-step\d{8,}(-\d)?\.ckpt(\.json)?(\.\w+)?\.part")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Sidecar:
    """The small file beside a checkpoint."""

    step: int
    bytes: int = 0
    sha256: str = ""
    epoch: int = 0
    metric: dict[str, float] = field(default_factory=dict)  # what a best checkpoint reached
    weights_only: bool = False  # the optimizer's state is left out
    name: str = ""  # the file that it was written beside; empty in version 2.0.0


def parse_sidecar(held: Any) -> Sidecar | None:
    """Return None unless every field is what it must be; unknown fields are ignored."""
    blank = vars(Sidecar(0))
    items = held.items() if isinstance(held, dict) else ()
    known = {name: value for name, value in items if name in blank and value is not None}
    if not {"step", "bytes", "sha256"} <= known.keys() or not SHA256.fullmatch(str(known["sha256"])):
        return None
    typed = all(type(value) is type(blank[name]) for name, value in known.items())
    if not typed or not all(0 <= known.get(name, 0) < 2**63 for name in ("step", "bytes", "epoch")):
        return None
    sidecar = Sidecar(**known)
    return sidecar if all(isinstance(value, int | float) for value in sidecar.metric.values()) else None


def checkpoint_name(kind: str, step: int) -> str:
    return f"{kind}-step{step:08d}.ckpt"


def new_path(folder: Path, kind: str, step: int) -> Path:
    """Return a path that no checkpoint has: a run that stopped in the validation of a step saves that step again."""
    path = folder / checkpoint_name(kind, step)
    again = (path.with_stem(f"{path.stem}-{number}") for number in range(2, 10))
    return next(each for each in (path, *again) if not each.exists())


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
    """Return None if the checkpoint has no readable sidecar, and so is not complete."""
    try:
        return parse_sidecar(json.loads(sidecar_path(checkpoint).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


def fault_of(checkpoint: Path) -> str | None:
    """Say why a checkpoint cannot be used; None if it is whole. Reads the whole file."""
    if (sidecar := read_sidecar(checkpoint)) is None:
        return "it has no readable " + sidecar_path(checkpoint).name
    same = checkpoint.is_file() and sha256_of(checkpoint) == sidecar.sha256
    return None if same else "its sha256 is not the one that was written"


def complete(folder: Path, kind: str | None = None) -> Iterator[tuple[Path, Sidecar]]:
    """Yield the complete checkpoints of a run, newest first: by step, last before best."""
    found = []
    for path in folder.glob(f"{kind or '*'}-*.ckpt"):
        match, sidecar = NAME.fullmatch(path.name), read_sidecar(path)
        if match and sidecar:
            found.append(((sidecar.step, match["kind"], match["again"] or ""), path, sidecar))
    yield from ((path, sidecar) for _, path, sidecar in sorted(found, key=lambda item: item[0], reverse=True))


def newest_whole(folder: Path, kind: str | None = None) -> Path | None:
    """Return the newest checkpoint whose bytes are still right, and log each one that is passed over.

    Without a kind it is one that a run can resume from, for which weights alone are not enough.
    """
    for path, sidecar in complete(folder, kind):
        if kind is None and sidecar.weights_only:
            continue
        if (fault := fault_of(path)) is None:
            return path
        log.info(f"Skipped {path.name}: {fault}.")
    return None


def link(source: Path, target: Path) -> None:
    """Give a complete checkpoint a second name and sidecar; without hard links it is copied.

    Raises:
        FileNotFoundError: the source is not complete, or no longer.
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
    """Remove the sidecar first, so that a partly removed checkpoint does not count as complete."""
    mark_unfinished(checkpoint)
    sidecar_path(checkpoint).unlink(missing_ok=True)
    checkpoint.unlink(missing_ok=True)
    _mark_path(checkpoint).unlink(missing_ok=True)


def mark_unfinished(checkpoint: Path) -> None:
    """Note that this run is writing or removing a checkpoint, of which a kill may leave a part."""
    _mark_path(checkpoint).touch()


def _mark_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.unfinished")


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process of the run left: half-written files, and marked checkpoints.

    A checkpoint without a sidecar and without a mark is a file of the user's, and stays.
    """
    for mark in folder.glob(".*.ckpt.unfinished"):
        checkpoint = folder / mark.name.removeprefix(".").removesuffix(".unfinished")
        if NAME.fullmatch(checkpoint.name) and not sidecar_path(checkpoint).exists():
            checkpoint.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
    for part in folder.glob(".*.part"):
        if PART.fullmatch(part.name):
            part.unlink(missing_ok=True)
