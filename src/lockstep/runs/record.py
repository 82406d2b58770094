"""The run record (run.json): its fields, its states, and the one function that changes it. Imports no torch."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.runs import foreign_files
from lockstep.runs.batch import states_accumulation
from lockstep.runs.errors import UserError
from lockstep.runs.files import seconds_between, utc_now, write_atomically
from lockstep.runs.typed_json import Part, WrongValue, from_json, to_json

SCHEMA_VERSION = 1
STATUSES = ("running", "finished", "failed", "interrupted", "lost")
HEARTBEAT_INTERVAL_S = 15.0
LOST_AFTER_S = 300.0
LOST_AFTER_STARTING_S = 3600.0  # it downloads and decodes, and its heart does not beat yet


@dataclass(kw_only=True)
class Failure(Part):
    """What ended a run, and where."""

    message: str | None = None
    rank: int | None = None
    host: str | None = None
    phase: str | None = None


@dataclass(kw_only=True)
class CodeState(Part):
    """tree_hash: sha256 of src, configs and requirements; dirty: with uncommitted changes."""

    commit: str | None = None
    dirty: bool | None = None
    tree_hash: str | None = None


@dataclass(kw_only=True)
class Host(Part):
    """A machine as its rank found it."""

    node_rank: int | None = None
    host: str | None = None
    cores: int | None = None
    system: str | None = None


@dataclass(kw_only=True)
class BestCheckpoint(Part):
    """path: from the run folder; metric: what was monitored and what it reached."""

    path: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    epoch: int | None = None
    step: int | None = None
    metric: dict[str, float] = field(default_factory=dict)
    s3_uri: str | None = None


@dataclass(kw_only=True)
class Upload(Part):
    """The best checkpoint in the bucket; left: kinds of files that are still to be sent."""

    uri: str | None = None
    sha256: str | None = None
    seconds: float | None = None
    step: int | None = None
    error: str | None = None
    left: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Restart(Part):
    """A later start of the same run. downtime_s: it was not running but should have; idle_s: it had finished.

    previous_world_size: ranks of the start before; the others are of this one.
    """

    at: str | None = None
    resumed_step: int | None = None
    lost_steps: int | None = None
    downtime_s: float | None = None
    idle_s: float | None = None
    command: str | None = None
    previous_status: str | None = None
    previous_world_size: int | None = None
    world_size: int | None = None
    num_nodes: int | None = None
    per_device_batch_size: int | None = None
    code: CodeState = field(default_factory=CodeState)


@dataclass(kw_only=True)
class Goodput(Part):
    """steps: kept steps over all that were computed. wall: seconds spent on kept steps over all seconds.

    Start-up, evaluation, downtime and steps that a crash undid count against wall.
    """

    steps: float | None = None
    wall: float | None = None


@dataclass(kw_only=True)
class Cost(Part):
    """Of all nodes for as long as the run ran; price_per_hour: USD, of one machine."""

    usd: float | None = None
    usd_per_epoch: float | None = None
    price_per_hour: float | None = None
    instance: str | None = None


@dataclass(kw_only=True)
class StepSeconds(Part):
    """Of an optimizer step."""

    p50: float | None = None
    p95: float | None = None
    mean: float | None = None


@dataclass(kw_only=True)
class RankSpeed(Part):
    """own_seconds: median of what a rank does in a step before it waits for the others."""

    rank: int | None = None
    host: str | None = None
    own_seconds: float | None = None


@dataclass(kw_only=True)
class Throughput(Part):
    """In training. mfu: model FLOPs over the device's peak, 0 to 1; data_wait_share: 0 to 1."""

    images_per_s: float | None = None
    images_per_s_per_device: float | None = None
    step_seconds: StepSeconds = field(default_factory=StepSeconds)
    data_wait_share: float | None = None
    mfu: float | None = None
    gflops_per_image: float | None = None
    peak_tflops: float | None = None
    fastest_rank: RankSpeed = field(default_factory=RankSpeed)
    slowest_rank: RankSpeed = field(default_factory=RankSpeed)


@dataclass(kw_only=True)
class Gpu(Part):
    name: str | None = None
    memory_gib: float | None = None


@dataclass(kw_only=True)
class Node(Part):
    """A machine and how busy it was. stats: {series: {p10, p50, p90, max}}."""

    node_rank: int | None = None
    host: str | None = None
    cpu: str | None = None
    cores: int | None = None
    memory_gib: float | None = None
    gpus: list[Gpu] = field(default_factory=list)
    stats: dict[str, dict[str, float | None]] = field(default_factory=dict)
    throttled: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Hardware(Part):
    """Ordered by node rank."""

    nodes: list[Node] = field(default_factory=list)


