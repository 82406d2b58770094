"""One run's place in a bucket: `<prefix>/<run_id>/`, its pointers best.json and last.json, and who may move them.

    <prefix>/<run_id>/generation.json                                 counts the starts of the run
    <prefix>/<run_id>/best.json, last.json                            name one complete, verified checkpoint each
    <prefix>/<run_id>/checkpoints/best-step00000123-g0002-1a2b3c4d.ckpt     immutable: step, generation, sha256
    <prefix>/<run_id>/checkpoints/best-step00000123-g0002/manifest.json     of a sharded checkpoint, written last

Each start of a run takes the next generation. A pointer is moved by compare-and-swap and never by an older
generation, so a process that comes back from the dead changes nothing. A process deletes only objects of its own
and older generations, and only once the pointer is its own.
"""

import json
import math
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.runs.files import utc_now
from lockstep.runs.folder import checked_run_id
from lockstep.storage.bucket import Bucket
from lockstep.storage.s3 import StoreError, checked_key

KINDS = ("best", "last")
MANIFEST = "manifest.json"
MAX_TRIES = 20
OBJECT_NAME = re.compile(r"(best|last)-step(\d+)-g(\d+)(-[0-9a-f]{8})?(\.[A-Za-z0-9]+)?(/.*)?")
SHA256 = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=@+-]{0,199}")


class Superseded(StoreError):
    """A newer start of the same run has taken over; this process may upload nothing more."""

    def __init__(self, generation: int) -> None:
        super().__init__("superseded", f"a newer start of this run (number {generation}) has taken over in the bucket")


@dataclass(frozen=True)
class Pointer:
    """What best.json or last.json says; `key` is the checkpoint file, or a sharded one's manifest."""

    key: str
    bytes: int
    sha256: str
    epoch: int
    step: int
    metric: dict[str, float]
    run_id: str
    generation: int
    previous: dict[str, Any] | None = None

    @property
    def folder(self) -> str | None:
        """Of a sharded checkpoint: the key up to its manifest."""
        return self.key.removesuffix(MANIFEST) if self.key.endswith("/" + MANIFEST) else None

    def owns(self, key: str) -> bool:
        return key == self.key or (self.folder is not None and key.startswith(self.folder))


def run_root(prefix: str, run_id: str) -> str:
    """`<prefix>/<run_id>/`; a run id cannot leave the prefix."""
    prefix = checked_key(prefix).strip("/")
    return f"{prefix}/{checked_run_id(run_id)}/" if prefix else f"{checked_run_id(run_id)}/"


def parse_pointer(data: bytes, root: str) -> Pointer:
    """
    Raises:
        StoreError: kind "corrupt": no JSON of the right form, or it names something outside the run's checkpoints.
    """
    try:
        fields = json.loads(data)
        previous = fields.get("previous")
        pointer = Pointer(
            key=str(fields["key"]),
            bytes=int(fields["bytes"]),
            sha256=str(fields["sha256"]),
            epoch=int(fields["epoch"]),
            step=int(fields["step"]),
            metric=_finite(fields["metric"]),
            run_id=str(fields["run_id"]),
            generation=int(fields["generation"]),
            previous=previous if isinstance(previous, dict) else None,
        )
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        raise StoreError("corrupt", f"a pointer under {root} is not readable") from None
    name = pointer.key.removeprefix(f"{root}checkpoints/")
    inside = pointer.key == f"{root}checkpoints/{name}" and OBJECT_NAME.fullmatch(name) and ".." not in name
    if not inside or not SHA256.fullmatch(pointer.sha256) or pointer.bytes < 0:
        raise StoreError("corrupt", f"a pointer under {root} names nothing that this run could have written")
    return pointer


