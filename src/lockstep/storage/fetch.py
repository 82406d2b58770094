"""Fetch checkpoints and whole runs from a bucket: verified by sha256, cached, with progress. Imports no torch.

<prefix>/<run_id>/best.json, last.json                             each names one complete checkpoint, or none yet
<prefix>/<run_id>/checkpoints/best-step00000123-1a2b3c4d.ckpt      never changes: step and beginning of the sha256
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file, sha256_of
from lockstep.runs.folder import RUN_ID_PATTERN, RunFolder, find_run
from lockstep.storage import checkpoint_files as files
from lockstep.storage.checkpoint_files import Sidecar, newest_whole, read_sidecar
from lockstep.storage.errors import S3Error
from lockstep.storage.s3 import Bucket, Progress, is_s3

log = logging.getLogger(__name__)

KINDS = ("best", "last")
KEY = re.compile(r"checkpoints/[A-Za-z0-9_-][A-Za-z0-9._-]*")
STEP = re.compile(r"-step(\d{1,12})")
# What a run records; nothing here decides anything, because others may write to the bucket.
RECORDED = re.compile(
    r"run\.json|config\.yaml|[a-z][a-z0-9_.-]{0,99}\.(csv|diff|log|txt)"
    r"|tensorboard/([A-Za-z0-9_-][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._=@+-]{0,199}"
)
MAX_FILE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Pointer:
    """The content of best.json or last.json in the bucket."""

    checkpoint: Sidecar | None = None  # the complete checkpoint that it names; None: none yet
    key: str = ""  # of the checkpoint, relative to the run's place in the bucket
    start: float = 0.0  # the time at which the run was started that wrote this, in seconds since 1970
    etag: str | None = None  # None: the pointer is not there

    def as_json(self) -> str:
        return json.dumps({**asdict(self.checkpoint or Sidecar(0)), "key": self.key, "start": self.start}, indent=1)


def read_pointer(run: Bucket, kind: str) -> Pointer:
    """Return the pointer of a run; one to something that a run could not have written names no checkpoint."""
    data, etag = run.read(f"{kind}.json")
    try:
        held = json.loads(data or b"null")
    except (ValueError, RecursionError):
        held = None
    key, start = (held.get("key"), held.get("start")) if isinstance(held, dict) else (None, None)
    checkpoint = files.parse_sidecar(held) if KEY.fullmatch(str(key)) else None
    return Pointer(checkpoint, str(key) if checkpoint else "", start if isinstance(start, float) else 0.0, etag)


def locate_checkpoint(address: str, logs: Path, s3: Mapping[str, Any] | None) -> Path:
    """Return the absolute path of a checkpoint on this machine.

    Args:
        address: a file; a run: its id or its folder; s3://bucket/prefix/run_id, of which best.json names the
            checkpoint; or an object s3://…/x.ckpt.
        logs: the folder that holds runs, and in cache/ what is fetched.
        s3: the config's node s3 (endpoint_url); its uri is not used.
    """
    if is_s3(address):
        try:
            return _fetch_address(address.rstrip("/"), s3 or {}, logs / "cache").resolve()
        except S3Error as error:
            raise UserError(f"The checkpoint {address} cannot be used: {error}.") from None
    path, run = Path(address), RunFolder(Path(address))
    if not run.record.exists():
        if path.exists():
            return path.resolve()
        if not RUN_ID_PATTERN.fullmatch(address) or path.suffix == ".ckpt":
            raise UserError(f"There is no checkpoint {address}.")
        run = find_run(logs, address)
    for best, _ in files.complete(run.checkpoints, "best"):
        return best.resolve()
    raise UserError(f"The run {run.run_id} has no complete best checkpoint.")


def _fetch_address(address: str, s3: Mapping[str, Any], cache: Path) -> Path:
    above, _, name = address.rpartition("/")
    if name.endswith(".ckpt"):
        bucket = Bucket.of(s3, above)
        head = bucket.call("head_object", name)
        sha256, step = head["Metadata"].get("sha256", ""), int((STEP.findall(name) or [0])[-1])
        folder = cache / (sha256 or head["ETag"].strip('"'))[:16]
        return fetch(bucket, name, Sidecar(step, head["ContentLength"], sha256), folder, "best")
    run = Bucket.of(s3, address)
    if not (pointer := read_pointer(run, "best")).checkpoint:
        raise S3Error("there is no readable best.json: give the address of a run, or of a .ckpt file")
    return fetch(run, pointer.key, pointer.checkpoint, cache / pointer.checkpoint.sha256[:16], "best")


def fetch(bucket: Bucket, key: str, wanted: Sidecar, folder: Path, kind: str) -> Path:
    """Return a checkpoint of the bucket as a whole file in `folder`, with its sidecar.

    Raises:
        S3Error: code Damaged if the object is not what was uploaded. An empty sha256 is not checked.
    """
    name, address = files.checkpoint_name(kind, wanted.step), bucket.address(key)
    path, part = folder / name, folder / f".{name}.part"
    with locked_file(folder / f".{name}.lock"):
        known = read_sidecar(path)
        if known and wanted.sha256 in ("", known.sha256) and files.fault_of(path) is None:
            return path
        log.info(f"Fetching {address} ({wanted.bytes / 1e6:,.0f} MB) …")
        bucket.download(key, part, Progress(f"fetching {name}", wanted.bytes))
        found = sha256_of(part)
        if part.stat().st_size != wanted.bytes or wanted.sha256 not in ("", found):
            part.unlink()
            raise S3Error(f"{address} is not what was uploaded (its sha256 differs)", "Damaged")
        part.replace(path)
        files.write_sidecar(path, replace(wanted, sha256=found))
        return path


def fetch_run(run: Bucket, folder: RunFolder) -> None:
    """Bring a run back from its bucket: its best and its newest checkpoint, its record and curves.

    Local files stay if nothing in the bucket is newer. A damaged checkpoint in the bucket is passed over;
    a bucket that cannot be used is an error only where this machine has no whole checkpoint to resume from.
    """
    is_newer = not folder.record.exists()
    try:
        for kind in KINDS:
            pointer = read_pointer(run, kind)
            # A last that is not newer than the best is not needed, unless the best has weights alone.
            here = newest_whole(folder.checkpoints, "best" if kind == "best" else None)
            known = read_sidecar(here) if here else None
            if pointer.checkpoint and (known is None or pointer.checkpoint.step > known.step):
                is_newer = True
                try:
                    fetch(run, pointer.key, pointer.checkpoint, folder.checkpoints, kind)
                except S3Error as error:
                    if error.code not in ("Damaged", "NoSuchKey"):
                        raise
                    log.info(f"Skipped {run.address(pointer.key)}: {error}.")
        for key, size, _ in list(run.list()) if is_newer else ():
            if RECORDED.fullmatch(key) and size <= MAX_FILE_BYTES:  # its config is not trusted: others may write here
                run.download(key, folder.bucket_config if key == folder.config.name else folder.path / key)
    except S3Error as error:
        if newest_whole(folder.checkpoints) is None:
            raise UserError(f"The run {folder.run_id} cannot be fetched from {run.uri}: {error}.") from None
        log.info(f"s3: the run cannot be looked up in {run.uri}: {error}; continuing with the local files.")
