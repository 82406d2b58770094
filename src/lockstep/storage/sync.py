"""Copy a prefix of a bucket to the disk of this node before training. Imports no torch."""

import logging
import os
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file
from lockstep.storage.errors import S3Error, translated
from lockstep.storage.s3 import Bucket, Progress

log = logging.getLogger(__name__)

THREADS, PAUSES_S = 16, (1, 2, 4, 8, None)


def sync(uri: str, cache: Path, s3: Config | None = None) -> Path:
    """Return the folder in `cache` (or the file, if `uri` names an object) with the current content of the bucket.

    Every rank may call it: the first one on a node copies, the others wait. Files whose size and ETag are still those
    of the bucket stay, also those that a killed process has copied; files that are not in the bucket are deleted.

    Raises:
        UserError: the bucket cannot be read, nothing lies there, or the disk has no room for it.
    """
    bucket, name = Bucket.of(s3 or {}, uri), ""
    try:
        wanted = {key: (size, etag) for key, size, etag in bucket.list() if not key.endswith("/")}
        if not wanted and bucket.prefix:  # it may be one object
            above, _, name = uri.rstrip("/").rpartition("/")
            bucket = Bucket.of(s3 or {}, above)
            wanted = {key: (size, etag) for key, size, etag in bucket.list(name) if key == name}
        if not wanted:
            raise UserError(f"{uri}: there is nothing under this prefix in the bucket.")
        if odd := [key for key in wanted if {"", ".", ".."} & set(key.split("/")) or "\\" in key]:
            raise UserError(f"{uri} holds the key {odd[0]!r}, which cannot be a file of a folder.")
        place = zlib.crc32(f"{bucket.endpoint_url}{bucket.address(name)}".encode())
        folder = cache.absolute() / f"{bucket.name}-{place:08x}"
        with locked_file(folder.with_name(f"{folder.name}.lock")):
            _copy(bucket, wanted, folder)
    except S3Error as error:
        raise UserError(f"{uri} cannot be read: {error}.") from None
    return folder / name


def _copy(bucket: Bucket, wanted: dict[str, tuple[int, str]], folder: Path) -> None:
    """Copy what is missing. The modification time of a whole file is a checksum of its ETag."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = set(wanted)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        key, facts = path.relative_to(folder).as_posix(), path.stat()
        size, etag = wanted.get(key, (-1, ""))
        missing.discard(key) if (facts.st_size, facts.st_mtime) == (size, zlib.crc32(etag.encode())) else path.unlink()
    left, free = sum(wanted[key][0] for key in missing), shutil.disk_usage(folder).free
    if left > free:
        raise UserError(
            f"{bucket.uri} needs {left / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free: give "
            "data.cache_dir=FOLDER on a larger disk, or mount the bucket and give data.root=/mnt/…."
        )
    if missing:
        log.info(f"Copying {bucket.uri} to {folder}: {len(missing):,} files, {left / 1e6:,.0f} MB …")
    progress = Progress(f"copying {bucket.uri}", left)
    with ThreadPoolExecutor(THREADS, "sync") as pool:  # after an error those that have not begun are cancelled
        list(pool.map(lambda key: _fetch(bucket, key, *wanted[key], folder / key, progress), sorted(missing)))


def _fetch(bucket: Bucket, key: str, size: int, etag: str, path: Path, progress: Progress) -> None:
    """Fetch one object, from where an earlier try broke off; boto3 checks the number of bytes."""
    part, time_s = path.with_name(f".{zlib.crc32(key.encode()):08x}.part"), zlib.crc32(etag.encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    for pause_s in PAUSES_S:
        try:
            with part.open("ab") as file, translated(bucket):
                if file.tell() < size:
                    answer = bucket.call("get_object", key, Range=f"bytes={file.tell()}-", IfMatch=f'"{etag}"')
                    for block in answer["Body"].iter_chunks(2**20):
                        file.write(block)
                        progress(len(block))
            break
        except S3Error as error:
            if pause_s is None or error.code in ("AccessDenied", "NoSuchKey", "PreconditionFailed"):
                raise
            time.sleep(pause_s)
    os.utime(part, (time_s, time_s))
    part.replace(path)
