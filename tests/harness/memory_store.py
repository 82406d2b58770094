"""An ObjectStore in memory: what the logic above a store is tested with; another store is one file."""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.storage.object_store import Content, StoredObject, StoreError, never


class MemoryStore:
    """
    Attributes:
        fault: raised by every method while it is set, as where the store is away.
    """

    root, web_root = "memory://bucket/", "http://127.0.0.1/bucket/"

    def __init__(self, prefix: str = "runs/") -> None:
        self.prefix = prefix
        self.objects: dict[str, tuple[bytes, StoredObject]] = {}
        self.swept: list[str] = []
        self.fault: StoreError | None = None
        self._lock, self._tags = threading.RLock(), itertools.count(1)

    def put(
        self,
        key: str,
        source: Path | bytes,
        *,
        sha256: str | None = None,
        cancelled: Callable[[], bool] = never,
        content_type: str | None = None,
    ) -> StoredObject:
        self._check()
        if cancelled():
            raise StoreError("aborted", "the upload was stopped")
        data = source if isinstance(source, bytes) else source.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if sha256 not in (None, found):
            raise StoreError("local", f"the file for {key} was damaged on this machine")
        with self._lock:
            stored = StoredObject(key, len(data), found, f"tag-{next(self._tags)}")
            self.objects[key] = data, stored
            return stored

    def get(self, key: str, start: int = 0, etag: str | None = None, size: int | None = None) -> Content:
        data, stored = self._object(key)
        if etag not in (None, stored.etag):
            raise StoreError("conflict", "another process wrote the object in the meantime")
        found = data[start:] if size is None else data[start : start + size]
        return Content(stored.etag, len(found), iter([found]))

    def head(self, key: str) -> StoredObject:
        return self._object(key)[1]

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        self._check()
        yield from ((key, self.objects[key][1].bytes) for key in sorted(self.objects) if key.startswith(prefix))

    def delete(self, key: str, *, only_unfinished: bool = False) -> None:
        self._check()
        if only_unfinished:
            self.swept.append(key)
        else:
            self.objects.pop(key, None)

    def swap(self, key: str, data: bytes, etag: str | None) -> None:
        self._check()
        with self._lock:
            before = self.objects[key][1].etag if key in self.objects else None
            if before != etag:
                raise StoreError("conflict", "another process wrote the object in the meantime")
            self.put(key, data)

    def probe(self, prefix: str) -> bool:
        self._check()
        return True

    def damage(self, key: str, data: bytes) -> None:
        """Other bytes under the checksum of those that were put."""
        stored = self.objects[key][1]
        self.objects[key] = data, StoredObject(key, len(data), stored.sha256, stored.etag)

    def _object(self, key: str) -> tuple[bytes, StoredObject]:
        self._check()
        if key not in self.objects:
            raise StoreError("missing", "there is no such object")
        return self.objects[key]

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault
