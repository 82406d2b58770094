"""Copy a prefix of a bucket to the disk of this node before training. Imports no torch."""

import contextlib
import logging
import os
import shutil
import socket
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

from lockstep.process.errors import UserError
from lockstep.process.files import locked_file
from lockstep.records.config import Config
from lockstep.storage.errors import S3Error, translate_errors
from lockstep.storage.s3 import Bucket, TransferProgress

log = logging.getLogger(__name__)

THREADS = 16
# The pause after each failed try; None after the last one.
PAUSES_S = (1, 2, 4, 8, None)
# Another node may still be fetching a part that was written within this time.
NEW_PART_S = 600
# Another try would get these answers again.
FINAL_ERRORS = ("AccessDenied", "NoSuchKey", "PreconditionFailed")
BLOCK_BYTES = 2**20


class RemoteFile(NamedTuple):
    """An object of the bucket."""

    key: str
    size: int  # bytes
    etag: str

    @property
    def mtime_s(self) -> int:
        """The modification time that marks a whole copy: a checksum of the ETag, in seconds.

        Some file systems keep times in 31 bits.
        """
        return zlib.crc32(self.etag.encode()) & 0x7FFFFFFF


def sync(uri: str, cache: Path, s3: Config | None = None) -> Path:
    """Return the folder in `cache` with the current content of the bucket.

    If `uri` names an object, return its file. Every rank may call it: the first one on a node
    copies, the others wait. Files with the size and ETag of the bucket's object stay, even if a
    killed process has copied them. All other files are deleted.

    Raises:
        UserError: the bucket cannot be read, nothing lies there, or the disk has no room for it.
    """
    try:
        bucket, name, files = _list_remote_files(uri, s3 or {})
        checksum = zlib.crc32(f"{bucket.endpoint_url}{bucket.address(name)}".encode())
        folder = cache.absolute() / f"{bucket.name}-{checksum:08x}"
        with locked_file(folder.with_name(f"{folder.name}.lock")):
            _copy_missing(bucket, files, folder)
    except S3Error as error:
        raise UserError(f"{uri} cannot be read: {error}.") from None
    return folder / name


def _list_remote_files(uri: str, s3: Config) -> tuple[Bucket, str, list[RemoteFile]]:
    """Return the bucket, the name of the one object that `uri` names or "", and the files.

    Raises:
        UserError: there is no object, or a key cannot be a path of a file.
    """
    bucket = Bucket.from_config(s3, uri)
    name = ""
    files = [file for file in starmap(RemoteFile, bucket.list()) if not file.key.endswith("/")]

    if not files and bucket.prefix:
        folder_uri, _, name = uri.rstrip("/").rpartition("/")
        bucket = Bucket.from_config(s3, folder_uri)
        files = [file for file in starmap(RemoteFile, bucket.list(name)) if file.key == name]

    if not files:
        raise UserError(f"{uri}: there is nothing under this prefix in the bucket.")
    for file in files:
        if not _is_safe(file.key):
            raise UserError(
                f"{uri} holds the key {file.key!r}, which cannot be a file of a folder."
            )
    return bucket, name, files


def _is_safe(key: str) -> bool:
    """Return whether a key is a path that stays inside a folder."""
    parts = set(key.split("/"))
    return "\\" not in key and not parts & {"", ".", ".."}


def _copy_missing(bucket: Bucket, files: list[RemoteFile], folder: Path) -> None:
    """Make `folder` equal to the bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    missing_files = _remove_outdated(files, folder)
    missing_bytes = sum(file.size for file in missing_files)
    _check_room(bucket, folder, missing_bytes)
    if missing_files:
        log.info(
            f"Copying {bucket.uri} to {folder}: "
            f"{len(missing_files):,} files, {missing_bytes / 1e6:,.0f} MB …"
        )

    progress = TransferProgress(f"copying {bucket.uri}", missing_bytes)
    # Reading the results raises the first error. Fetches that have not begun are cancelled then.
    with ThreadPoolExecutor(THREADS, "sync") as pool:
        list(
            pool.map(
                lambda file: _fetch_file(bucket, file, folder / file.key, progress), missing_files
            )
        )


def _remove_outdated(files: list[RemoteFile], folder: Path) -> list[RemoteFile]:
    """Delete files that differ from the bucket; return the missing ones, in the order of keys."""
    missing_files = {file.key: file for file in files}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        key = path.relative_to(folder).as_posix()
        if key in missing_files and _is_whole(path, missing_files[key]):
            del missing_files[key]
        elif not _is_being_written(path):
            path.unlink()
    # An empty folder would count as a class.
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        # A folder with files in it stays.
        with contextlib.suppress(OSError):
            inner.rmdir()
    return [missing_files[key] for key in sorted(missing_files)]


def _is_being_written(path: Path) -> bool:
    """Return whether another node may be fetching a file, which on some disks no lock prevents."""
    is_part = path.name.startswith(".") and path.suffix == ".part"
    is_other_nodes = not path.name.endswith(f".{socket.gethostname()}.part")
    return is_part and is_other_nodes and time.time() - path.stat().st_mtime < NEW_PART_S


def _is_whole(path: Path, file: RemoteFile) -> bool:
    status = path.stat()
    return status.st_size == file.size and status.st_mtime == file.mtime_s


def _check_room(bucket: Bucket, folder: Path, missing_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if missing_bytes > free:
        raise UserError(
            f"{bucket.uri} needs {missing_bytes / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB "
            "free: give data.cache_dir=FOLDER on a larger disk, or mount the bucket and give "
            "data.root=/mnt/…."
        )


def _fetch_file(bucket: Bucket, file: RemoteFile, path: Path, progress: TransferProgress) -> None:
    """Fetch one object, and try again after a pause if the connection breaks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{zlib.crc32(file.key.encode()):08x}.{socket.gethostname()}.part")
    for pause_s in PAUSES_S:
        try:
            _append_rest(bucket, file, part, progress)
            break
        except S3Error as error:
            if pause_s is None or error.code in FINAL_ERRORS:
                raise
            time.sleep(pause_s)
    os.utime(part, (file.mtime_s, file.mtime_s))
    part.replace(path)


def _append_rest(bucket: Bucket, file: RemoteFile, part: Path, progress: TransferProgress) -> None:
    """Append what an earlier try did not fetch; boto3 checks the number of bytes."""
    with part.open("ab") as output, translate_errors(bucket):
        num_fetched = output.tell()
        if num_fetched >= file.size:
            return
        byte_range = f"bytes={num_fetched}-"
        answer = bucket.call("get_object", file.key, Range=byte_range, IfMatch=f'"{file.etag}"')
        for block in answer["Body"].iter_chunks(BLOCK_BYTES):
            output.write(block)
            progress(len(block))
