"""Run folders out of a bucket: `logbook.py build s3://bucket/prefix` for runs whose machine is gone."""

from pathlib import Path

from lockstep.runs.folder import RUN_ID_PATTERN
from lockstep.runs.foreign_files import read_json
from lockstep.storage.bucket import copy_to_file
from lockstep.storage.object_store import ObjectStore
from lockstep.storage.small_files import MAX_FILE_BYTES, RECORDED

CONFIGS = ("config.yaml", "defaults.yaml")  # to show


def fetch_runs(store: ObjectStore, into: Path, known: dict[str, str]) -> dict[Path, str]:
    """Copy what the logbook needs of every run under the store's prefix; returns {folder: its s3:// address}.

    Args:
        known: run id → updated_at of what the logbook holds already; such a run is not fetched again.
    """
    runs: dict[str, list[str]] = {}
    with_events = set()
    for key, size in store.list(store.prefix):
        run_id, _, name = key.removeprefix(store.prefix).partition("/")
        if not RUN_ID_PATTERN.fullmatch(run_id) or ".." in run_id:
            continue
        if (RECORDED.fullmatch(name) or name in CONFIGS) and size <= MAX_FILE_BYTES:
            runs.setdefault(run_id, []).append(name)
        elif name.startswith("tensorboard/"):
            with_events.add(run_id)
    found = {}
    for run_id, names in sorted(runs.items()):
        root = f"{store.prefix}{run_id}/"
        if "run.json" in names and fetch_run(store, root, names, into / run_id, known.get(run_id, "")):
            found[into / run_id] = store.root + root.rstrip("/")
            if run_id in with_events:
                (into / run_id / "tensorboard").mkdir()
    return found


def fetch_run(store: ObjectStore, root: str, names: list[str], folder: Path, known: str) -> bool:
    """False where the record in the bucket is the one that is known."""
    copy_to_file(store, f"{root}run.json", folder / "run.json", MAX_FILE_BYTES)
    try:
        record = read_json(folder / "run.json")
        updated_at = str(record.get("updated_at") or "")
    except (ValueError, AttributeError):
        return False
    if known and updated_at == known:  # which of the two is newer, the import decides
        return False
    for name in sorted(set(names) - {"run.json"}):
        copy_to_file(store, root + name, folder / name, MAX_FILE_BYTES)
    return True
