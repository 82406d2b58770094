"""A checkpoint by its path or its s3:// address: fetched, verified by sha256, cached; and a whole run from a bucket."""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.runs.downloads import BrokenOff, Damaged, Incoming, download
from lockstep.runs.errors import UserError
from lockstep.runs.files import checksum_of, locked_file
from lockstep.runs.folder import RUN_ID_PATTERN, RunFolder, find_run
from lockstep.storage.bucket import open_store, read_small, sha256_of_object
from lockstep.storage.checkpoint_files import (
    Sidecar,
    checkpoint_name,
    complete,
    fault_of,
    newest_whole,
    read_sidecar,
    write_sidecar,
)
from lockstep.storage.object_store import ObjectStore, StoreError
from lockstep.storage.pointer import SHA256, Pointer, parse_pointer
from lockstep.storage.run_bucket import KINDS, RunBucket
from lockstep.storage.s3_options import parse_uri
from lockstep.storage.small_files import restore_small_files

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
FALLBACK = re.compile(r"[^A-Za-z0-9._-]")


def is_s3(address: str | Path) -> bool:
    return str(address).startswith("s3:")


def resolve_checkpoint(address: str | Path, s3: Mapping[str, Any] | None, cache: Path) -> Path:
    """A local path of the checkpoint: the path as it is, or what the s3:// address names, fetched into `cache`.

    Args:
        address: a path; an object `s3://…/x.ckpt`; or a run's prefix
            `s3://bucket/prefix/run_id`, of which best.json says which object it is.
        s3: the config group (endpoint_url and so on); its uri is not used.
    Raises:
        UserError: it is not there, cannot be reached, or is not what was uploaded.
    """
    if not is_s3(address):
        return Path(address)
    bucket, key = parse_uri(str(address))
    store = open_store(s3 or {}, uri=f"s3://{bucket}")
    try:
        return _resolve(store, key.rstrip("/"), cache)
    except StoreError as error:
        raise UserError(f"The checkpoint {address} cannot be used: {error}.") from None


def _resolve(store: ObjectStore, key: str, cache: Path) -> Path:
    if not key.endswith((".json", ".ckpt")) or key.endswith(tuple(f"/{kind}.json" for kind in KINDS)):
        pointer = _pointer_at(store, key)
        if pointer is not None:
            return _fetch_best(store, pointer, cache)
    found = store.head(key)
    sha256 = found.sha256
    step = int((re.findall(r"-step(\d{1,12})", key) or [0])[-1])
    if not SHA256.fullmatch(sha256):
        sha256 = sha256_of_object(store, key)  # of an object that others uploaded: at least it arrives as it lies there
    return fetch(store, Pointer(key, found.bytes, sha256, 0, step, {}, "", 0), cache / sha256[:16])


def _pointer_at(store: ObjectStore, key: str) -> Pointer | None:
    """best.json of the run at this prefix, or the pointer that is named itself."""
    pointer_key = key if key.endswith(".json") else f"{key}/best.json"
    data, _ = read_small(store, pointer_key)
    if data is None and key.endswith(".json"):
        raise StoreError("missing", "there is no such object")
    return None if data is None else parse_pointer(data, pointer_key.rpartition("/")[0] + "/")


def _fetch_best(store: ObjectStore, pointer: Pointer, cache: Path) -> Path:
    try:
        return fetch(store, pointer, cache / pointer.sha256[:16])
    except StoreError as error:
        if error.kind not in ("corrupt", "missing") or not pointer.previous:
            raise
        before = store.root + pointer.previous.key
        raise StoreError(error.kind, f"{error}; the best before it is {before}") from None


def fetch(store: ObjectStore, pointer: Pointer, folder: Path, name: str | None = None) -> Path:
    """The checkpoint that a pointer names, whole, in `folder`, with its sidecar; used again where it is there.

    Raises:
        StoreError: kind "corrupt" where the bytes in the bucket are not those that were uploaded.
    """
    key_name = pointer.key.rpartition("/")[2]
    path = folder / (name or f"{FALLBACK.sub('-', key_name).removesuffix('.ckpt')}.ckpt")
    with locked_file(folder / f".{path.name}.lock"):
        if fault_of(path) is None:
            return path
        fetch_object(store, pointer.key, path, pointer.bytes, pointer.sha256)
        known = {"epoch": pointer.epoch, "metric": pointer.metric, "s3_uri": store.root + pointer.key}
        write_sidecar(path, Sidecar.of(checksum_of(path), step=pointer.step, **known))
        return path


