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
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from lockstep.runs.files import utc_now
from lockstep.runs.folder import checked_run_id
from lockstep.runs.foreign_files import parse_json
from lockstep.storage.bucket import read_small
from lockstep.storage.checkpoint_files import finite
from lockstep.storage.object_store import ObjectStore, StoredObject, StoreError, checked_key
from lockstep.storage.pointer import NOT_READABLE, OBJECT_NAME, Pointer, parse_pointer

KINDS = ("best", "last")
MAX_TRIES = 20
LARGEST_GENERATION = 10**9
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=@+-]{0,199}")


class Superseded(StoreError):
    """A newer start of the same run has taken over; this process may upload nothing more."""

    def __init__(self, generation: int) -> None:
        super().__init__("superseded", f"a newer start of this run (number {generation}) has taken over in the bucket")


def run_root(prefix: str, run_id: str) -> str:
    """`<prefix>/<run_id>/`; a run id cannot leave the prefix."""
    prefix = checked_key(prefix).strip("/")
    return f"{prefix}/{checked_run_id(run_id)}/" if prefix else f"{checked_run_id(run_id)}/"


class RunBucket:
    """
    Args:
        start_id: names this start of the run, the same on all its ranks; rank 0 claims a generation for it.
    Attributes:
        root: what the keys of the run begin with, `<prefix>/<run_id>/`.
        generation: of this start; 0 until `prepare` or `join`.
    """

    def __init__(self, store: ObjectStore, run_id: str, start_id: str | None = None) -> None:
        self.store, self.run_id, self.generation, self.prepared = store, run_id, 0, False
        self.start_id = start_id or secrets.token_hex(8)
        self.root = run_root(store.prefix, run_id)

    @property
    def uri(self) -> str:
        return f"{self.store.root}{self.root.rstrip('/')}"

    def prepare(self) -> None:
        """Become the newest start of this run: next generation, leftovers swept, pointers taken over. Repeatable.

        Raises:
            Superseded: the generation that an earlier process claimed is no longer the newest.
        """
        if not self.generation:
            self._claim()
        if not self.prepared:
            self.check_current()
            self.store.delete(self.root, only_unfinished=True)
            for kind in KINDS:
                self._take_over(kind)
            self.prepared = True

    def _claim(self) -> None:
        key = f"{self.root}generation.json"
        for attempt in _tries(key):
            data, etag = read_small(self.store, key)
            mine = _generation_in(data) + 1
            claim = {"generation": mine, "start_id": self.start_id, "claimed_at": utc_now(), "write_id": attempt}
            try:
                self.store.swap(key, _json(claim), etag)
                self.generation = mine
                return
            except StoreError as error:
                if error.kind != "conflict":
                    raise

    def join(self) -> bool:
        """On another rank: take the generation that rank 0 claimed for this start; False: it has not yet."""
        data, _ = read_small(self.store, f"{self.root}generation.json")
        generation = _generation_in(data)
        if not self.prepared and data is not None and parse_json(data).get("start_id") == self.start_id:
            self.generation, self.prepared = generation, True
        return self.prepared

    def newest_generation(self) -> int:
        return _generation_in(read_small(self.store, f"{self.root}generation.json")[0])

    def read_pointer(self, kind: str) -> tuple[Pointer | None, str | None]:
        """(what it says, ETag); (None, ETag) where somebody wrote nonsense over it."""
        data, etag = read_small(self.store, f"{self.root}{kind}.json")
        if data is None:
            return None, None
        try:
            return parse_pointer(data, self.root), etag
        except StoreError:
            return None, etag

    def pointers(self, kind: str) -> list[Pointer]:
        """What the pointer names, then its predecessor: where the first is damaged, the second serves."""
        pointer, _ = self.read_pointer(kind)
        return [found for found in (pointer, pointer and pointer.previous) if found]

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
                self._write(kind, replace(pointer, generation=self.generation), attempt, etag)
                break
            except StoreError as error:
                if error.kind != "conflict":
                    raise
        self.prune(kind)

    def move(
        self,
        kind: str,
        stored: StoredObject,
        *,
        step: int,
        epoch: int = 0,
        metric: Mapping[str, float] | None = None,
        only_forward: bool = False,
    ) -> Pointer:
        """Let the pointer name what was stored, which must be complete.

        Args:
            only_forward: leave it where it names a later or equal step already.
        Raises:
            Superseded: a newer start of the run exists.
        """
        wanted = Pointer(
            stored.key, stored.bytes, stored.sha256, epoch, step, finite(metric), self.run_id, self.generation
        )
        for attempt in _tries(f"{self.root}{kind}.json"):
            current, etag = self.read_pointer(kind)
            self.check_current(current)
            if current and (current.key == wanted.key or (only_forward and current.step >= step)):
                return current
            moved = replace(wanted, previous=replace(current, previous=None) if current else None)
            try:
                self._write(kind, moved, attempt, etag)
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

    def _write(self, kind: str, pointer: Pointer, write_id: str, etag: str | None) -> None:
        data = _json({**asdict(pointer), "written_at": utc_now(), "write_id": write_id})
        self.store.swap(f"{self.root}{kind}.json", data, etag)

    def prune(self, kind: str) -> list[str]:
        """Delete this kind's objects but the named one and its predecessor; returns what was deleted."""
        kept = self.pointers(kind)
        if not kept or kept[0].generation != self.generation:
            return []
        gone = []
        for key, _ in list(self.store.list(f"{self.root}checkpoints/{kind}-")):
            match = OBJECT_NAME.fullmatch(key.removeprefix(f"{self.root}checkpoints/"))
            if match and not any(pointer.owns(key) for pointer in kept) and self._is_older(match, kept[0]):
                self.store.delete(key)
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
        generation = int(parse_json(data)["generation"])
        if not 0 <= generation < LARGEST_GENERATION:
            raise ValueError(generation)
        return generation
    except NOT_READABLE:
        raise StoreError("corrupt", "generation.json of this run is not readable: delete it to go on") from None


def _json(held: Mapping[str, object]) -> bytes:
    return (json.dumps(held, indent=1, allow_nan=False) + "\n").encode()
