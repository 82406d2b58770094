"""The place of a run in a bucket: best.json and last.json, and which run they belong to.

<prefix>/<run_id>/best.json, last.json                         name one complete checkpoint, or none
<prefix>/<run_id>/checkpoints/best-step00000123-1a2b3c4d.ckpt  step and beginning of the sha256

Two machines can give two runs the same id. Each run therefore has a random uuid, in its run.json
and in its pointers. A run refuses a place whose pointers hold another uuid. Imports no torch.
"""

import json
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoints.files import Sidecar, complete_checkpoints, parse_sidecar
from lockstep.process.errors import UserError
from lockstep.process.files import write_atomically
from lockstep.records.folder import RunFolder
from lockstep.records.record import RunRecord, has_trained, read_record
from lockstep.storage.errors import OtherRunError
from lockstep.storage.s3 import Bucket

KINDS = ("best", "last")
# A pointer may name any file below checkpoints/ for a download.
READABLE_KEY = re.compile(r"checkpoints/[A-Za-z0-9_-][A-Za-z0-9._-]*")
# A run gives its checkpoints these names, and deletes nothing else.
DELETABLE_KEY = re.compile(r"checkpoints/(best|last)-step\d{8,}-[0-9a-f]{8}\.ckpt")
UUID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Pointer:
    """The content of best.json or last.json in the bucket.

    Args:
        checkpoint: the complete checkpoint that the pointer names; None if there is none yet.
        key: the key of the checkpoint, relative to the run's place in the bucket.
        started_at_s: when the start of the run that wrote the pointer began, in seconds since 1970.
        uuid: the uuid of the run; empty if version 2.0.0 wrote the pointer.
        leftovers: keys that the run has uploaded or begun to upload, and no longer needs.
        etag: the ETag of the object; None if the pointer does not exist.
    """

    checkpoint: Sidecar | None = None
    key: str = ""
    started_at_s: float = 0.0
    uuid: str = ""
    leftovers: tuple[str, ...] = ()
    etag: str | None = None

    def to_json(self) -> str:
        # If the pointer names no checkpoint, its key is empty and nobody reads this sidecar.
        sidecar = asdict(self.checkpoint or Sidecar(0))
        values = {"key": self.key, "start": self.started_at_s, "uuid": self.uuid}
        return json.dumps({**sidecar, **values, "leftovers": self.leftovers}, indent=1)


Pointers = dict[str, Pointer]  # by kind


def new_uuid() -> str:
    return secrets.token_hex(16)


def read_pointers(bucket: Bucket) -> Pointers:
    return {kind: read_pointer(bucket, kind) for kind in KINDS}


def read_pointer(bucket: Bucket, kind: str) -> Pointer:
    """Return a pointer, which names no checkpoint if its content is not what a run writes."""
    content, etag = bucket.read(f"{kind}.json")
    values = _json_object(content)
    key = str(values.get("key"))
    started_at_s = values.get("start")
    uuid = str(values.get("uuid"))
    leftovers = values.get("leftovers")
    checkpoint = parse_sidecar(values) if READABLE_KEY.fullmatch(key) else None
    if not isinstance(leftovers, list):
        leftovers = []
    return Pointer(
        checkpoint=checkpoint,
        key=key if checkpoint else "",
        started_at_s=started_at_s if isinstance(started_at_s, float) else 0.0,
        uuid=uuid if UUID.fullmatch(uuid) else "",
        leftovers=tuple(name for name in leftovers if DELETABLE_KEY.fullmatch(str(name))),
        etag=etag,
    )


def _json_object(content: bytes | None) -> dict[str, Any]:
    try:
        values = json.loads(content or b"null")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def read_uuid(folder: RunFolder) -> str:
    """Return the uuid of the run in this folder; empty if it has none."""
    if folder.record_path.exists():
        uuid = str(read_record(folder.record_path).uuid)
        if UUID.fullmatch(uuid):
            return uuid
    path = _uuid_path(folder)
    return path.read_text() if path.exists() else ""


def store_uuid(folder: RunFolder, uuid: str) -> None:
    """Store the uuid of a run whose run.json is missing or has no uuid."""
    write_atomically(_uuid_path(folder), lambda file: file.write(uuid))


def _uuid_path(folder: RunFolder) -> Path:
    return folder.path / "upload" / "uuid"


def is_free_or_same_run(bucket: Bucket, pointers: Pointers, folder: RunFolder) -> bool:
    """Return whether a place in a bucket is empty, or holds the run of this folder."""
    if all(pointer.etag is None for pointer in pointers.values()):
        return True
    uuids = {pointer.uuid for pointer in pointers.values() if pointer.uuid}
    if uuids:
        return uuids == {read_uuid(folder)}
    return _is_same_run_of_old_version(bucket, folder)


def _is_same_run_of_old_version(bucket: Bucket, folder: RunFolder) -> bool:
    """Return whether a place whose pointers have no uuid holds the run of this folder.

    Version 2.0.0 wrote no uuid. The time at which the run was first started tells runs apart.
    """
    content, _ = bucket.read(folder.record_path.name)
    # Without run.json only the run id is left. A folder that has trained counts as the same run.
    if content is None:
        return any(complete_checkpoints(folder.checkpoints))
    record = read_record(folder.record_path) if folder.record_path.exists() else RunRecord()
    started_at = _json_object(content).get("started_at")
    return started_at is not None and started_at == record.started_at


def refuse_other_run(bucket: Bucket, pointers: Pointers, folder: RunFolder) -> None:
    """Raise OtherRunError if a place in a bucket holds another run than this folder."""
    if is_free_or_same_run(bucket, pointers, folder):
        return
    name = folder.run_id
    message = f"{bucket.uri} holds another run named {name}, and nothing was written there."
    if has_trained(folder):
        raise OtherRunError(
            f"{message} Pass another s3.uri= to go on with the run in {folder.path}, or another "
            f"paths.log_dir= with run_id={name} resume=auto to go on with the run in the bucket."
        )
    raise OtherRunError(
        f"{message} Pass another run_id= to start a new run, or run_id={name} resume=auto to go on "
        "with the run in the bucket."
    )


def find_newer_checkpoint(pointers: Pointers, folder: RunFolder) -> Sidecar | None:
    """Return a checkpoint that a pointer names and that is newer than those of this machine."""
    steps = {"best": -1, "last": -1}
    for path, sidecar in complete_checkpoints(folder.checkpoints):
        if path.name.startswith("best-"):
            steps["best"] = max(steps["best"], sidecar.step)
        # A run can resume from a best checkpoint with the optimizer's state, too.
        if not sidecar.weights_only:
            steps["last"] = max(steps["last"], sidecar.step)
    for kind, pointer in pointers.items():
        if pointer.checkpoint is not None and pointer.checkpoint.step > steps[kind]:
            return pointer.checkpoint
    return None


def refuse_newer_checkpoints(bucket: Bucket, pointers: Pointers, folder: RunFolder) -> None:
    """Raise UserError if a bucket holds newer checkpoints of this run, which it would replace."""
    newer = find_newer_checkpoint(pointers, folder)
    if newer is None:
        return
    name = folder.run_id
    raise UserError(
        f"{bucket.uri} holds a checkpoint of {name} from step {newer.step}, which is newer than "
        f"those in {folder.path}: run_id={name} resume=auto goes on from it. Pass another s3.uri= "
        "to go on from the older one."
    )