@dataclass(kw_only=True)
class LargestBatch(Part):
    """What data.global_batch_size=max found. bounded_by: "memory" or "data set"; tried: [batch, share of memory]."""

    per_device: int | None = None
    global_: int | None = None
    probes: int | None = None
    out_of_memory: int | None = None
    seconds: float | None = None
    peak_memory_gib: float | None = None
    limit_gib: float | None = None
    prediction_error: float | None = None
    bounded_by: str | None = None
    tried: list[list[float | None]] = field(default_factory=list)


@dataclass(kw_only=True)
class Images(Part):
    """What becomes of an image. path: array or loader; mean, std: as used, of pixels from 0 to 1; resize: in pixels.

    from_weights: which of these values the pretrained weights said; skipped: files that cannot be decoded.
    """

    path: str | None = None
    why: str | None = None
    augmentation: str | None = None
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    crop_pct: float | None = None
    interpolation: str | None = None
    resize: int | None = None
    fit: str | None = None
    from_weights: list[str] = field(default_factory=list)
    skipped: int | None = None


@dataclass(kw_only=True)
class Swarm(Part):
    """steps: of all peers together; peers: in the last of them."""

    name: str | None = None
    steps: int | None = None
    peers: int | None = None


@dataclass(kw_only=True)
class RunRecord(Part):
    """One run from its start to its end, across its restarts. Times are UTC, as 2026-11-21T10:30:12Z.

    monitor: the metric that chooses the best checkpoint, by its largest value (monitor_mode max) or smallest (min).
    ended_by: max_time, where that ended the training before its epochs and steps did. per_device_batch_limit: images
    that a device takes at a time at most: of the first start, or of the last that stated its accumulation.
    initial_weights_sha256: of the file that ckpt_path or model.weights names.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str | None = None
    task_name: str | None = None
    tags: list[str] = field(default_factory=list)
    status: str | None = None
    phase: str | None = None
    error: Failure = field(default_factory=Failure)
    exit_code: int | None = None
    started_at: str | None = None
    updated_at: str | None = None
    finished_at: str | None = None
    command: str | None = None
    overrides: list[str] = field(default_factory=list)
    experiment: str | None = None
    code: CodeState = field(default_factory=CodeState)
    versions: dict[str, str] = field(default_factory=dict)
    hosts: list[Host] = field(default_factory=list)
    launcher: str | None = None
    agent: str | None = None
    model: str | None = None
    data: str | None = None
    trainer: str | None = None
    world_size: int | None = None
    num_nodes: int | None = None
    devices: int | str | None = None
    num_gpus: int | None = None
    accelerator: str | None = None
    precision: str | int | None = None
    seed: int | None = None
    global_batch_size: int | None = None
    per_device_batch_size: int | None = None
    per_device_batch_limit: int | None = None
    accumulate_grad_batches: int | None = None
    max_epochs: int | None = None
    max_time_s: float | None = None
    ended_by: str | None = None
    monitor: str = "val/acc"
    monitor_mode: str = "max"
    epochs: int | None = None
    steps: int | None = None
    num_parameters: int | None = None
    num_trained_parameters: int | None = None
    num_train: int | None = None
    num_val: int | None = None
    num_test: int | None = None
    left_out_per_epoch: int | None = None
    data_hash: str | None = None
    images: Images = field(default_factory=Images)
    metrics: dict[str, float | str] = field(default_factory=dict)
    test_acc_per_class: dict[str, float] = field(default_factory=dict)
    fit_seconds: float | None = None
    images_per_s: float | None = None
    throughput: Throughput = field(default_factory=Throughput)
    peak_memory_gib: float | None = None
    hardware: Hardware = field(default_factory=Hardware)
    goodput: Goodput = field(default_factory=Goodput)
    cost: Cost = field(default_factory=Cost)
    largest_batch: LargestBatch = field(default_factory=LargestBatch)
    swarm: Swarm = field(default_factory=Swarm)
    best_checkpoint: BestCheckpoint = field(default_factory=BestCheckpoint)
    checkpoint_stall_s: float | None = None
    upload: Upload = field(default_factory=Upload)
    upload_stall_s: float | None = None
    initial_weights: str | None = None
    initial_weights_sha256: str | None = None
    resumed_from: str | None = None
    spot_notice_at: float | None = None
    restarts: list[Restart] = field(default_factory=list)


def read_record(path: Path) -> RunRecord:
    """
    Raises:
        UserError: there is none, it is not one, a value of it is wrong, or a newer version wrote it.
    """
    values = read_json(path)
    try:
        return from_json(RunRecord, values)
    except WrongValue as error:
        raise UserError(f"{path} is not a run record: {error}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The record's JSON, its values not looked at.

    Raises:
        UserError: as read_record, but for wrong values.
    """
    try:
        values = foreign_files.read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no run folder: it has no {path.name}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not a run record: {error}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a run record: it holds no JSON object.")
    refuse_newer(values, path)
    return values


