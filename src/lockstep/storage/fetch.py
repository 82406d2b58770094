"""Fetch checkpoints and whole runs from a bucket: verified by sha256, cached, with progress. Imports no torch."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.runs.errors import UserError
from lockstep.runs.files import checksum_of, locked_file
from lockstep.runs.folder import RUN_ID_PATTERN, RunFolder, find_run
from lockstep.runs.foreign_files import NotReadable, parse_json
from lockstep.storage.checkpoint_files import (
    Sidecar,
    checkpoint_name,
    complete,
    fault_of,
    newest_whole,
    read_sidecar,
    write_sidecar,
)
from lockstep.storage.errors import S3Error
from lockstep.storage.pointer import KINDS, Pointer, read_pointer
from lockstep.storage.s3 import Bucket, Progress, is_s3

log = logging.getLogger(__name__)

STEP = re.compile(r"-step(\d{1,12})")
TRIES = 3  # a running training may replace the checkpoint while it is fetched
# What a run records; nothing here decides anything, because others may write to the bucket.
RECORDED = re.compile(
    r"run\.json|config\.yaml|metrics\.csv|confusion_matrix\.csv|calibration\.csv|code\.diff|train\.log"
    r"|hardware-node\d{1,5}(\.\d{1,3})?\.csv|nvidia-smi-node\d{1,5}-(start|peak|end)\.txt"
    r"|tensorboard/([A-Za-z0-9_-][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._=@+-]{0,199}"
)
MAX_FILE_BYTES = 64 * 2**20


def locate_checkpoint(address: str, logs: Path, s3: Mapping[str, Any] | None, cache: Path) -> Path:
    """Return the absolute path of a checkpoint on this machine.

    Args:
        address: a file; a run: its id or its folder; s3://bucket/prefix/run_id, of which best.json names the
            checkpoint; or an object s3://…/x.ckpt.
        logs: the folder that holds runs.
        s3: the config group (endpoint_url and so on); its uri is not used.
        cache: the folder for what is fetched.
    Raises:
        UserError: there is none, the bucket cannot be used, or the object is not what was uploaded.
    """
    if is_s3(address):
        return _fetch_address(address, s3 or {}, cache).resolve()
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


def _fetch_address(address: str, s3: Mapping[str, Any], cache: Path) -> Path:
    above, _, name = address.rstrip("/").rpartition("/")
    try:
        if name.endswith(".ckpt"):
            bucket = Bucket.of(s3, above)
            head = bucket.call("head_object", name)
            step, sha256 = int((STEP.findall(name) or [0])[-1]), head["Metadata"].get("sha256", "")
            named = Pointer(name, head["ContentLength"], sha256, step, 0, {}, "")
            return fetch(bucket, named, cache / (sha256 or head["ETag"].strip('"'))[:16], checkpoint_name("best", step))
        kind = name.removesuffix(".json") if name in ("best.json", "last.json") else ""
        run = Bucket.of(s3, above if kind else address.rstrip("/"))
        for attempt in range(TRIES):
            pointer, _ = read_pointer(run, kind or "best")
            if pointer is None:
                raise S3Error("there is no readable best.json: give the address of a run, or of a .ckpt file")
            try:
                folder = cache / pointer.sha256[:16]
                return fetch(run, pointer, folder, checkpoint_name(kind or "best", pointer.step))
            except S3Error as error:
                if error.code != "NoSuchKey" or attempt + 1 == TRIES:
                    raise
        raise AssertionError
    except S3Error as error:
        raise UserError(f"The checkpoint {address} cannot be used: {error}.") from None


def fetch(bucket: Bucket, pointer: Pointer, folder: Path, name: str) -> Path:
    """Return the checkpoint that a pointer names as a whole file in `folder`, with its sidecar.

    Raises:
        S3Error: code Damaged if the object is not what was uploaded.
    """
    path, address = folder / name, bucket.address(pointer.key)
    with locked_file(folder / f".{name}.lock"):
        known = read_sidecar(path)
        if known and pointer.sha256 in ("", known.sha256) and fault_of(path) is None:
            return path
        part = path.with_name(f".{name}.part")
        log.info(f"Fetching {address} ({pointer.bytes / 1e6:,.0f} MB) …")
        bucket.download(pointer.key, part, Progress(f"fetching {name}", pointer.bytes))
        found = checksum_of(part)
        if found.bytes != pointer.bytes or pointer.sha256 not in ("", found.sha256):
            part.unlink()
            raise S3Error(f"{address} is not what was uploaded (its sha256 differs)", "Damaged")
        part.replace(path)
        more = {"epoch": pointer.epoch, "metric": pointer.metric, "s3_uri": address}
        write_sidecar(path, Sidecar.of(found, step=pointer.step, **more))
        return path


def fetch_run(run: Bucket, folder: RunFolder) -> Path | None:
    """Bring a run back from its bucket: its newest whole checkpoint, its best, its record and curves.

    What this machine has and is as new stays. A checkpoint that is damaged in the bucket is passed over.

    Returns:
        The checkpoint that was fetched because it is newer than any here; None if there is none.
    Raises:
        UserError: the bucket cannot be used, and this machine has no whole checkpoint to resume from.
    """
    local = newest_whole(folder.checkpoints)
    known = read_sidecar(local) if local else None
    try:
        named = [(pointer, kind) for kind in KINDS if (pointer := read_pointer(run, kind)[0])]
        named.sort(key=lambda entry: (entry[0].step, entry[1]), reverse=True)
        newer = [entry for entry in named if entry[0].step > (known.step if known else -1)]
        fetched = _first_whole(run, newer, folder)
        best = [entry for entry in named if entry[1] == "best"]
        if best and not any(folder.checkpoints.glob(f"{checkpoint_name('best', best[0][0].step)}.json")):
            _first_whole(run, best, folder)
        if named or not folder.record.exists():
            _restore_files(run, folder)
        return fetched
    except S3Error as error:
        if local is None:
            raise UserError(f"The run {folder.run_id} cannot be fetched from {run.uri}: {error}.") from None
        log.info(f"s3: the run cannot be looked up in {run.uri}: {error}; going on with what is here.")
        return None


def _first_whole(run: Bucket, named: list[tuple[Pointer, str]], folder: RunFolder) -> Path | None:
    for pointer, kind in named:
        try:
            return fetch(run, pointer, folder.checkpoints, checkpoint_name(kind, pointer.step))
        except S3Error as error:
            if error.code not in ("Damaged", "NoSuchKey"):
                raise
            log.info(f"Passed over {run.address(pointer.key)}: {error}.")
    return None


def _restore_files(run: Bucket, folder: RunFolder) -> None:
    """Fetch what the run has recorded, so that its record and curves go on; what is here stays unless it is older.

    Its config.yaml goes to a place of its own, because others may write to the bucket.
    """
    here = folder.record.read_bytes() if folder.record.exists() else None
    is_older = _updated_at(run.read("run.json")[0]) > _updated_at(here)
    for key, size, _ in list(run.list()):
        target = folder.bucket_config if key == folder.config.name else folder.path / key
        wanted = RECORDED.fullmatch(key) and size <= MAX_FILE_BYTES
        if wanted and (is_older or not target.exists() or target == folder.bucket_config):
            run.download(key, target)


def _updated_at(record: bytes | None) -> str:
    try:
        return str(parse_json(record or b"{}").get("updated_at", ""))
    except (NotReadable, AttributeError):
        return ""
