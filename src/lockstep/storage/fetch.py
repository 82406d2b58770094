"""Fetch checkpoints and runs from a bucket: verified by sha256, cached, with progress.

Imports no torch.
"""

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.checkpoints import files
from lockstep.checkpoints.files import Sidecar, newest_whole, read_sidecar
from lockstep.process.errors import UserError
from lockstep.process.files import locked_file, sha256_of
from lockstep.records.folder import RUN_ID_PATTERN, RunFolder, find_run_folder
from lockstep.records.record import has_trained
from lockstep.storage.errors import S3Error
from lockstep.storage.pointers import (
    Pointers,
    find_newer_checkpoint,
    is_free_or_same_run,
    read_pointer,
    read_pointers,
    refuse_other_run,
    store_uuid,
)
from lockstep.storage.s3 import Bucket, TransferProgress, is_s3

log = logging.getLogger(__name__)

STEP = re.compile(r"-step(\d{1,12})")
# A run records these files. No decision depends on them, because others may write to the bucket.
RECORD_FILE = re.compile(
    r"run\.json|config\.yaml|page\.md|[a-z][a-z0-9_.-]{0,99}\.(csv|diff|log|png|txt)"
    r"|tensorboard/([A-Za-z0-9_-][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._=@+-]{0,199}"
)
MAX_FILE_BYTES = 64 * 2**20
# A fetched checkpoint is removed if nobody has used it for this long.
UNUSED_S = 30 * 24 * 3600.0


def locate_checkpoint(address: str, logs: Path, s3: Mapping[str, Any] | None) -> Path:
    """Return the absolute path of a checkpoint on this machine.

    Args:
        address: a file, the id or the folder of a run, the address s3://bucket/prefix/run_id of a
            run, whose best.json names the checkpoint, or an object s3://…/x.ckpt.
        logs: the folder that holds runs. Its cache/ holds the fetched checkpoints.
        s3: the config's node s3 (endpoint_url); its uri is not used.
    """
    if is_s3(address):
        try:
            path = _fetch_from_bucket(address.rstrip("/"), s3 or {}, logs / "cache").resolve()
        except S3Error as error:
            raise UserError(f"The checkpoint {address} cannot be used: {error}.") from None
        _remove_unused(logs / "cache", path)
        _log_cache_size(logs / "cache")
        return path
    path = Path(address)
    run = RunFolder(path)
    if not run.record_path.exists():
        if path.exists():
            _check_file(path)
            return path.resolve()
        if not RUN_ID_PATTERN.fullmatch(address) or path.suffix == ".ckpt":
            raise UserError(f"There is no checkpoint {address}.")
        run = find_run_folder(logs, address)
    best = newest_whole(run.checkpoints, "best")
    if best is None:
        raise UserError(f"The run {run.run_id} has no whole best checkpoint.")
    return best.resolve()


def _check_file(checkpoint: Path) -> None:
    """Refuse a checkpoint that differs from its sidecar. A file without a sidecar is accepted."""
    if read_sidecar(checkpoint) is None:
        return
    fault = files.fault_of(checkpoint)
    if fault:
        raise UserError(
            f"The checkpoint {checkpoint} is damaged: {fault}. If you have changed it, remove "
            f"{files.sidecar_path(checkpoint).name}."
        )


def _remove_unused(cache: Path, used_path: Path) -> None:
    """Remove fetched checkpoints that nobody has used for a month, but not the one in use now.

    Each of them can be fetched again from its address.
    """
    # The files may belong to another user.
    with contextlib.suppress(OSError):
        os.utime(files.sidecar_path(used_path))
        for path in cache.glob("*/*.ckpt"):
            sidecar = files.sidecar_path(path)
            if sidecar.exists() and time.time() - sidecar.stat().st_mtime > UNUSED_S:
                log.info(f"Removed {path}, a fetched checkpoint that nobody used for 30 days.")
                files.remove(path)


