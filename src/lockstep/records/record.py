"""The run record (run.json): its fields, its statuses, and functions to read and update it.

Imports no torch.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from lockstep.process.errors import UserError
from lockstep.process.files import locked_file, utc_now, write_atomically
from lockstep.records.batch import states_accumulation
from lockstep.records.folder import RunFolder
from lockstep.records.metric_names import split_stage

# Version 1 can still be read.
SCHEMA_VERSION = 2
STATUSES = ("running", "finished", "failed", "interrupted", "lost")
HEARTBEAT_INTERVAL_S = 15.0
# A writer holds the lock for a moment only, unless it hangs.
LOCK_WAIT_S = 10.0
LOST_AFTER_S = 300.0
# Downloads and decoding have no heartbeat.
LOST_AFTER_STARTING_S = 3600.0
KEPT_ON_RESTART = (
    "uuid",
    "started_at",
    "fit_seconds",
    "best_checkpoint",
    "restarts",
    "command",
    "code",
    "epochs",
    # A start that trains clears this field.
    "ended_by",
    "largest_batch",
    "initial_weights",
    "initial_weights_sha256",
    "reports",
    # A start that trains measures these fields. The last start may not train.
    "images_per_s",
    "throughput",
    "peak_memory_gib",
    "usable_memory_gib",
    "hardware",
)


# In lower case. An illegal memory access is another error.
OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "outofmemory",
    "alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "unable to allocate",
)


class JsonObject(dict[str, Any]):
    """An object in the record. Its keys are also attributes, and a missing one is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@dataclass(kw_only=True)