def fetch_object(store: ObjectStore, key: str, target: Path, num_bytes: int, sha256: str) -> None:
    """One object, which must be what these numbers say."""
    found = store.head(key)
    if found.bytes != num_bytes:
        raise StoreError("corrupt", f"{key} has {found.bytes} bytes in the bucket instead of {num_bytes}")

    def source(start: int) -> Incoming:
        if start > num_bytes:
            return source(0)
        blocks = _blocks(store, key, start, found.etag) if start < num_bytes else iter(())
        return Incoming(start, num_bytes, blocks)

    part = target.with_name(f".{target.name}.{sha256[:8]}.part")
    try:
        download(source, part, target, digest=sha256, pauses_s=RETRY_DELAYS_S)
    except BrokenOff as error:
        raise StoreError("unreachable", str(error)) from None
    except Damaged:
        raise StoreError("corrupt", f"{key} is not what was uploaded (its sha256 differs)") from None


def _blocks(store: ObjectStore, key: str, start: int, etag: str) -> Iterator[bytes]:
    try:
        yield from store.get(key, start, etag).blocks
    except StoreError as error:
        if error.kind not in ("unreachable", "busy"):
            raise
        raise BrokenOff(f"s3: {error}") from None


def fetch_run(store: ObjectStore, folder: RunFolder) -> Path | None:
    """Bring a run back from its bucket: its newest whole checkpoint, its best, its small files.

    What this machine has and is as new stays. A checkpoint that is damaged in the bucket is passed over, and said.
    Returns:
        The checkpoint that was fetched because it is newer than any here; None: there is none.
    Raises:
        UserError: the bucket cannot be used, and this machine has no whole checkpoint to go on from.
    """
    local = newest_whole(folder.checkpoints)
    known = read_sidecar(local) if local else None
    local_step = known.step if known else -1
    run = RunBucket(store, folder.run_id)
    try:
        named = [(pointer, kind) for kind in KINDS for pointer in run.pointers(kind)]
        newer = [entry for entry in named if entry[0].step > local_step]
        fetched = _first_whole(store, newer, folder)
        best = [entry for entry in named if entry[1] == "best"]
        if best and not any(folder.checkpoints.glob(f"{checkpoint_name('best', best[0][0].step)}.json")):
            _first_whole(store, best, folder)
        if named or not folder.record.exists():
            restore_small_files(run, folder)
        return fetched
    except StoreError as error:
        if local is None:
            raise UserError(f"The run {folder.run_id} cannot be fetched from {run.uri}: {error}.") from None
        log.info(f"s3: the run cannot be looked up in {run.uri}: {error}; going on with what is here.")
        return None


def _first_whole(store: ObjectStore, named: list[tuple[Pointer, str]], folder: RunFolder) -> Path | None:
    for pointer, kind in sorted(named, key=lambda entry: (entry[0].step, entry[1]), reverse=True):
        try:
            return fetch(store, pointer, folder.checkpoints, checkpoint_name(kind, pointer.step))
        except StoreError as error:
            if error.kind not in ("corrupt", "missing"):
                raise
            log.info(f"Passed over {store.root}{pointer.key}: {error}.")
    return None


def locate_checkpoint(address: str, logs: Path, s3: Mapping[str, Any] | None, cache: Path) -> Path:
    """Its absolute path on this machine.

    Args:
        address: a checkpoint, s3://…, or a run: its id, or its folder.
        logs: where runs lie.
        s3: the config group (endpoint_url and so on); its uri is not used.
        cache: where what s3:// names is put.
    Raises:
        UserError: it is not there, cannot be reached, or is not what was uploaded.
    """
    if address.startswith("s3:"):
        return resolve_checkpoint(address, s3, cache).resolve()
    path = Path(address)
    if (run := RunFolder(path)).record.exists():
        return _best_of(run)
    if path.exists():
        return path.resolve()
    if not RUN_ID_PATTERN.fullmatch(address) or path.suffix == ".ckpt":
        raise UserError(f"There is no checkpoint {address}.")
    return _best_of(find_run(logs, address))


def _best_of(run: RunFolder) -> Path:
    best = next((found for found, _ in complete(run.checkpoints, "best")), None)
    if best is None:
        raise UserError(f"The run {run.run_id} has no complete best checkpoint.")
    return best.resolve()
