"""A checkpoint by its path or its s3:// address: fetched, verified by sha256, cached; and a whole run from a bucket."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.runs.errors import UserError
from lockstep.runs.files import locked, sync_folder
from lockstep.runs.folder import RUN_ID_PATTERN, RunFolder, find_run
from lockstep.storage.bucket import Bucket
from lockstep.storage.checkpoint_files import (
    checkpoint_name,
    complete,
    fault_of,
    measure,
    newest_whole,
    read_sidecar,
    sha256_of,
    write_sidecar,
)
from lockstep.storage.run_bucket import KINDS, MANIFEST, SHA256, Pointer, RunBucket, parse_pointer
from lockstep.storage.s3 import S3Options, StoreError, options_from, parse_uri
from lockstep.storage.shards import read_manifest, shards_of
from lockstep.storage.small_files import restore_small_files

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
FALLBACK = re.compile(r"[^A-Za-z0-9._-]")


def is_s3(address: str | Path) -> bool:
    return str(address).startswith("s3:")


def resolve_checkpoint(address: str | Path, s3: Mapping[str, Any] | None, cache: Path) -> Path:
    """A local path of the checkpoint: the path as it is, or what the s3:// address names, fetched into `cache`.

    Args:
        address: a path; an object `s3://…/x.ckpt`; a sharded checkpoint's manifest.json; or a run's prefix
            `s3://bucket/prefix/run_id`, of which best.json says which object it is.
        s3: the config group (endpoint_url and so on); its uri is not used.
    Raises:
        UserError: it is not there, cannot be reached, or is not what was uploaded.
    """
    if not is_s3(address):
        return Path(address)
    name, key = parse_uri(str(address))
    bucket = Bucket(options_from(s3 or {}, uri=f"s3://{name}"))
    try:
        return _resolve(bucket, key.rstrip("/"), cache)
    except StoreError as error:
        raise UserError(f"The checkpoint {address} cannot be used: {error}.") from None


def _resolve(bucket: Bucket, key: str, cache: Path) -> Path:
    if not key.endswith((".json", ".ckpt")) or key.endswith(tuple(f"/{kind}.json" for kind in KINDS)):
        pointer = _pointer_at(bucket, key)
        if pointer is not None:
            return _fetch_best(bucket, pointer, cache)
    head = bucket.head(key)
    sha256 = str(head["Metadata"].get("sha256", ""))
    step = int((re.findall(r"-step(\d{1,12})", key) or [0])[-1])
    if not SHA256.fullmatch(sha256):
        sha256 = bucket.sha256_of(key)  # of an object that others uploaded: at least it arrives as it lies there
    return fetch(bucket, Pointer(key, head["ContentLength"], sha256, 0, step, {}, "", 0), cache / sha256[:16])


def _pointer_at(bucket: Bucket, key: str) -> Pointer | None:
    """best.json of the run at this prefix, or the pointer that is named itself."""
    pointer_key = key if key.endswith(".json") else f"{key}/best.json"
    data, _ = bucket.read_small(pointer_key)
    if data is None and key.endswith(".json"):
        raise StoreError("missing", "there is no such object")
    return None if data is None else parse_pointer(data, pointer_key.rpartition("/")[0] + "/")


def _fetch_best(bucket: Bucket, pointer: Pointer, cache: Path) -> Path:
    try:
        return fetch(bucket, pointer, cache / pointer.sha256[:16])
    except StoreError as error:
        if error.kind not in ("corrupt", "missing") or not pointer.previous:
            raise
        before = f"s3://{bucket.options.bucket}/{pointer.previous.get('key')}"
        raise StoreError(error.kind, f"{error}; the best before it is {before}") from None


def fetch(
    bucket: Bucket, pointer: Pointer, folder: Path, name: str | None = None, say: Callable[[str], None] = log.info
) -> Path:
    """The checkpoint that a pointer names, whole, in `folder`, with its sidecar; used again where it is there.

    Raises:
        StoreError: kind "corrupt" where the bytes in the bucket are not those that were uploaded.
    """
    key_name = pointer.key.removesuffix("/" + MANIFEST).rpartition("/")[2]
    path = folder / (name or f"{FALLBACK.sub('-', key_name).removesuffix('.ckpt')}.ckpt")
    with _locked(folder, path.name):
        if fault_of(path) is None and not lacks_shards(path):
            return path
        if pointer.folder is not None:
            _fetch_shards(bucket, pointer, path, say)
        else:
            download(bucket, pointer.key, path, pointer.bytes, pointer.sha256, say)
        facts = {"epoch": pointer.epoch, "step": pointer.step, "metric": pointer.metric}
        uri = f"s3://{bucket.options.bucket}/{pointer.key}"
        write_sidecar(path, {**measure(path), **facts, "s3_uri": uri})
        return path


def lacks_shards(path: Path) -> bool:
    """Of a sharded checkpoint this machine holds its own ranks' part, or not even that."""
    return any(not (path / name).is_file() for name in shards_of(path))


def _fetch_shards(bucket: Bucket, pointer: Pointer, path: Path, say: Callable[[str], None]) -> None:
    """The manifest last here too: a broken-off fetch leaves no folder that looks complete."""
    path.mkdir(parents=True, exist_ok=True)
    incoming = path / f".{MANIFEST}.incoming"
    download(bucket, pointer.key, incoming, pointer.bytes, pointer.sha256, say)
    for name, facts in read_manifest(incoming.read_bytes()).items():
        if not (path / name).exists() or sha256_of(path / name) != facts["sha256"]:
            download(bucket, f"{pointer.folder}{name}", path / name, facts["bytes"], facts["sha256"], say)
    os.replace(incoming, path / MANIFEST)


