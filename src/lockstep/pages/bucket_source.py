"""Run folders out of a bucket: `logbook.py build s3://bucket/prefix` for runs whose machine is gone."""

import json
import re
from pathlib import Path
from typing import Any

from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RUN_ID_PATTERN

WANTED = re.compile(
    r"run\.json|config\.yaml|defaults\.yaml|metrics\.csv|confusion_matrix\.csv|code\.diff"
    r"|hardware-node\d{1,5}(\.\d{1,3})?\.csv|nvidia-smi-node\d{1,5}-(start|peak|end)\.txt"
)
MAX_FILE_BYTES = 64 * 2**20


def fetch_runs(bucket: Any, prefix: str, into: Path, known: dict[str, str]) -> dict[Path, str]:
    """Copy what the logbook needs of every run under `prefix`; returns {folder: its s3:// address}.

    Args:
        bucket: bucket.Bucket, or anything with its `keys` and `read_blocks`.
        known: run id → updated_at of what the logbook holds already; such a run is not fetched again.
    """
    root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    runs: dict[str, list[str]] = {}
    with_events = set()
    for key, size in bucket.keys(root):
        run_id, _, name = key.removeprefix(root).partition("/")
        if not RUN_ID_PATTERN.fullmatch(run_id) or ".." in run_id:
            continue
        if WANTED.fullmatch(name) and size <= MAX_FILE_BYTES:
            runs.setdefault(run_id, []).append(name)
        elif name.startswith("tensorboard/"):
            with_events.add(run_id)
    found = {}
    for run_id, names in sorted(runs.items()):
        if "run.json" in names and fetch_run(bucket, f"{root}{run_id}/", names, into / run_id, known.get(run_id, "")):
            found[into / run_id] = f"s3://{bucket.options.bucket}/{root}{run_id}"
            if run_id in with_events:
                (into / run_id / "tensorboard").mkdir()
    return found


def fetch_run(bucket: Any, root: str, names: list[str], folder: Path, known: str) -> bool:
    """False where the record in the bucket is no newer than what is known."""
    fetch(bucket, f"{root}run.json", folder / "run.json")
    try:
        record = json.loads((folder / "run.json").read_bytes())
        updated_at = str(record.get("updated_at") or "")
    except (ValueError, AttributeError, RecursionError):
        return False
    if known and updated_at <= known:
        return False
    for name in sorted(set(names) - {"run.json"}):
        fetch(bucket, root + name, folder / name)
    return True


def fetch(bucket: Any, key: str, target: Path) -> None:
    def write(file: Any) -> None:
        for block in bucket.read_blocks(key)[1]:
            file.write(block)

    write_atomically(target, write, binary=True)