class RunRecord:
    """One run from its start to its end, across its restarts.

    Times are UTC, as 2026-11-21T10:30:12Z.

    Attributes:
        uuid: 32 random hex digits of this run, because another run may have the same run_id.
        error: message, rank, host and phase, if the run failed.
        code: commit or commit_unknown (the reason), dirty, and tree_hash.
        compiled: whether torch.compile has compiled the net.
        per_device_batch_limit: the per-device batch of the last start that set
            accumulate_grad_batches. If none did, it is that of the first start.
        ended_by: "max_time", "early_stopping" or "pruned" if that ended the training before its
            epochs and steps did.
        monitor: the metric that chooses the best checkpoint.
        data_report: images by class and split, and files left out.
        images: how they are preprocessed.
        cost: usd and usd_per_epoch of all nodes; price_per_hour of one node.
        largest_batch: the batch that data.global_batch_size=max has found.
        best_checkpoint: path in the run folder, bytes, sha256, epoch, step, s3_uri, and the
            monitored metric as {name: value}.
        upload: uri, sha256 and step of the best checkpoint in the bucket. If a newer one could not
            be uploaded, error is the reason.
        restarts: an entry for each restart, see `merge_restart`.
        summary: the values that pages print, see lockstep.logbook.build.
        reports: {title: URL} of interactive reports that contain the run.
        config: only in the logbook, because a run folder has config.yaml.
        other: fields of other versions and of the user's callbacks.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str | None = None
    uuid: str | None = None
    task_name: str | None = None
    tags: list[str] = field(default_factory=list)
    status: str | None = None
    phase: str | None = None
    error: JsonObject = field(default_factory=JsonObject)
    exit_code: int | None = None
    started_at: str | None = None
    updated_at: str | None = None
    finished_at: str | None = None
    command: str | None = None
    overrides: list[str] = field(default_factory=list)
    experiment: str | None = None
    code: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    hosts: list[dict[str, Any]] = field(default_factory=list)
    launcher: str | None = None
    agent: str | None = None
    model: str | None = None
    data: str | None = None
    trainer: str | None = None
    world_size: int | None = None
    num_nodes: int | None = None
    accelerator: str | None = None
    precision: str | int | None = None
    compiled: bool | None = None
    seed: int | None = None
    global_batch_size: int | None = None
    per_device_batch_size: int | None = None
    per_device_batch_limit: int | None = None
    accumulate_grad_batches: int | None = None
    ended_by: str | None = None
    # Its largest or smallest value chooses the best checkpoint.
    monitor: str = "val/acc"
    epochs: int | None = None
    steps: int | None = None
    num_parameters: int | None = None
    num_trained_parameters: int | None = None
    num_train: int | None = None
    num_val: int | None = None
    num_test: int | None = None
    left_out_per_epoch: int | None = None
    data_hash: str | None = None
    data_report: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float | str] = field(default_factory=dict)
    fit_seconds: float | None = None
    images_per_s: float | None = None
    throughput: dict[str, Any] = field(default_factory=dict)
    peak_memory_gib: float | None = None
    usable_memory_gib: float | None = None
    hardware: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)
    largest_batch: dict[str, Any] = field(default_factory=dict)
    swarm: dict[str, Any] = field(default_factory=dict)

    best_checkpoint: JsonObject = field(default_factory=JsonObject)

    upload: JsonObject = field(default_factory=JsonObject)
    initial_weights: str | None = None
    initial_weights_sha256: str | None = None
    restarts: list[JsonObject] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    reports: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict, repr=False)

    def update(self, values: Mapping[str, Any]) -> None:
        """Set fields from JSON values or from values of their types.

        A value without a field goes into `other`.

        Raises:
            TypeError, ValueError: a value is not of its field's type.
        """
        factories = {item.name: item.default_factory for item in fields(self)}
        del factories["other"]
        for name, value in values.items():
            factory = factories.get(name)
            if factory is None:
                self.other[name] = value
            elif factory is MISSING:
                setattr(self, name, value)
            elif value is None:
                setattr(self, name, factory())
            elif factory is JsonObject:
                setattr(self, name, JsonObject(value))
            elif isinstance(value, cast(type, factory)):
                setattr(self, name, value)
            else:
                raise TypeError(f"its {name} is a {type(value).__name__}")
        self.restarts = [JsonObject(value) for value in self.restarts]


def read_record(path: Path) -> RunRecord:
    """Return the record at `path`.

    Raises:
        UserError: the file is missing, no record, or of a newer version.
    """
    record = RunRecord()
    try:
        values = json.loads(path.read_bytes())
        version = values.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise UserError(
                f"{path} has schema version {version} but this code reads only up to "
                f"{SCHEMA_VERSION}: update the code."
            )
        record.update(values)
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a run folder: it has no {path.name}.") from None
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a run record: {error}.") from None
    return record


def has_trained(folder: RunFolder) -> bool:
    """Return whether a run has trained a step or finished.

    If not, its id may be used again with other options.
    """
    if any(folder.checkpoints.glob("*.ckpt")):
        return True
    if not folder.record_path.exists():
        return False
    record = read_record(folder.record_path)
    return bool(record.steps) or record.status == "finished"


def write_record(path: Path, record: RunRecord) -> None:
    """Update `updated_at` and `cost`, and write the record atomically."""
    record.schema_version = SCHEMA_VERSION
    record.updated_at = utc_now()
    _update_cost(record)
    write_record_as_is(path, record)


def _update_cost(record: RunRecord) -> None:
    """Compute the cost of the run so far. The pauses before restarts cost nothing."""
    price = record.cost.get("price_per_hour")
    before, running_s = _cost_of_earlier_starts(record)
    if (price is None and not before) or not running_s >= 0:
        return
    usd = before + (price or 0.0) * (record.num_nodes or 1) * running_s / 3600
    of_epoch = round(usd / record.epochs, 4) if record.epochs else None
    record.cost = {"usd": round(usd, 4), "usd_per_epoch": of_epoch, "price_per_hour": price}


def _cost_of_earlier_starts(record: RunRecord) -> tuple[float, float]:
    """Return the cost of earlier starts in USD, and the seconds to pay in addition."""
    end = record.finished_at or record.updated_at
    last = record.restarts[-1] if record.restarts else JsonObject()
    if last.usd_before is not None:
        # Earlier starts may have run on other nodes at another price.
        return last.usd_before, _seconds_between(last.at, end)
    running_s = _seconds_between(record.started_at, end)
    for restart in record.restarts:
        running_s -= restart.downtime_s or restart.idle_s or 0.0
    return 0.0, max(running_s, 0.0)


def write_record_as_is(path: Path, record: RunRecord) -> None:
    """Write the record as it is."""
    text = json.dumps(as_json(record), indent=1, allow_nan=False, default=str)
    write_atomically(path, lambda file: file.write(text + "\n"))


def as_json(record: RunRecord) -> dict[str, Any]:
    """Return the JSON values for run.json. An object without values is null."""
    values = {name: value for name, value in vars(record).items() if name != "other"}
    values |= record.other
    for name, value in values.items():
        if isinstance(value, JsonObject) and all(item is None for item in value.values()):
            values[name] = None
    return values


@contextlib.contextmanager
def locked_record(path: Path) -> Iterator[None]:
    """Hold the lock of run.json, for a block that reads the record and writes it back.

    A writer that hangs must not stop a training. So after LOCK_WAIT_S the block runs without the
    lock.
    """
    with locked_file(path.with_name(f".{path.name}.lock"), LOCK_WAIT_S):
        yield


@contextlib.contextmanager
def update_record(path: Path) -> Iterator[RunRecord]:
    """Read the record, let the block change it, and write it unless the block raises."""
    with locked_record(path):
        record = read_record(path)
        yield record
        write_record(path, record)


def is_out_of_memory(message: str) -> bool:
    """Return whether an error says that memory ran out."""
    return any(sign in message.lower() for sign in OUT_OF_MEMORY_SIGNS)


def status_of(record: RunRecord, now: str | None = None) -> str:
    """Return the record's status.

    It is `lost` if the status is unknown, or if it is running without a recent heartbeat.
    """
    if record.status != "running":
        return record.status if record.status in STATUSES else "lost"
    limit_s = LOST_AFTER_STARTING_S if record.phase == "start" else LOST_AFTER_S
    silent_s = _seconds_between(record.updated_at or record.started_at, now or utc_now())
    return "running" if silent_s <= limit_s else "lost"


def merge_restart(previous: RunRecord, record: RunRecord, *, step: int) -> RunRecord:
    """Merge the record of the previous start into the record of this start, and return it.

    Args:
        step: the step at which this start resumes; 0: it starts from scratch.
    """
    # The pause before this start is idle if the previous one had finished, else it is downtime.
    silent_s = _seconds_between(previous.updated_at, record.started_at)
    pause = "idle_s" if previous.status == "finished" else "downtime_s"
    is_same_code = record.code.get("tree_hash") == previous.code.get("tree_hash")
    restart = JsonObject(
        at=record.started_at,
        resumed_step=step,
        lost_steps=max(0, (previous.steps or 0) - step),
        downtime_s=None,
        idle_s=None,
        command=record.command,
        previous_world_size=previous.world_size,
        world_size=record.world_size,
        code={} if is_same_code else record.code,
        usd_before=previous.cost.get("usd"),
    )
    restart[pause] = None if math.isnan(silent_s) else silent_s

    for name in KEPT_ON_RESTART:
        value = getattr(previous, name)
        if value:
            setattr(record, name, value)
    record.restarts = [*record.restarts, restart]
    if not states_accumulation(record.overrides):
        limit = previous.per_device_batch_limit or previous.per_device_batch_size
        record.per_device_batch_limit = limit
    # Test metrics belong to a checkpoint that may not remain the best.
    metrics = previous.metrics.items()
    record.metrics = {name: value for name, value in metrics if split_stage(name)[0] != "test"}
    # If this start is killed before it trains, the lost steps are not counted again.
    record.steps = step
    record.other = {**previous.other, **record.other}
    return record


def _seconds_between(earlier: str | None, later: str | None) -> float:
    """Return the seconds between two times; nan if one is missing or has no zone."""
    try:
        duration = datetime.fromisoformat(str(later)) - datetime.fromisoformat(str(earlier))
    except (ValueError, TypeError):
        return math.nan
    return duration.total_seconds()
