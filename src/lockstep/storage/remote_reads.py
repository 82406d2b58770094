"""Parts of a bucket's objects, read while the copy of them (local_copy.py) is not here yet or has no room."""

import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from lockstep.runs.errors import UserError
from lockstep.storage.local_copy import CHANGED, THREADS, Copy, in_words, is_here, retried
from lockstep.storage.object_store import StoreError
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_options import S3Options

AHEAD = 4 * THREADS  # parts that a process holds in its memory
REMEMBERED = 10_000  # files that have come: of shards all
Part = tuple[str, int, int, str]
"""Path in the copy, first byte, bytes, and ETag."""


@dataclass(frozen=True)
class RemoteReads:
    """Can be pickled, and used by several processes: each makes a client and threads of its own."""

    uri: str
    options: S3Options
    prefix: str
    files: Path

    @classmethod
    def of(cls, copy: Copy) -> "RemoteReads":
        return cls(copy.uri, copy.options, copy.prefix, copy.files.absolute())

    def ahead(self, parts: Iterable[Part]) -> None:
        """Ask for these before `read` does, some at a time; what was asked for and not read is dropped."""
        _reader(self, os.getpid()).ask(parts)

    def lacks(self, path: str) -> bool:
        """Whether a file has not come to this disk yet."""
        return _reader(self, os.getpid()).lacks(path)

    def rest(self) -> None:
        """End this process's threads, which must not be there when it forks; they come back when they are needed."""
        _reader(self, os.getpid()).end()
        _reader.cache_clear()

    def read(self, part: Part) -> bytes:
        """
        Raises:
            UserError: the object has changed.
            ConnectionError: the bucket cannot be read.
        """
        reader = _reader(self, os.getpid())
        coming = reader.asked_for(part)
        try:
            return reader.bytes_of(part) if coming is None else coming.result()
        except StoreError as error:
            if error.kind in CHANGED:
                raise UserError(f"{self.uri}: {reader.name(part)} changed after it was listed: start again.") from None
            raise ConnectionError(f"{self.uri} cannot be read: {in_words(error)}.") from None


class _Reader:
    """What a process keeps. Its threads are daemons: a request that hangs keeps no process from ending."""

    def __init__(self, reads: RemoteReads) -> None:
        self.reads, self.store = reads, S3Store(reads.options)
        self._here: set[str] = set()
        self._next: deque[Part] = deque()
        self._coming: dict[Part, Future[bytes]] = {}
        self._asked: queue.SimpleQueue[tuple[Part, Future[bytes]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()

    def name(self, part: Part) -> str:
        return os.path.relpath(part[0], self.reads.files)

    def lacks(self, path: str) -> bool:
        if path in self._here:
            return False
        if is_here(path):
            if len(self._here) < REMEMBERED:
                self._here.add(path)
            return False
        return True

    def ask(self, parts: Iterable[Part]) -> None:
        self._next, self._coming = deque(parts), {}
        for _ in range(AHEAD):
            self._ask_next()

    def asked_for(self, part: Part) -> Future[bytes] | None:
        self._ask_next()
        return self._coming.pop(part, None)

    def _ask_next(self) -> None:
        if self._next:
            part = self._next.popleft()
            self._coming[part] = future = Future[bytes]()
            self._asked.put((part, future))

    def bytes_of(self, part: Part) -> bytes:
        _, start, size, etag = part
        return retried(lambda: self._once(self.reads.prefix + self.name(part), start, size, etag)) if size else b""

    def _once(self, key: str, start: int, size: int, etag: str) -> bytes:
        found = b"".join(self.store.get(key, start, etag, size).blocks)
        if len(found) != size:
            raise StoreError("unreachable", f"{key} broke off at {len(found)} of {size} bytes")
        return found

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            part, future = asked
            try:
                future.set_result(self.bytes_of(part))
            except BaseException as error:
                future.set_exception(error)


@functools.lru_cache(maxsize=4)
def _reader(reads: RemoteReads, pid: int) -> _Reader:
    """A forked process has none of its parent's threads."""
    return _Reader(reads)
