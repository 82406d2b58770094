"""The run record (run.json): its version, its states, how it is read and written. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from lockstep.runs.errors import UserError
from lockstep.runs.files import seconds_between, utc_now, write_atomically

SCHEMA_VERSION = 1
STATUSES = ("running", "finished", "failed", "interrupted", "lost")
HEARTBEAT_INTERVAL_S = 15.0
LOST_AFTER_S = 300.0
LOST_AFTER_STARTING_S = 3600.0  # it downloads and decodes, and its heart does not beat yet


def read_record(path: Path) -> dict[str, Any]:
    """A run record as it was written.

    Raises:
        UserError: there is none, or it is not one.
    """
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no run folder: it has no {path.name}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a run record: {error}.") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} is not a run record: it holds no JSON object.")
    return record


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the whole record, atomically; stamps `updated_at`."""
    record["updated_at"] = utc_now()
    text = json.dumps(record, indent=1, sort_keys=False, allow_nan=False, default=str)
    write_atomically(path, lambda file: file.write(text + "\n"))


def status_of(record: dict[str, Any], now: str | None = None) -> str:
    """The record's status; `lost` where it says running and its heartbeat is older than LOST_AFTER_S."""
    status = record.get("status")
    if status != "running":
        return status if status in STATUSES else "lost"
    updated_at = record.get("updated_at") or record.get("started_at")
    try:
        age_s = seconds_between(str(updated_at), now or utc_now())
    except (ValueError, TypeError):  # no time, or one without a zone
        return "lost"
    silence_s = LOST_AFTER_STARTING_S if record.get("phase") == "start" else LOST_AFTER_S
    return "lost" if age_s > silence_s else "running"


def continued(previous: dict[str, Any], record: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """One record for one run across its restarts: the beginning and what was reached stay."""
    kept = (
        "started_at", "metrics", "fit_seconds", "best_checkpoint", "restarts", "command", "code", "steps", "epochs",
        "largest_batch", "initial_weights",
    )  # fmt: skip
    step = config.get("resume_step") or 0
    pause_s = _seconds(previous.get("updated_at"), record["started_at"])
    was_over = previous.get("status") == "finished"
    restart = {
        "at": record["started_at"],
        "resumed_step": step,
        "lost_steps": max(0, (previous.get("steps") or 0) - step),
        "downtime_s": None if was_over else pause_s,
        "idle_s": pause_s if was_over else None,  # it was done, and is made longer
        "command": record["command"],
        "previous_status": previous.get("status"),
    }
    if (previous.get("code") or {}).get("tree_hash") != (record.get("code") or {}).get("tree_hash"):
        restart["code"] = record["code"]
    record = {**record, **{key: previous[key] for key in kept if previous.get(key) is not None}}
    # Of a checkpoint that may not stay the best: a test comes again.
    reached = record.get("metrics") or {}
    record["metrics"] = {name: value for name, value in reached.items() if not name.startswith("test/")}
    record["restarts"] = [*record["restarts"], restart]
    record["resumed_from"] = config.get("ckpt_path") if step else None
    record["steps"] = step  # what was lost is counted once, though this start too may be killed before it trains
    return record


def take_over_record(path: Path, previous: dict[str, Any] | None, config: dict[str, Any]) -> None:
    """On node 0, where the run's earlier record and newest checkpoint were found on another node."""
    if previous is not None:
        write_record(path, continued(previous, read_record(path), config))


def _seconds(earlier: str | None, later: str) -> float | None:
    return seconds_between(earlier, later) if earlier else None