def _log_cache_size(cache: Path) -> None:
    """Log how much of the disk the fetched checkpoints take, if there are several."""
    sizes = [path.stat().st_size for path in cache.glob("*/*.ckpt")]
    if len(sizes) > 1:
        log.info(
            f"{cache} holds {sum(sizes) / 1e9:.1f} GB in {len(sizes)} fetched checkpoints. You may "
            "delete it: a checkpoint that is used again is fetched again."
        )


def _fetch_from_bucket(address: str, s3: Mapping[str, Any], cache: Path) -> Path:
    if address.endswith(".ckpt"):
        return _fetch_object(address, s3, cache)
    bucket = Bucket.from_config(s3, address)
    pointer = read_pointer(bucket, "best")
    if pointer.checkpoint is None:
        raise S3Error(
            "there is no readable best.json: give the address of a run, or of a .ckpt file"
        )
    folder = cache / pointer.checkpoint.sha256[:16]
    return fetch_checkpoint(bucket, pointer.key, pointer.checkpoint, folder, "best")


def _fetch_object(address: str, s3: Mapping[str, Any], cache: Path) -> Path:
    """Fetch a checkpoint that no pointer names. The object's metadata may hold its sha256.

    Metadata and ETag are not trusted: they may be paths that lead out of the cache.
    """
    folder_address, _, name = address.rpartition("/")
    bucket = Bucket.from_config(s3, folder_address)
    head = bucket.call("head_object", name)
    sha256 = head["Metadata"].get("sha256", "")
    if not files.SHA256.fullmatch(sha256):
        sha256 = ""
    steps = STEP.findall(name) or [0]
    sidecar = Sidecar(
        step=int(steps[-1]),
        bytes=head["ContentLength"],
        sha256=sha256,
    )
    identity = sha256 or hashlib.sha256(head["ETag"].encode()).hexdigest()
    return fetch_checkpoint(bucket, name, sidecar, cache / identity[:16], "best")


def fetch_checkpoint(bucket: Bucket, key: str, sidecar: Sidecar, folder: Path, kind: str) -> Path:
    """Return a checkpoint of the bucket as a whole file in `folder`, with its sidecar.

    Args:
        sidecar: the size and the sha256 that the object must have. An empty sha256 is not checked.

    Raises:
        S3Error: with the code Damaged if the object has another size or sha256.
    """
    name = files.checkpoint_name(kind, sidecar.step)
    address = bucket.address(key)
    path = folder / name
    part = folder / f".{name}.part"
    with locked_file(folder / f".{name}.lock"):
        local = read_sidecar(path)
        is_same = local is not None and sidecar.sha256 in ("", local.sha256)
        if is_same and files.fault_of(path) is None:
            return path
        log.info(f"Fetching {address} ({sidecar.bytes / 1e6:,.0f} MB) …")
        bucket.download(key, part, TransferProgress(f"fetching {name}", sidecar.bytes))
        sha256 = sha256_of(part)
        if part.stat().st_size != sidecar.bytes or sidecar.sha256 not in ("", sha256):
            part.unlink()
            raise S3Error(f"{address} is not what was uploaded (its sha256 differs)", "Damaged")
        files.mark_unfinished(path)
        part.replace(path)
        files.write_sidecar(path, replace(sidecar, sha256=sha256))
        return path


def fetch_record(bucket: Bucket, folder: RunFolder) -> None:
    """Fetch record, config and curves of a run, unless this machine's checkpoints are as new.

    Raises:
        OtherRunError: this machine has trained another run of the same id.
    """
    try:
        pointers = read_pointers(bucket)
        _remove_untrained_start(bucket, pointers, folder)
        if folder.record_path.exists() and not find_newer_checkpoint(pointers, folder):
            return
        for pointer in pointers.values():
            if pointer.uuid:
                store_uuid(folder, pointer.uuid)
        for key, size, _ in list(bucket.list()):
            if RECORD_FILE.fullmatch(key) and size <= MAX_FILE_BYTES:
                _fetch_file(bucket, key, folder)
    except S3Error as error:
        # With a local checkpoint the run goes on, and fetch_checkpoints logs the error.
        if not any(files.complete_checkpoints(folder.checkpoints)):
            raise _fetch_error(bucket, folder, error) from None