class RunBucket:
    """
    Args:
        start_id: names this start of the run, the same on all its ranks; rank 0 claims a generation for it.
    Attributes:
        generation: of this start; 0 until `prepare` or `join`.
    """

    def __init__(self, bucket: Bucket, prefix: str, run_id: str, start_id: str | None = None) -> None:
        self.bucket, self.run_id, self.generation, self.prepared = bucket, run_id, 0, False
        self.start_id = start_id or secrets.token_hex(8)
        self.root = run_root(prefix, run_id)

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket.options.bucket}/{self.root.rstrip('/')}"

    def prepare(self) -> None:
        """Become the newest start of this run: next generation, leftovers swept, pointers taken over. Repeatable."""
        if not self.generation:
            self._claim()
        if not self.prepared:
            try:
                self.bucket.abort_unfinished(self.root)
            except StoreError as error:
                if error.kind != "refused":  # a role that may not list them: a lifecycle rule of the bucket sweeps them
                    raise
            for kind in KINDS:
                self._take_over(kind)
            self.prepared = True

    def _claim(self) -> None:
        key = f"{self.root}generation.json"
        for attempt in _tries(key):
            data, etag = self.bucket.read_small(key)
            mine = _generation_in(data) + 1
            claim = {"generation": mine, "start_id": self.start_id, "claimed_at": utc_now(), "write_id": attempt}
            try:
                self.bucket.swap(key, _json(claim), etag)
                self.generation = mine
                return
            except StoreError as error:
                if error.kind != "conflict":
                    raise

    def join(self) -> bool:
        """On another rank: take the generation that rank 0 claimed for this start; False: it has not yet."""
        data, _ = self.bucket.read_small(f"{self.root}generation.json")
        if not self.prepared and data is not None and json.loads(data).get("start_id") == self.start_id:
            self.generation, self.prepared = _generation_in(data), True
        return self.prepared

    def newest_generation(self) -> int:
        return _generation_in(self.bucket.read_small(f"{self.root}generation.json")[0])

    def read_pointer(self, kind: str) -> tuple[Pointer | None, str | None]:
        """(what it says, ETag); (None, ETag) where somebody wrote nonsense over it."""
        data, etag = self.bucket.read_small(f"{self.root}{kind}.json")
        if data is None:
            return None, None
        try:
            return parse_pointer(data, self.root), etag
        except StoreError:
            return None, etag

    def pointers(self, kind: str) -> list[Pointer]:
        """What the pointer names, then its predecessor: where the first is damaged, the second serves."""
        pointer, _ = self.read_pointer(kind)
        found = [pointer] if pointer else []
        if pointer and pointer.previous:
            try:
                found.append(parse_pointer(_json(pointer.previous), self.root))
            except StoreError:
                return found
        return found

    def _take_over(self, kind: str) -> None:
        """Put our generation into an existing pointer, so that no older process can move it any more."""
        for attempt in _tries(f"{self.root}{kind}.json"):
            pointer, etag = self.read_pointer(kind)
            if pointer is None:
                return
            if pointer.generation >= self.generation:
                self.check_current(pointer)
                break
            try:
                self._write(kind, {**asdict(pointer), "generation": self.generation}, attempt, etag)
                break
            except StoreError as error:
                if error.kind != "conflict":
                    raise
        self.prune(kind)

    def move(self, kind: str, entry: dict[str, Any], only_forward: bool = False) -> Pointer:
        """Let the pointer name `entry` (key, bytes, sha256, epoch, step, metric), which must be complete.

        Args:
            only_forward: leave it where it names a later or equal step already.
        Raises:
            Superseded: a newer start of the run exists.
        """
        for attempt in _tries(f"{self.root}{kind}.json"):
            current, etag = self.read_pointer(kind)
            self.check_current(current)
            if current and (current.key == entry["key"] or (only_forward and current.step >= entry["step"])):
                return current
            previous = {**asdict(current), "previous": None} if current else None
            fields = {**entry, "metric": _finite(entry["metric"]), "previous": previous}
            fields.update(run_id=self.run_id, generation=self.generation)
            try:
                moved = self._write(kind, fields, attempt, etag)
            except StoreError as error:
                if error.kind != "conflict":
                    raise
                continue
            self.prune(kind)
            return moved
        raise StoreError("conflict", f"{kind}.json is being rewritten all the time by another process")

    def check_current(self, pointer: Pointer | None = None) -> None:
        """Raises Superseded where a newer start of the run exists."""
        newest = max(self.newest_generation(), pointer.generation if pointer else 0)
        if newest > self.generation:
            raise Superseded(newest)

    def _write(self, kind: str, fields: dict[str, Any], write_id: str, etag: str | None) -> Pointer:
        data = _json({**fields, "written_at": utc_now(), "write_id": write_id})
        pointer = parse_pointer(data, self.root)
        self.bucket.swap(f"{self.root}{kind}.json", data, etag)
        return pointer

    def prune(self, kind: str) -> list[str]:
        """Delete this kind's objects but the named one and its predecessor; returns what was deleted."""
        kept = self.pointers(kind)
        if not kept or kept[0].generation != self.generation:
            return []
        gone = []
        for key, _ in list(self.bucket.keys(f"{self.root}checkpoints/{kind}-")):
            match = OBJECT_NAME.fullmatch(key.removeprefix(f"{self.root}checkpoints/"))
            if match and not any(pointer.owns(key) for pointer in kept) and self._is_older(match, kept[0]):
                self.bucket.delete(key)
                gone.append(key)
        return gone

    def _is_older(self, match: re.Match, pointer: Pointer) -> bool:
        """Of an older start, or of ours and not a later step, which another rank may be uploading now."""
        step, generation = int(match[2]), int(match[3])
        return generation < self.generation or (generation == self.generation and step <= pointer.step)

    def checkpoint_key(self, kind: str, step: int, sha256: str, suffix: str = ".ckpt") -> str:
        return f"{self.root}checkpoints/{kind}-step{step:08d}-g{self.generation:04d}-{sha256[:8]}{suffix}"

    def checkpoint_folder(self, kind: str, step: int) -> str:
        """Of a sharded checkpoint; no rank knows the hash of the whole beforehand."""
        return f"{self.root}checkpoints/{kind}-step{step:08d}-g{self.generation:04d}/"

    def file_key(self, relative: str) -> str:
        """Of another file of the run folder, e.g. tensorboard/events.out.tfevents.1."""
        for part in relative.split("/"):
            if not FILE_NAME.fullmatch(part):
                raise StoreError("local", f"a file name of the run folder cannot be a key: {relative!r}")
        return self.root + relative


def _tries(key: str) -> Iterator[str]:
    """A write id for each try, with a growing random pause between two."""
    for attempt in range(MAX_TRIES):
        if attempt:
            time.sleep(secrets.randbelow(50 * attempt) / 1000)
        yield secrets.token_hex(8)
    raise StoreError("conflict", f"{key.rpartition('/')[2]} is being rewritten all the time by another process")


def _generation_in(data: bytes | None) -> int:
    if data is None:
        return 0
    try:
        return max(0, int(json.loads(data)["generation"]))
    except (ValueError, OverflowError, KeyError, TypeError, RecursionError):
        raise StoreError("corrupt", "generation.json of this run is not readable: delete it to go on") from None


def _finite(metric: Any) -> dict[str, float]:
    """{"val/acc": 0.91}: JSON has no nan."""
    values = {str(name): float(value) for name, value in dict(metric or {}).items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _json(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode()
