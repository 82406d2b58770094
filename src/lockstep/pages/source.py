"""One run as one JSON file, `logbook/runs/<run_id>.json`: all that any page, picture or report shows of it.

It is made from the run folder, which may be deleted afterwards; the pages are made from these files alone.
Secrets are taken out here, so none is ever written under logbook/.
"""

import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

from lockstep.pages.curves import calibration_bins, confusion_matrix, hardware_curves, number, training_curves
from lockstep.pages.json_values import mapping
from lockstep.runs import foreign_files
from lockstep.runs.errors import UserError
from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RUN_ID_PATTERN, RunFolder
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import read_json, refuse_newer
from lockstep.runs.redact import redact, redact_text

log = logging.getLogger(__name__)

Source = dict[str, Any]  # JSON whose values nobody has looked at: of a record, of a config, of logbook/runs/*.json

SOURCE_VERSION = 1
MAX_TEXT = 4_000
MAX_DIFF = 60_000
MAX_SMI = 8_000
MAX_SMI_FILES = 24
MAX_READ = 400_000
MAX_ITEMS = 400
# Different in every run by nature, or of no interest to a reader
NOT_COMPARED = (
    "paths", "hydra", "run_id", "resume", "resume_step", "task_name", "tags", "ckpt_path", "initial_weights",
    "overrides", "sweep_dir", "experiment_name", "optimized_metric",
)  # fmt: skip


def import_run(folder: Path) -> Source:
    """A run folder as one plain mapping that JSON can hold.

    Raises:
        UserError: it is no run folder.
    """
    files = RunFolder(folder)
    record = read_json(files.record)
    config, defaults = flatten(redact(read_yaml(files.config))), flatten(redact(read_yaml(folder / "defaults.yaml")))
    nodes = _node_files(folder)
    source = {
        "source_version": SOURCE_VERSION,
        "run_id": _run_id(record, files),
        "folder": _shown_path(folder),
        "record": limited(record),
        "config": limited(config),
        "changed": limited(differences(defaults, config)) if defaults else None,
        "curves": training_curves(files.metrics),
        "hardware": dict(zip(map(str, nodes), hardware_curves(list(nodes.values())), strict=True)),
        "nvidia_smi": {path.stem.removeprefix("nvidia-smi-"): read_text(path, MAX_SMI) for path in _smi_files(folder)},
        "confusion": confusion_matrix(files.confusion_matrix),
        "calibration": calibration_bins(files.calibration),
        "code_diff": read_text(files.code_diff, MAX_DIFF),
        "tensorboard": files.tensorboard.is_dir(),
    }
    return redact(source)


def _run_id(record: Source, files: RunFolder) -> str:
    """The record's own name where it can name a file, else the folder's."""
    for name in (record.get("run_id"), files.run_id):
        if isinstance(name, str) and RUN_ID_PATTERN.fullmatch(name) and ".." not in name:
            return name
    raise UserError(f"{files.path} has no run id that can name a page.")


def _shown_path(folder: Path) -> str:
    resolved = folder.resolve()
    return str(resolved.relative_to(REPOSITORY)) if resolved.is_relative_to(REPOSITORY) else str(resolved)


def _node_files(folder: Path) -> dict[int, list[Path]]:
    """By node rank: the files of earlier starts (hardware-node0.0.csv, …0.1.csv) and then the newest."""
    found = []
    for path in folder.glob("hardware-node*.csv"):
        rank, _, start = path.stem.removeprefix("hardware-node").partition(".")
        if rank.isdecimal() and (start.isdecimal() or not start):
            found.append((int(rank), int(start) if start else math.inf, path))
    nodes: dict[int, list[Path]] = {}
    for node_rank, _, path in sorted(found):
        nodes.setdefault(node_rank, []).append(path)
    return nodes


def _smi_files(folder: Path) -> list[Path]:
    """Of many nodes the dumps at their fullest first."""
    found = sorted(folder.glob("nvidia-smi-node*-*.txt"), key=lambda path: (not path.stem.endswith("-peak"), path))
    return sorted(found[:MAX_SMI_FILES])


def cleaned(text: str) -> str:
    """Without secrets and without where this clone lies; before any cut, as half a key is no longer recognised."""
    told = redact_text(text[:MAX_READ]).replace(f"{REPOSITORY}/", "")
    return re.sub(rf"{re.escape(str(REPOSITORY))}(?![\w-])", ".", told)