def fetch_for_page(bucket: Bucket, folder: Path) -> None:
    """Fetch the files from which the page of a run is made into an empty folder.

    TensorBoard files stay in the bucket. An empty folder tensorboard/ says that there are some.

    Raises:
        S3Error: the bucket cannot be read.
        UserError: there is no run at the address.
    """
    for key, size, _ in list(bucket.list()):
        if not RECORD_FILE.fullmatch(key) or size > MAX_FILE_BYTES:
            continue
        if key.startswith("tensorboard/"):
            (folder / "tensorboard").mkdir(exist_ok=True)
            continue
        bucket.download(key, folder / key)
    if not (folder / "run.json").exists():
        raise UserError(f"There is no run at {bucket.uri}: pass s3://bucket/prefix/<run_id>.")


def _remove_untrained_start(bucket: Bucket, pointers: Pointers, folder: RunFolder) -> None:
    """Remove the record of a local start that trained nothing, for another run in the bucket.

    Raises:
        OtherRunError: the local run has trained.
    """
    if is_free_or_same_run(bucket, pointers, folder):
        return
    if has_trained(folder):
        refuse_other_run(bucket, pointers, folder)
    folder.record_path.unlink(missing_ok=True)


def _fetch_file(bucket: Bucket, key: str, folder: RunFolder) -> None:
    path = folder.path / key
    # The user may have written on the page.
    if path == folder.page and path.exists():
        return
    # The config is not trusted, because others may write to the bucket.
    if path == folder.config_path:
        path = folder.bucket_config_path
    bucket.download(key, path)


def fetch_checkpoints(bucket: Bucket, folder: RunFolder) -> None:
    """Fetch the best and the newest checkpoint of a run, unless the local ones are as new.

    A damaged checkpoint in the bucket is skipped. A bucket that cannot be used is an error only if
    this machine has no whole checkpoint to resume from.
    """
    try:
        for kind, pointer in read_pointers(bucket).items():
            if pointer.checkpoint is None:
                continue
            if pointer.checkpoint.step > _newest_step(folder, kind):
                _fetch_unless_damaged(bucket, pointer.key, pointer.checkpoint, folder, kind)
    except S3Error as error:
        if newest_whole(folder.checkpoints) is None:
            raise _fetch_error(bucket, folder, error) from None
        reason = f"the run cannot be looked up in {bucket.uri}: {error}"
        log.info(f"s3: {reason}; continuing with the local files.")


def _newest_step(folder: RunFolder, kind: str) -> int:
    """Return the step of the newest whole checkpoint on this machine; -1 if there is none.

    For the kind "last", each checkpoint counts from which a run can resume.
    """
    checkpoint = newest_whole(folder.checkpoints, "best" if kind == "best" else None)
    sidecar = read_sidecar(checkpoint) if checkpoint else None
    return sidecar.step if sidecar else -1


def _fetch_unless_damaged(
    bucket: Bucket,
    key: str,
    sidecar: Sidecar,
    folder: RunFolder,
    kind: str,
) -> None:
    try:
        fetch_checkpoint(bucket, key, sidecar, folder.checkpoints, kind)
    except S3Error as error:
        if error.code not in ("Damaged", "NoSuchKey"):
            raise
        log.warning(f"Skipped {bucket.address(key)}: {error}.")


def _fetch_error(bucket: Bucket, folder: RunFolder, error: S3Error) -> UserError:
    return UserError(f"The run {folder.run_id} cannot be fetched from {bucket.uri}: {error}.")