def refuse_newer(values: dict[str, Any], path: Path) -> None:
    """
    Raises:
        UserError: the record is of a newer schema than this program's.
    """
    version = values.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {version} and this program reads up to {SCHEMA_VERSION}: update this clone."
        )


def write_record(path: Path, record: RunRecord) -> None:
    """Write the whole record, atomically; stamps `updated_at` and derives goodput and cost."""
    record.updated_at = utc_now()
    record.goodput = goodput(record)
    record.cost = cost(record)
    text = json.dumps(to_json(record), indent=1, allow_nan=False, default=str)
    write_atomically(path, lambda file: file.write(text + "\n"))


@contextlib.contextmanager
def update_record(path: Path) -> Iterator[RunRecord]:
    """The only way to change a record on disk: read, let the block change it, write. An exception writes nothing.

    Raises:
        UserError: as read_record.
    """
    record = read_record(path)
    yield record
    write_record(path, record)


def status_of(record: RunRecord, now: str | None = None) -> str:
    """The record's status; `lost` where it says running and its heartbeat is older than LOST_AFTER_S."""
    if record.status != "running":
        return record.status if record.status in STATUSES else "lost"
    try:
        age_s = seconds_between(str(record.updated_at or record.started_at), now or utc_now())
    except (ValueError, TypeError):  # no time, or one without a zone
        return "lost"
    silence_s = LOST_AFTER_STARTING_S if record.phase == "start" else LOST_AFTER_S
    return "lost" if age_s > silence_s else "running"


KEPT = (
    "started_at", "fit_seconds", "best_checkpoint", "restarts", "command", "code", "epochs", "largest_batch",
    "initial_weights", "initial_weights_sha256",
)  # fmt: skip


def continued(previous: RunRecord, record: RunRecord, *, step: int, checkpoint: str | None) -> RunRecord:
    """One record for one run across its restarts: the beginning and what was reached stay.

    Args:
        record: of this start.
        step, checkpoint: what it goes on from; 0 where it begins anew.
    """
    restart = restart_of(previous, record, step)
    for name in KEPT:
        if value := getattr(previous, name):
            setattr(record, name, value)
    if not states_accumulation(record.overrides):
        record.per_device_batch_limit = previous.per_device_batch_limit or previous.per_device_batch_size
    # Of a checkpoint that may not stay the best: a test comes again.
    record.metrics = {name: value for name, value in previous.metrics.items() if not name.startswith("test/")}
    record.restarts = [*record.restarts, restart]
    record.resumed_from = checkpoint if step else None
    record.steps = step  # what was lost is counted once, though this start too may be killed before it trains
    record.other = {**previous.other, **record.other}
    return record


def restart_of(previous: RunRecord, record: RunRecord, step: int) -> Restart:
    pause_s = _between(previous.updated_at, record.started_at) if previous.updated_at else None
    was_over = previous.status == "finished"
    return Restart(
        at=record.started_at,
        resumed_step=step,
        lost_steps=max(0, (previous.steps or 0) - step),
        downtime_s=None if was_over else pause_s,
        idle_s=pause_s if was_over else None,  # it was done, and is made longer
        command=record.command,
        previous_status=previous.status,
        previous_world_size=previous.world_size,
        world_size=record.world_size,
        num_nodes=record.num_nodes,
        per_device_batch_size=record.per_device_batch_size,
        code=record.code if previous.code.tree_hash != record.code.tree_hash else CodeState(),
    )


def running_seconds(record: RunRecord) -> float:
    """From start to the last sign of life, without the time between an end and the start after it."""
    alive = _between(record.started_at, record.finished_at or record.updated_at)
    pauses = [restart.downtime_s or restart.idle_s or 0.0 for restart in record.restarts]
    return max(alive - sum(pauses), 0.0)


def cost(record: RunRecord) -> Cost:
    """From price_per_hour; what stands there already where there is no price."""
    price = record.cost.price_per_hour
    if price is None:
        return record.cost
    usd = price * (record.num_nodes or 1) * running_seconds(record) / 3600
    each = round(usd / record.epochs, 4) if record.epochs else None
    return Cost(usd=round(usd, 4), usd_per_epoch=each, price_per_hour=price, instance=record.cost.instance)


def goodput(record: RunRecord) -> Goodput:
    kept = record.steps or 0
    lost = sum(restart.lost_steps or 0 for restart in record.restarts)
    if not kept:
        return Goodput()
    wall = _between(record.started_at, record.finished_at or record.updated_at)
    wall -= sum(restart.idle_s or 0.0 for restart in record.restarts)
    step_s = record.throughput.step_seconds.mean
    share = round(min(kept * step_s / wall, 1.0), 4) if step_s and wall > 0 else None
    return Goodput(steps=round(kept / (kept + lost), 4), wall=share)


def _between(earlier: str | None, later: str | None) -> float:
    try:
        return seconds_between(earlier, later) if earlier and later else 0.0
    except (ValueError, TypeError):  # no time, or one without a zone
        return 0.0