def download(
    bucket: Bucket, key: str, target: Path, num_bytes: int, sha256: str, say: Callable[[str], None] = log.info
) -> None:
    """Fetch one object beside the target, continue where it breaks off, verify, rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{sha256[:8]}.part")
    head = bucket.head(key)
    if head["ContentLength"] != num_bytes:
        raise StoreError("corrupt", f"{key} has {head['ContentLength']} bytes in the bucket instead of {num_bytes}")
    continued = _append_until_whole(bucket, key, head["ETag"], partial, num_bytes, say)
    if sha256_of(partial) != sha256 and continued:
        partial.unlink()  # the part that lay here may be what is wrong
        _append_until_whole(bucket, key, head["ETag"], partial, num_bytes, say)
    if sha256_of(partial) != sha256:
        partial.unlink()
        raise StoreError("corrupt", f"{key} is not what was uploaded (its sha256 differs)")
    os.replace(partial, target)
    sync_folder(target.parent)


def _append_until_whole(
    bucket: Bucket, key: str, etag: str, partial: Path, num_bytes: int, say: Callable[[str], None]
) -> bool:
    """True where it continued a part that lay there already."""
    if _size(partial) > num_bytes:
        partial.unlink()
    before = reached = _size(partial)
    failures = 0
    while reached < num_bytes or not partial.exists():
        try:
            _append(bucket, key, etag, partial, num_bytes)
        except StoreError as error:
            failures = 1 if _size(partial) > reached else failures + 1
            if error.kind not in ("unreachable", "busy") or failures > len(RETRY_DELAYS_S):
                raise
            delay_s = RETRY_DELAYS_S[failures - 1]
            say(f"s3: {error}; {_size(partial)} of {num_bytes} bytes are here, going on in {delay_s:g} s.")
            time.sleep(delay_s)
        reached = _size(partial)
    return before > 0


def _append(bucket: Bucket, key: str, etag: str, partial: Path, num_bytes: int) -> None:
    with partial.open("ab") as file:
        for block in bucket.read_blocks(key, file.tell(), etag)[1] if num_bytes else ():
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if _size(partial) < num_bytes:
        raise StoreError("unreachable", "the connection to the store broke")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """One process of this machine at a time; the lock goes with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as file, locked(file):
        yield


def fetch_run(options: S3Options, folder: RunFolder, say: Callable[[str], None] = log.info) -> Path | None:
    """Bring a run back from its bucket: its newest whole checkpoint, its best, its small files.

    What this machine has and is as new stays. A checkpoint that is damaged in the bucket is passed over, and said.
    Returns:
        The checkpoint that was fetched because it is newer than any here; None: there is none.
    Raises:
        UserError: the bucket cannot be used, and this machine has no whole checkpoint to go on from.
    """
    local = newest_whole(folder.checkpoints, say)
    local_step = int((read_sidecar(local) or {})["step"]) if local else -1
    if local and lacks_shards(local):
        local_step -= 1  # the bucket's of the same step is whole
    try:
        run = RunBucket(Bucket(options), options.prefix, folder.run_id)
        named = [(pointer, kind) for kind in KINDS for pointer in run.pointers(kind)]
        newer = [entry for entry in named if entry[0].step > local_step]
        fetched = _first_whole(run, newer, folder, say)
        best = [entry for entry in named if entry[1] == "best"]
        if best and not any(folder.checkpoints.glob(f"{checkpoint_name('best', best[0][0].step)}.json")):
            _first_whole(run, best, folder, say)
        if named or not folder.record.exists():
            restore_small_files(run, folder)
        return fetched
    except StoreError as error:
        if local is None:
            raise UserError(f"The run {folder.run_id} cannot be fetched from {options.uri}: {error}.") from None
        say(f"s3: the run cannot be looked up in {options.uri}: {error}; going on with what is here.")
        return None


def _first_whole(
    run: RunBucket, named: list[tuple[Pointer, str]], folder: RunFolder, say: Callable[[str], None]
) -> Path | None:
    for pointer, kind in sorted(named, key=lambda entry: (entry[0].step, entry[1]), reverse=True):
        try:
            return fetch(run.bucket, pointer, folder.checkpoints, checkpoint_name(kind, pointer.step), say)
        except StoreError as error:
            if error.kind not in ("corrupt", "missing"):
                raise
            say(f"Passed over s3://{run.bucket.options.bucket}/{pointer.key}: {error}.")
    return None


def locate_checkpoint(address: str, logs: Path, s3: Mapping[str, Any] | None, cache: Path) -> Path:
    """Its absolute path on this machine.

    Args:
        logs: where runs lie.
        s3: the config group (endpoint_url and so on); its uri is not used.
        cache: where what s3:// names is put.
    Raises:
        UserError: it is not there, cannot be reached, or is not what was uploaded.
    """
    if address.startswith("s3:"):
        return resolve_checkpoint(address, s3, cache).resolve()
    path = Path(address)
    if path.exists():
        return path.resolve()
    if not RUN_ID_PATTERN.fullmatch(address) or path.suffix == ".ckpt":
        raise UserError(f"There is no checkpoint {address}.")
    folder = find_run(logs, address)
    best = next((found for found, _ in complete(folder.checkpoints, "best")), None)
    if best is None:
        raise UserError(f"The run {address} has no complete best checkpoint.")
    return best.resolve()
