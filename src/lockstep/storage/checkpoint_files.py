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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.runs.files import sync_folder, write_atomically

log = logging.getLogger(__name__)

NAME = re.compile(r"(?P<kind>best|last)(?P<before>-before)?-step(?P<step>\d{8,})\.ckpt")


def checkpoint_name(kind: str, step: int) -> str:
    return f"{kind}-step{step:08d}.ckpt"


def sidecar_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".json")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measure(checkpoint: Path) -> dict[str, Any]:
    """{bytes, sha256} of a file; of a folder, over its sorted files, each also on its own under `files`."""
    if checkpoint.is_file():
        return {"bytes": checkpoint.stat().st_size, "sha256": sha256_of(checkpoint)}
    files = {
        str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    whole = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return {"bytes": sum(f["bytes"] for f in files.values()), "sha256": whole, "files": files}


def write_sidecar(checkpoint: Path, facts: dict[str, Any]) -> None:
    """facts: bytes, sha256, epoch, step, world_size, metric, …"""
    write_atomically(sidecar_path(checkpoint), lambda file: file.write(json.dumps(facts, indent=1) + "\n"))


def read_sidecar(checkpoint: Path) -> dict[str, Any] | None:
    """The facts of a complete checkpoint; None where they are missing or torn."""
    try:
        facts = json.loads(sidecar_path(checkpoint).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and {"bytes", "sha256", "step"} <= facts.keys() else None


def fault_of(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, in words; None where it is whole."""
    facts = read_sidecar(checkpoint)
    if facts is None:
        return "it has no readable " + sidecar_path(checkpoint).name
    if not checkpoint.exists():
        return "it is gone"
    found = measure(checkpoint)
    if found["bytes"] != facts["bytes"]:
        return f"it holds {found['bytes']} bytes instead of {facts['bytes']}"
    return None if found["sha256"] == facts["sha256"] else "its sha256 is not the one that was written"


def complete(folder: Path, kind: str | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Complete checkpoints of a run, newest first (by step, last before best, what was set aside after its like)."""
    found = []
    for path in folder.glob("*.ckpt") if folder.is_dir() else ():
        match, facts = NAME.fullmatch(path.name), read_sidecar(path)
        if match and facts and kind in (None, match["kind"]):
            found.append(((facts["step"], match["kind"], not match["before"]), path, facts))
    for _, path, facts in sorted(found, key=lambda item: item[0], reverse=True):
        yield path, facts


def newest_whole(folder: Path, say: Callable[[str], None] = log.info, kind: str | None = None) -> Path | None:
    """The newest checkpoint whose bytes are still right; each one passed over is named.

    Without a kind it is for going on with the run, for which weights alone are not enough.
    """
    for path, facts in complete(folder, kind):
        if kind is None and facts.get("weights_only"):
            continue
        fault = fault_of(path)
        if fault is None:
            return path
        say(f"Passed over {path.name}: {fault}.")
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