def read_text(path: Path, limit: int) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = cleaned(file.read(MAX_READ))
    except OSError:
        return ""
    return text if len(text) <= limit else f"{text[:limit]}\n… {len(text) - limit:,} more characters in {path.name}"


def read_yaml(path: Path) -> Source:
    """An empty mapping where there is none or it cannot be read."""
    try:
        loaded = foreign_files.read_yaml(path)
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def flatten(tree: Any, prefix: str = "") -> Source:
    """{"trainer.devices": 2, ...}; a list is one value."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    if not tree:
        return {prefix: {}} if prefix else {}
    flat: Source = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def differences(before: Source, after: Source) -> dict[str, list]:
    """{key: [value before, value after]} for what was changed; None where a side has no such key."""
    keys = [key for key in {**before, **after} if key.split(".")[0] not in NOT_COMPARED]
    pairs = {key: [before.get(key), after.get(key)] for key in sorted(keys)}
    return {key: pair for key, pair in pairs.items() if not is_same_setting(key, *pair)}


def is_same_setting(key: str, before: Any, after: Any) -> bool:
    """Whether two values of an option are one; of a class that moved to another module, its name counts."""
    if key.endswith("_target_") and isinstance(before, str) and isinstance(after, str):
        before, after = before.rpartition(".")[2], after.rpartition(".")[2]
    return bool(before == after)


def limited(value: Any, depth: int = 0) -> Any:
    """Only what JSON can hold, with long texts and lists cut: one strange record cannot swell the repository."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if number(value) is not None else str(value)[:MAX_TEXT]
    if depth > 12:
        return "…"
    if isinstance(value, dict):
        kept = list(value.items())[:MAX_ITEMS]
        return {redact_text(str(key)[:2000])[:200]: limited(item, depth + 1) for key, item in kept}
    if isinstance(value, list | tuple):
        return [limited(item, depth + 1) for item in value[:MAX_ITEMS]]
    text = cleaned(str(value))
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def source_path(logbook: Path, run_id: str) -> Path:
    return logbook / "runs" / f"{run_id}.json"


def dump(source: Source) -> str:
    """JSON with one line per part and per field of the record: a reviewer's diff stays readable."""
    lines = []
    for key, value in source.items():
        if key in ("record", "config", "changed", "curves") and isinstance(value, dict) and value:
            inner = ",\n".join(f"  {_json(name)}: {_json(item)}" for name, item in value.items())
            lines.append(f"{_json(key)}: {{\n{inner}\n}}")
        else:
            lines.append(f"{_json(key)}: {_json(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def write_if_changed(path: Path, text: str, *, kept: bool = True) -> bool:
    """Leaves an equal file alone, its time stamp too.

    Args:
        kept: written to last through a power cut; a page can be generated again and need not wait for the disk.
    """
    data = text.encode("utf-8", "backslashreplace")  # of names that are no UTF-8
    try:
        if path.read_bytes() == data:
            return False
    except OSError:
        pass
    if kept:
        write_atomically(path, lambda file: file.write(data), binary=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(data)
        os.replace(part, path)
    return True


def read_sources(logbook: Path) -> list[Source]:
    """All runs of a logbook, oldest first; those of a newer version of this program are said and left out.

    Raises:
        UserError: a file that is no such JSON (half a merge, say), named.
    """
    sources = []
    for path in (logbook / "runs").glob("*.json"):
        source = read_source(path)
        try:
            refuse_newer(mapping(source.get("record")), path)
        except UserError as error:
            log.warning(f"Left out: {error}")
        else:
            sources.append(source)
    return sorted(sources, key=started_key)


def read_source(path: Path) -> Source:
    try:
        source = foreign_files.read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no run of the logbook ({error}); restore it from git or delete it.") from None
    if not isinstance(source, dict):
        raise UserError(f"{path} is no run of the logbook: it holds no JSON object.")
    source["run_id"] = path.stem
    return source


def started_key(source: Source) -> tuple[str, str]:
    record = source.get("record")
    started = record.get("started_at") if isinstance(record, dict) else None
    return (started if isinstance(started, str) else "", source["run_id"])
