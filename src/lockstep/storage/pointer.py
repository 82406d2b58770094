"""What best.json and last.json of a run say: one complete checkpoint in the bucket, and the one before it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.runs.foreign_files import parse_json
from lockstep.storage.checkpoint_files import finite
from lockstep.storage.object_store import StoreError

MANIFEST = "manifest.json"
OBJECT_NAME = re.compile(r"(best|last)-step(\d+)-g(\d+)(-[0-9a-f]{8})?(\.[A-Za-z0-9]+)?(/.*)?")
SHA256 = re.compile(r"[0-9a-f]{64}")
NOT_READABLE = (ValueError, OverflowError, KeyError, TypeError, AttributeError)  # of foreign JSON


@dataclass(frozen=True)
class Pointer:
    """What best.json or last.json says; `key` is the checkpoint file, or a sharded one's manifest.

    previous: what it named before, whose own `previous` is None.
    """

    key: str
    bytes: int
    sha256: str
    epoch: int
    step: int
    metric: dict[str, float]
    run_id: str
    generation: int
    previous: "Pointer | None" = None

    @property
    def folder(self) -> str | None:
        """Of a sharded checkpoint: the key up to its manifest."""
        return self.key.removesuffix(MANIFEST) if self.key.endswith("/" + MANIFEST) else None

    def owns(self, key: str) -> bool:
        return key == self.key or (self.folder is not None and key.startswith(self.folder))


def parse_pointer(data: bytes, root: str) -> Pointer:
    """
    Raises:
        StoreError: kind "corrupt": no JSON of the right form, or it names something outside the run's checkpoints.
    """
    try:
        held = parse_json(data)
        pointer = _pointer_from(held)
        previous = held.get("previous")
    except NOT_READABLE:
        raise StoreError("corrupt", f"a pointer under {root} is not readable") from None
    if not _is_of_run(pointer, root):
        raise StoreError("corrupt", f"a pointer under {root} names nothing that this run could have written")
    return replace(pointer, previous=_previous_from(previous, root))


def _pointer_from(held: Mapping[str, Any]) -> Pointer:
    return Pointer(
        key=str(held["key"]),
        bytes=int(held["bytes"]),
        sha256=str(held["sha256"]),
        epoch=int(held["epoch"]),
        step=int(held["step"]),
        metric=finite(dict(held["metric"] or {})),
        run_id=str(held["run_id"]),
        generation=int(held["generation"]),
    )


def _previous_from(held: object, root: str) -> Pointer | None:
    """None where it says nothing that this run could have written: the pointer itself is good without it."""
    try:
        pointer = _pointer_from(held)  # type: ignore[arg-type]
    except NOT_READABLE:
        return None
    return pointer if _is_of_run(pointer, root) else None


def _is_of_run(pointer: Pointer, root: str) -> bool:
    name = pointer.key.removeprefix(f"{root}checkpoints/")
    inside = pointer.key == f"{root}checkpoints/{name}" and OBJECT_NAME.fullmatch(name) and ".." not in name
    return bool(inside and SHA256.fullmatch(pointer.sha256) and pointer.bytes >= 0)
