"""Checkpoint files of a run: their names, the small file that makes each complete, and which of them are whole.

`last-step00000120.ckpt` is complete once `last-step00000120.ckpt.json` lies beside it. That file is written last, and
its sha256 tells whether the bytes are still those that were written. `last-before-step00000120.ckpt` is a second name
for a checkpoint that is about to be overwritten. Imports no torch.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.runs.files import Checksum, checksum_of, sync_folder, write_atomically
from lockstep.runs.foreign_files import read_json

log = logging.getLogger(__name__)

NAME = re.compile(r"(?P<kind>best|last)(?P<before>-before)?-step(?P<step>\d{8,})\.ckpt")


@dataclass(frozen=True)
class Sidecar:
    """The small file beside a checkpoint, which also goes to the bucket with it.

    Attributes:
        epoch, batches_done, batches_per_epoch, phase: the position in training (callbacks/resume_point.py).
        metric: what a best checkpoint reached, such as {"val/acc": 0.91}.
        weights_only: the optimizer's state is left out.
    """

    step: int
    bytes: int = 0
    sha256: str = ""
    epoch: int = 0
    metric: dict[str, float] = field(default_factory=dict)
    world_size: int | None = None
    batches_done: int | None = None
    batches_per_epoch: int | None = None
    phase: str | None = None
    s3_uri: str | None = None
    weights_only: bool | None = None

    @classmethod
    def of(cls, measured: Checksum, *, step: int, **known: Any) -> "Sidecar":
        return cls(step, measured.bytes, measured.sha256, **known)

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def parse_sidecar(held: object) -> Sidecar | None:
    """Return None unless step, bytes and sha256 are what they must be; unknown fields are ignored."""
    if not isinstance(held, Mapping):
        return None
    known = {one.name: held[one.name] for one in fields(Sidecar) if one.name in held}
    try:
        known.update(step=int(held["step"]), bytes=int(held["bytes"]), sha256=str(held["sha256"]))
        return Sidecar(**{**known, "epoch": int(held.get("epoch") or 0), "metric": finite(held.get("metric"))})
    except (ValueError, OverflowError, KeyError, TypeError):
        return None


def finite(metric: object) -> dict[str, float]:
    """The values that are numbers, because JSON has no nan."""
    values = metric.items() if isinstance(metric, Mapping) else ()
    return {str(name): float(v) for name, v in values if isinstance(v, int | float) and -1e300 < v < 1e300}


def checkpoint_name(kind: str, step: int) -> str:
    return f"{kind}-step{step:08d}.ckpt"


def sidecar_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".json")


def write_sidecar(checkpoint: Path, sidecar: Sidecar) -> None:
    text = json.dumps(sidecar.as_json(), indent=1) + "\n"
    write_atomically(sidecar_path(checkpoint), lambda file: file.write(text))


def read_sidecar(checkpoint: Path) -> Sidecar | None:
    """Return None if the checkpoint has no readable sidecar, and so is not complete."""
    try:
        return parse_sidecar(read_json(sidecar_path(checkpoint)))
    except (OSError, ValueError):
        return None


def fault_of(checkpoint: Path) -> str | None:
    """Say why a checkpoint cannot be used; None if it is whole. Reads the whole file."""
    sidecar = read_sidecar(checkpoint)
    if sidecar is None:
        return "it has no readable " + sidecar_path(checkpoint).name
    if not checkpoint.is_file():
        return "it is gone"
    found = checksum_of(checkpoint)
    if found.bytes != sidecar.bytes:
        return f"it holds {found.bytes} bytes instead of {sidecar.bytes}"
    return None if found.sha256 == sidecar.sha256 else "its sha256 is not the one that was written"


def complete(folder: Path, kind: str | None = None) -> Iterator[tuple[Path, Sidecar]]:
    """The complete checkpoints of a run, newest first: by step, last before best, second names after the first."""
    found = []
    for path in folder.glob("*.ckpt") if folder.is_dir() else ():
        match, sidecar = NAME.fullmatch(path.name), read_sidecar(path)
        if match and sidecar and kind in (None, match["kind"]):
            found.append(((sidecar.step, match["kind"], not match["before"]), path, sidecar))
    for _, path, sidecar in sorted(found, key=lambda item: item[0], reverse=True):
        yield path, sidecar


def newest_whole(folder: Path, kind: str | None = None) -> Path | None:
    """Return the newest checkpoint whose bytes are still right, and log each one that is passed over.

    Args:
        kind: best or last; None: any that a run can resume from, for which weights alone are not enough.
    """
    for path, sidecar in complete(folder, kind):
        if kind is None and sidecar.weights_only:
            continue
        fault = fault_of(path)
        if fault is None:
            return path
        log.info(f"Passed over {path.name}: {fault}.")
    return None


def link(source: Path, target: Path) -> None:
    """Give a complete checkpoint and its sidecar a second name; where the file system has no hard links, copy them."""
    for old, new in ((source, target), (sidecar_path(source), sidecar_path(target))):
        new.unlink(missing_ok=True)
        try:
            os.link(old, new)
        except OSError:
            shutil.copyfile(old, new)
    sync_folder(target.parent)


def set_aside(checkpoint: Path) -> None:
    """Keep a second name for a checkpoint that is about to be overwritten, until its successor is complete."""
    if sidecar_path(checkpoint).exists():
        link(checkpoint, checkpoint.with_name(checkpoint.name.replace("-step", "-before-step")))


def remove(checkpoint: Path) -> None:
    """Remove the sidecar first, because what is half removed is no longer complete."""
    sidecar_path(checkpoint).unlink(missing_ok=True)
    checkpoint.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left: half-written files, and checkpoints without a sidecar."""
    for path in folder.glob(".*.part") if folder.is_dir() else ():
        path.unlink(missing_ok=True)
    for path in folder.glob("*.ckpt") if folder.is_dir() else ():
        if NAME.fullmatch(path.name) and path.is_file() and not sidecar_path(path).exists():
            remove(path)
