"""best.json and last.json of a run in its bucket: each names one complete checkpoint, and moves by a conditional put.

    <prefix>/<run_id>/best.json, last.json
    <prefix>/<run_id>/checkpoints/best-step00000123-1a2b3c4d.ckpt      never changes: step and begin of the sha256

Each start of a run writes its time into the pointers before it uploads anything (`take_over`). A put holds only if the
pointer is still the one that was read, and an older start reads that a newer one has taken over: it stops.
"""

import json
import random
import re
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.runs.foreign_files import parse_json
from lockstep.storage.checkpoint_files import finite
from lockstep.storage.errors import S3Error
from lockstep.storage.s3 import Bucket

KINDS = ("best", "last")
KEY = re.compile(r"checkpoints/[A-Za-z0-9_-][A-Za-z0-9._-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_TRIES = 20


class Superseded(S3Error):
    """A newer start of the same run has taken over; this process may upload nothing more."""

    def __init__(self) -> None:
        super().__init__("a newer start of this run has taken over in the bucket", "Superseded")


@dataclass(frozen=True)
class Pointer:
    """
    Args:
        key: of the checkpoint, relative to the run's place in the bucket.
        start: the time at which the run was started that wrote this, in seconds since 1970.
    """

    key: str
    bytes: int
    sha256: str
    step: int
    epoch: int
    metric: dict[str, float]
    run_id: str
    start: float = 0.0


def read_pointer(run: Bucket, kind: str) -> tuple[Pointer | None, str | None]:
    """Return (pointer, ETag); the pointer is None if there is none, or if it names nothing that a run could write."""
    data, etag = run.read(f"{kind}.json")
    try:
        held: dict[str, Any] = parse_json(data or b"")
        known = {name: held[name] for name in ("key", "bytes", "sha256", "step", "epoch", "metric", "run_id")}
        pointer = Pointer(**known, start=float(held.get("start", 0.0)))  # 1.0.0 had no start, and whole keys
        pointer = replace(pointer, key=pointer.key.removeprefix(run.prefix), metric=finite(pointer.metric))
        numbers = all(type(number) is int and 0 <= number < 2**63 for number in (pointer.bytes, pointer.step))
        if numbers and KEY.fullmatch(pointer.key) and SHA256.fullmatch(pointer.sha256):
            return pointer, etag
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    return None, etag


def take_over(run: Bucket, start: float) -> float:
    """Write this start into the pointers, so that no older start can move them; return the time that counts for it."""
    for kind in KINDS:
        for _ in _tries():
            pointer, etag = read_pointer(run, kind)
            if pointer is None:
                break
            start = max(start, pointer.start + 0.001)  # a machine whose clock is behind is newer all the same
            if _put(run, kind, replace(pointer, start=start), etag):
                break
    return start


def move(run: Bucket, kind: str, wanted: Pointer) -> Pointer | None:
    """Let the pointer name a complete object; return what it named before.

    Raises:
        Superseded: a newer start of the run has taken over.
    """
    for _ in _tries():
        current, etag = read_pointer(run, kind)
        if current and current.start > wanted.start:
            raise Superseded
        if current == wanted or _put(run, kind, wanted, etag):
            return current
    raise S3Error(f"{kind}.json is rewritten all the time by another process", "PreconditionFailed")


def _put(run: Bucket, kind: str, pointer: Pointer, etag: str | None) -> bool:
    """Return False if another process was faster."""
    condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
    try:
        run.write(f"{kind}.json", (json.dumps(asdict(pointer), indent=1) + "\n").encode(), **condition)
    except S3Error as error:
        if error.code not in ("PreconditionFailed", "NoSuchKey"):
            raise
        return False
    return True


def _tries() -> Any:
    for attempt in range(MAX_TRIES):
        time.sleep(random.random() * attempt / 20)
        yield attempt
