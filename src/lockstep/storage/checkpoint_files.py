"""Which checkpoints of a folder are complete and whole; needs no torch.

Beside `last-step00000120.ckpt` (a file, or a folder of shards) lies `last-step00000120.ckpt.json`, written last:
it makes the checkpoint complete, and its sha256 tells whether the bytes are still those that were written.
`last-before-step00000120.ckpt` is what had that name, while another of the same step is being written.
"""

import hashlib
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
    """What is known of a checkpoint: the small file beside it, and what goes along with it to the bucket.

    bytes, sha256: of the file; of a folder of shards over all its files. 0 and empty where this machine holds only
        its own ranks' shards.
    files: of a folder of shards, each file by its name.
    epoch, batches_done, batches_per_epoch, phase: where in training it stands (callbacks/resume_point.py).
    metric: what a best reached, e.g. {"val/acc": 0.91}.
    weights_only: it lacks the optimizer's state.
    """

    step: int
    bytes: int = 0
    sha256: str = ""
    epoch: int = 0
    metric: dict[str, float] = field(default_factory=dict)
    files: dict[str, Checksum] | None = None
    world_size: int | None = None
    batches_done: int | None = None
    batches_per_epoch: int | None = None
    phase: str | None = None
    s3_uri: str | None = None
    weights_only: bool | None = None

    @classmethod
    def of(cls, measured: "Measured", *, step: int, **known: Any) -> "Sidecar":
        return cls(step, measured.bytes, measured.sha256, files=measured.files, **known)

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Measured:
    """A checkpoint's bytes and sha256; of a folder over its sorted files, each also on its own."""

    bytes: int
    sha256: str
    files: dict[str, Checksum] | None = None


def parse_sidecar(held: object) -> Sidecar | None:
    """None where it is no mapping, or bytes, sha256 or step are not what they must be; other nonsense is left out."""
    if not isinstance(held, Mapping):
        return None
    known = {name: held[name] for name in {one.name for one in fields(Sidecar)} & held.keys()}
    try:
        known.update(
            step=int(held["step"]),
            bytes=int(held.get("bytes") or 0),
            sha256=str(held.get("sha256") or ""),
            epoch=int(held.get("epoch") or 0),
            metric=finite(held.get("metric")),
            files=None if held.get("files") is None else parse_checksums(held["files"]),
        )
        return Sidecar(**known)
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError):
        return None


def parse_checksums(held: Mapping[str, Any]) -> dict[str, Checksum]:
    """{file name: bytes and sha256}, as sidecars and manifests have them.

    Raises:
        ValueError, OverflowError, KeyError, TypeError, AttributeError: it is nothing of the kind.
    """
    return {str(name): Checksum(int(file["bytes"]), str(file["sha256"])) for name, file in held.items()}


def finite(metric: object) -> dict[str, float]:
    """Those values that are numbers: JSON has no nan."""
    values = metric.items() if isinstance(metric, Mapping) else ()
    return {str(name): float(v) for name, v in values if is_number(v)}


def is_number(value: object) -> bool:
    """One that a float can hold, and neither nan nor infinite."""
    return isinstance(value, int | float) and -1e300 < value < 1e300


def checkpoint_name(kind: str, step: int) -> str:
    return f"{kind}-step{step:08d}.ckpt"


def sidecar_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".json")


def measure(checkpoint: Path) -> Measured:
    """Reads all of it."""
    if checkpoint.is_file():
        whole = checksum_of(checkpoint)
        return Measured(whole.bytes, whole.sha256)
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(checkpoint)): checksum_of(path) for path in paths}
    listed = {name: asdict(file) for name, file in files.items()}
    sha256 = hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()
    return Measured(sum(file.bytes for file in files.values()), sha256, files)


def write_sidecar(checkpoint: Path, sidecar: Sidecar) -> None:
    text = json.dumps(sidecar.as_json(), indent=1) + "\n"
    write_atomically(sidecar_path(checkpoint), lambda file: file.write(text))


def read_sidecar(checkpoint: Path) -> Sidecar | None:
    """What is known of a complete checkpoint; None where it is missing or torn."""
    try:
        held = read_json(sidecar_path(checkpoint))
    except (OSError, ValueError):
        return None
    return parse_sidecar(held) if isinstance(held, dict) and {"bytes", "sha256", "step"} <= held.keys() else None


def fault_of(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, in words; None where it is whole."""
    sidecar = read_sidecar(checkpoint)
    if sidecar is None:
        return "it has no readable " + sidecar_path(checkpoint).name
    if not checkpoint.exists():
        return "it is gone"
    found = measure(checkpoint)
    if found.bytes != sidecar.bytes:
        return f"it holds {found.bytes} bytes instead of {sidecar.bytes}"
    return None if found.sha256 == sidecar.sha256 else "its sha256 is not the one that was written"


def complete(folder: Path, kind: str | None = None) -> Iterator[tuple[Path, Sidecar]]:
    """Complete checkpoints of a run, newest first (by step, last before best, what was set aside after its like)."""
    found = []
    for path in folder.glob("*.ckpt") if folder.is_dir() else ():
        match, sidecar = NAME.fullmatch(path.name), read_sidecar(path)
        if match and sidecar and kind in (None, match["kind"]):
            found.append(((sidecar.step, match["kind"], not match["before"]), path, sidecar))
    for _, path, sidecar in sorted(found, key=lambda item: item[0], reverse=True):
        yield path, sidecar


def newest_whole(folder: Path, kind: str | None = None) -> Path | None:
    """The newest checkpoint whose bytes are still right; each one passed over is named.

    Without a kind it is for going on with the run, for which weights alone are not enough.
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
    """A second name for a complete checkpoint and its sidecar: hard links where the file system has them.

    On a node without rank 0 a folder of its own shards has no sidecar.
    """
    for old, new in ((source, target), (sidecar_path(source), sidecar_path(target))):
        if not old.exists():
            continue
        if old.is_dir():
            shutil.copytree(old, new, copy_function=_link_or_copy, dirs_exist_ok=True)
        else:
            new.unlink(missing_ok=True)
            _link_or_copy(old, new)
    sync_folder(target.parent)


def set_aside(checkpoint: Path) -> None:
    """A second name for what is about to be written over, until its successor is complete."""
    if checkpoint.exists():
        aside = checkpoint.with_name(checkpoint.name.replace("-step", "-before-step"))
        if aside.exists():
            remove(aside)
        link(checkpoint, aside)


def _link_or_copy(old: Any, new: Any) -> None:
    try:
        os.link(old, new)
    except OSError:
        shutil.copy2(old, new)


def remove(checkpoint: Path) -> None:
    """The sidecar first: what is half removed is no longer complete."""
    sidecar_path(checkpoint).unlink(missing_ok=True)
    if checkpoint.is_dir():
        shutil.rmtree(checkpoint, ignore_errors=True)  # another node that shares the disk may be at it too
    else:
        checkpoint.unlink(missing_ok=True)


def has_only_own_shards(checkpoint: Path) -> bool:
    """A folder of shards on a node that does not see rank 0's disk, where the sidecar lies."""
    return checkpoint.is_dir() and not sidecar_path(checkpoint).exists()


def remove_own_shards(folder: Path, kind: str, kept: Path) -> None:
    """On such a node, once `kept` is complete: what rank 0 removes on its disk."""
    for path in folder.glob(f"{kind}-*.ckpt"):
        if path != kept and NAME.fullmatch(path.name) and has_only_own_shards(path):
            remove(path)


def remove_leftovers(folder: Path) -> None:
    """What a killed process left half written: parts, and checkpoints without a sidecar."""
    for path in folder.glob(".*.part") if folder.is_dir() else ():
        path.unlink(missing_ok=True)
    for path in folder.glob("*.ckpt") if folder.is_dir() else ():
        if NAME.fullmatch(path.name) and not sidecar_path(path).exists():
            remove(path)
