"""What this project needs of a place for objects: eight methods, and one kind of error.

s3.py has them for S3. Another store is one more file and a line in bucket.py; everything else knows this file alone.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep.runs.errors import UserError

KEY = re.compile(r"[^\x00-\x1f\x7f?#\\]*")


class StoreError(Exception):
    """What went wrong with the store, in one sentence without secrets.

    kind: unreachable | busy | full | refused | expired | missing_bucket | missing | conflict | corrupt | aborted |
    local. "unreachable" and "busy" pass by themselves; "refused", "expired" (credentials) and "missing_bucket" need
    the user; "local" is this machine.
    """

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


@dataclass(frozen=True)
class StoredObject:
    """An object that is complete in the store.

    sha256: as it was given at the upload; empty where somebody else put it there.
    etag: changes with the content; what `swap` compares.
    """

    key: str
    bytes: int
    sha256: str = ""
    etag: str = ""


@dataclass(frozen=True)
class Content:
    """An object that is being read: its ETag, how many bytes will come, and the bytes in blocks."""

    etag: str
    num_bytes: int
    blocks: Iterator[bytes]


def checked_key(key: str) -> str:
    """The same key, or UserError where it could mean another place than it says."""
    parts = key.rstrip("/").split("/")
    if not KEY.fullmatch(key) or (key and any(part in ("", ".", "..") for part in parts)):
        raise UserError(f"{key!r} cannot be a key: no empty, '.' or '..' parts, no control characters, no ?, # or \\.")
    return key


def never() -> bool:
    return False


class ObjectStore(Protocol):
    """Objects by their keys. Every method raises StoreError, and may be called from several threads.

    Attributes:
        root: the address of the store; an object's address is root + key, e.g. `s3://bucket/` + `runs/x.ckpt`.
        prefix: where the keys of this project begin: empty, or ends with a slash.
        web_root: under which a browser finds the objects, where the store lets it.
    """

    @property
    def root(self) -> str: ...

    @property
    def prefix(self) -> str: ...

    @property
    def web_root(self) -> str: ...

    def put(
        self,
        key: str,
        source: Path | bytes,
        *,
        sha256: str | None = None,
        cancelled: Callable[[], bool] = never,
        content_type: str | None = None,
    ) -> StoredObject:
        """Write an object: whole, and read back by its size and checksum, or not at all.

        Args:
            source: the bytes, or a file as it is now (what is appended meanwhile is left out).
            sha256: what they must have; another one means that the file was damaged on this machine ("local").
            cancelled: asked from time to time; True ends the upload with kind "aborted".
            content_type: of what a browser shall show, e.g. `text/html`.
        """
        ...

    def get(self, key: str, start: int = 0, etag: str | None = None, size: int | None = None) -> Content:
        """An object's bytes from `start` on, at most `size` of them.

        Args:
            etag: fail with kind "conflict" where the object is another one by now.
        Raises:
            StoreError: kind "missing" where there is none; any kind while the blocks are read.
        """
        ...

    def head(self, key: str) -> StoredObject:
        """What `put` returned for it; kind "missing" where there is none."""
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object whose key begins with `prefix`, in the order of the keys."""
        ...

    def delete(self, key: str, *, only_unfinished: bool = False) -> None:
        """Remove an object; none there is no error.

        Args:
            only_unfinished: leave the objects, and remove what interrupted uploads left under the prefix `key`:
                listings do not show it, and it is billed. Only who owns the prefix may.
        """
        ...

    def swap(self, key: str, data: bytes, etag: str | None) -> None:
        """Write a small object only where it still has this ETag (None: does not exist).

        `data` must be unlike any other writer's, so that an answer lost on the way can be told from a defeat.
        Raises:
            StoreError: kind "conflict" where another writer was first.
        """
        ...

    def signed(self, key: str, seconds: float) -> str:
        """A web address that reads the object without further rights, for so long."""
        ...

    def probe(self, prefix: str) -> bool:
        """Put, read back and delete small objects under `prefix`.

        Returns:
            Whether writes are conditional: of several writers that swap at once, one wins.
        Raises:
            StoreError: the store cannot be used, and why.
        """
        ...
