"""What a bucket holds below a prefix, as files on this node's disk, shared by all its ranks.

    root = local_copy("s3://bucket/photographs", {}, Path("data/cache"), {".jpg", ".png"})  # whole

    copy = listed_copy(…)  # a file for every object, of its size; copy_beside.py fetches them while remote_reads.py
                           # reads from the bucket what has not come yet

The folder of files is named by its manifest (names, sizes, ETags): a file that lies there is the object that it lists.
Where an object has not come yet stands an empty (sparse) file of its size that nobody may read. A copy that was broken
off goes on at the next start, within a file too. Where the bucket has changed, the next start makes a new folder, which
shares what stayed the same; the old one goes once no process reads it.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lockstep.runs.errors import UserError
from lockstep.runs.files import NO_LOCKS, lock, locked, locked_file, write_atomically
from lockstep.runs.foreign_files import read_json
from lockstep.runs.full_disk import full_disk_named
from lockstep.storage.background import in_parallel
from lockstep.storage.object_store import StoreError
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_options import S3Options, options_from, parse_uri

log = logging.getLogger(__name__)

MANIFEST, FILES, PART = "manifest.json", "files", ".part"
MAX_MANIFEST_BYTES = 2**30
ALONE = (".tar", ".parquet")  # a root that ends so is this one object
TABLE = ".csv"  # of such a root the whole folder: images lie beside the table
INDEX = ".index"  # beside a shard: where its images are (tar_shards.py)
THREADS = 8
DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0, 30.0, 30.0)  # between tries that bring no new byte
SPEAK_INTERVAL_S = 30.0
GIB = 2**30
FREE_PART = 0.9  # of the disk's free space, for a copy that may stay a part: checkpoints need some
CHANGED = ("conflict", "missing")  # kinds of an object that is no more what it was
UNREADABLE = 0o200  # of what has not come: no read permission
WHEN = (0, 0)  # of every file, so that a list of images stays current when they come
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """An object: its name below the prefix, bytes, and ETag, which changes with the content."""

    name: str
    size: int
    etag: str


def local_copy(
    uri: str, s3: Mapping[str, Any], cache: Path, endings: Collection[str], limit_gib: float | None = None
) -> Path:
    """The folder, or the file, on this disk that is as what `uri` names: all of it. Raises as `complete`."""
    copy = listed_copy(uri, s3, cache, endings)
    copy.complete(limit_gib)
    return copy.root


def listed_copy(uri: str, s3: Mapping[str, Any], cache: Path, endings: Collection[str]) -> "Copy":
    """A copy that has every name and size, and the content of what tells which images there are.

    Args:
        uri: s3://bucket/prefix, or one object that ends with .tar, .parquet or .csv.
        s3: the config group (endpoint_url and so on); its uri is not used.
        cache: where copies lie.
        endings: of the objects that are wanted, in lower case; others are left where they are.
    Raises:
        UserError: it cannot be read, or holds nothing that is wanted.
    """
    bucket, key = parse_uri(uri)
    digest = hashlib.sha256(f"{s3.get('endpoint_url')} {uri}".encode()).hexdigest()
    folder = cache / f"bucket-{digest[:16]}"
    copy = Copy(uri, options_from(s3, f"s3://{bucket}"), key.rstrip("/"), folder)
    with copy.explained():
        with locked_file(folder.with_name(f"{folder.name}.lock"), required=True):
            copy.refresh(endings)
        copy.fetch_listings()
    return copy


class Copy:
    """
    Args:
        key: the prefix without its last slash, or one object.
        folder: holds the manifest and the files.
    """

    entries: list[Entry]
    files: Path

    def __init__(self, uri: str, options: S3Options, key: str, folder: Path) -> None:
        self.uri, self.options, self.key, self.folder = uri, options, key, folder
        self.store = S3Store(options)
        parent, _, self.file = key.rpartition("/") if key.endswith((*ALONE, TABLE)) else (key, "", "")
        self.prefix = f"{parent}/" if parent else ""

    @property
    def root(self) -> Path:
        return self.files / self.file

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise UserError(f"{self.uri} cannot be read: {in_words(error)}.") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise UserError(
                f"{self.folder.parent} cannot lock files: give data.cache_dir=FOLDER on a local disk that can."
            ) from None

    # Listing: the caller has the folder's lock

    def refresh(self, endings: Collection[str]) -> None:
        before = self._manifest()
        fresh = self._is_fresh()
        self.entries = before if fresh else self._listed(endings)
        self.files = self._files_of(self.entries)
        hold(self.files)
        if not fresh:
            with full_disk_named(self.folder.parent, "give data.cache_dir=FOLDER on a larger disk"):
                self._take_over(before)
                for entry in self.entries:
                    self._stand_in(entry)
            if self.entries != before:
                write_atomically(self.folder / MANIFEST, lambda file: file.write(self._text(self.entries)))
            os.utime(self.folder / MANIFEST)
        remove_unread(self.folder)

    def reopen(self) -> Path:
        """As the last start listed it."""
        self.entries = self._manifest()
        self.files = self._files_of(self.entries)
        return self.files

    def _is_fresh(self) -> bool:
        """Another rank of this node listed it after this one had begun."""
        try:
            return (self.folder / MANIFEST).stat().st_mtime > psutil.Process().create_time()
        except OSError:
            return False

    def _manifest(self) -> list[Entry]:
        try:
            return [Entry(*entry) for entry in read_json(self.folder / MANIFEST, MAX_MANIFEST_BYTES)["entries"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _listed(self, endings: Collection[str]) -> list[Entry]:
        found = retried(lambda: [*self.store.entries(self.prefix)])
        entries = [Entry(key.removeprefix(self.prefix), size, etag) for key, size, etag in found]
        entries = [each for each in entries if os.path.splitext(each.name)[1].lower() in {*endings, INDEX}]
        for each in entries:
            self._check_name(each.name)
        if self.file and not self.file.endswith(TABLE):
            entries = [each for each in entries if each.name in (self.file, self.file + INDEX)]
        if not entries or (self.file and self.file not in {each.name for each in entries}):
            raise UserError(
                f"data.root={self.uri}: of {len(found)} objects there none is what can be read here: "
                f"{', '.join(sorted(endings))}."
            )
        return entries

    def _check_name(self, name: str) -> None:
        """It becomes a path, which must stay below the folder."""
        if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise UserError(f"{self.uri}: {name!r} cannot be a file here: no empty, '.' or '..' parts.")

    def _text(self, entries: list[Entry]) -> str:
        return json.dumps({"uri": self.uri, "entries": [[each.name, each.size, each.etag] for each in entries]})

    def _files_of(self, entries: list[Entry]) -> Path:
        return self.folder / f"{FILES}-{hashlib.sha256(self._text(entries).encode()).hexdigest()[:16]}"

    def _take_over(self, before: list[Entry]) -> None:
        """What did not change, under a second name."""
        old = self._files_of(before)
        for entry in {*self.entries} & {*before} if old != self.files else ():
            for path in (self._path(entry), self._part(entry)):
                with suppress(OSError):  # it is not here, or both are
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.link(old / path.relative_to(self.files), path)

    def _stand_in(self, entry: Entry) -> None:
        """For what is not here: its name and size."""
        path = self._path(entry)
        try:
            if path.stat().st_size == entry.size:
                return
            path.unlink()
        except OSError:
            pass  # there is none
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, UNREADABLE)) as file:
                file.truncate(entry.size)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG):
                raise
            raise UserError(f"{self.uri}: {entry.name} cannot be a file here ({error.strerror}): rename it.") from None
        os.utime(path, WHEN)

    # Fetching: one process of the node at a time

    def fetch_listings(self) -> None:
        """What says which images there are: tables, indexes, and shards without one."""
        indexed = {entry.name.removesuffix(INDEX) for entry in self.entries if entry.name.endswith(INDEX)}
        telling = [e for e in self.entries if e.name.endswith((*ALONE, TABLE, INDEX)) and e.name not in indexed]
        if any(self._is_missing(entry) for entry in telling):
            with self._alone():
                self._fetch_all(telling, None)

    def complete(self, limit_gib: float | None = None) -> None:
        """Return once everything is here.

        Args:
            limit_gib: of the whole copy; None: what the disk has free.
        Raises:
            UserError: it is too large, cannot be read, or changed meanwhile.
        """
        with self.explained(), self._alone():
            self._fetch_all(self.entries, limit_gib)

    def take_what_fits(self, limit_gib: float | None) -> None:
        """`complete` for who has the lock, of as much as there is room for.

        Args:
            limit_gib: of the copy; None: most of what the disk has free.
        """
        missing = [entry for entry in self.entries if self._is_missing(entry)]
        room = shutil.disk_usage(self.folder).free * FREE_PART
        if limit_gib is not None:
            room = min(room, limit_gib * GIB - self._bytes(self.entries) + self._bytes(missing))
        chosen: list[Entry] = []
        for entry in missing:
            if entry.size <= room:
                chosen.append(entry)
                room -= entry.size
        if len(chosen) < len(missing):
            left = self._bytes(missing) - self._bytes(chosen)
            log.info(
                f"{self.uri}: {_amount(left)} of {_amount(self._bytes(self.entries))} have no room here "
                "(data.cache_gib, data.cache_dir): they are read from the bucket in each epoch."
            )
        self._fetch(chosen)

    def missing_bytes(self) -> int:
        return self._bytes([entry for entry in self.entries if self._is_missing(entry)])

    def whole_bytes(self) -> int:
        return self._bytes(self.entries)

    def etags(self) -> dict[str, str]:
        """Of each file, by its name below the folder of files."""
        return {entry.name: entry.etag for entry in self.entries}

    @property
    def lock(self) -> Path:
        """Of whoever fetches."""
        return self.files.with_name(f"{self.files.name}.fetch")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self.lock.open("a") as handle:
            if not lock(handle, 0.0, required=True):
                log.info(f"Another process copies {self.uri}: waiting for it …")
            with locked(handle, required=True):
                yield

    def _is_missing(self, entry: Entry) -> bool:
        return not is_here(self._path(entry))

    @staticmethod
    def _bytes(entries: list[Entry]) -> int:
        return sum(entry.size for entry in entries)

    def _fetch_all(self, entries: list[Entry], limit_gib: float | None) -> None:
        wanted = [entry for entry in entries if self._is_missing(entry)]
        self._check_room(entries, wanted, limit_gib)
        self._fetch(wanted)

    def _check_room(self, entries: list[Entry], wanted: list[Entry], limit_gib: float | None) -> None:
        whole, left = self._bytes(entries) / GIB, self._bytes(wanted) / GIB
        free = shutil.disk_usage(self.folder).free / GIB
        if limit_gib is not None and whole > limit_gib:
            raise UserError(
                f"{self.uri} holds {whole:.3g} GiB, more than data.cache_gib={limit_gib:g}: give more; only "
                "data.path=loader reads from the bucket what has no room."
            )
        if left > free:
            raise UserError(
                f"{self.uri} holds {whole:.3g} GiB, of which {left:.3g} are not here yet, and {self.folder.parent} has "
                f"{free:.3g} GiB free: give data.cache_dir=FOLDER on a larger disk."
            )

    def _fetch(self, wanted: list[Entry]) -> None:
        if not wanted:
            return
        log.info(f"Copying {len(wanted)} files, {_amount(self._bytes(wanted))}, of {self.uri} …")
        said = _Said(len(wanted))
        with full_disk_named(self.folder.parent, "give data.cache_dir=FOLDER on a larger disk"):
            in_parallel(self._fetch_one, ((entry, said) for entry in wanted), THREADS)

    def _fetch_one(self, entry: Entry, said: "_Said") -> None:
        part = self._part(entry)
        try:
            retried(lambda: self._append(entry, part), progress=lambda: _size(part))
        except StoreError as error:
            if error.kind not in CHANGED:
                raise
            raise UserError(f"{self.uri}: {entry.name} changed after it was listed: start again.") from None
        os.utime(part, WHEN)
        part.replace(self._path(entry))
        said.one_more()

    def _append(self, entry: Entry, part: Path) -> None:
        """What is missing of the object behind what came before."""
        with part.open("ab") as file:
            if file.tell() > entry.size:
                file.truncate(0)
            if (start := file.tell()) < entry.size:
                for block in self.store.get(self.prefix + entry.name, start, entry.etag).blocks:
                    file.write(block)
            found = file.tell()
        if found < entry.size:
            raise StoreError("unreachable", f"{entry.name} broke off at {found} of {entry.size} bytes")
        if found > entry.size:
            part.unlink()
            raise StoreError("conflict", f"{entry.name} is longer than it was listed")

    def _path(self, entry: Entry) -> Path:
        return self.files / entry.name

    def _part(self, entry: Entry) -> Path:
        path = self._path(entry)
        return path.with_name(f".{path.name}{PART}")


def is_here(path: Path | str) -> bool:
    """Whether the object has come, and no empty file stands in its place."""
    try:
        return bool(os.stat(path).st_mode & stat.S_IRUSR)
    except OSError:
        return False


def in_words(error: StoreError) -> str:
    return str(error).replace("s3.uri", "data.root")


_held: dict[Path, int] = {}  # file descriptors


def hold(files: Path) -> None:
    """Until this process ends nobody removes this folder of a copy."""
    if files not in _held:
        files.mkdir(parents=True, exist_ok=True)
        _held[files] = os.open(files.with_name(f"{files.name}.read"), os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(_held[files], fcntl.LOCK_SH)


def remove_unread(folder: Path) -> None:
    """Former copies that no process holds; the caller has the folder's lock."""
    for path in folder.glob(f"{FILES}-*.read"):
        with path.open("a") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            for left in (path.with_suffix(".fetch"), path):
                left.unlink(missing_ok=True)


def retried(call: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """call(), again while the store is out of reach; `progress` is a number that grows as bytes come.

    Raises:
        StoreError: of the last try, where some minutes brought nothing.
    """
    delays, reached = _delays(), progress()
    while True:
        try:
            return call()
        except StoreError as error:
            if error.kind not in ("unreachable", "busy"):
                raise
            if (now := progress()) > reached:
                delays, reached = _delays(), now
            if (delay := next(delays, None)) is None:
                raise
            if delay >= SPEAK_INTERVAL_S:
                log.info(f"{error}; trying again …")
            time.sleep(delay)


def _delays() -> Iterator[float]:
    return iter(DELAYS_S)


class _Said:
    """A line now and then."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.at, self.lock = total, 0, time.monotonic(), threading.Lock()

    def one_more(self) -> None:
        with self.lock:
            self.done += 1
            if time.monotonic() > self.at + SPEAK_INTERVAL_S:
                self.at = time.monotonic()
                log.info(f"{self.done} of {self.total} files are here …")


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.3g} MiB"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
