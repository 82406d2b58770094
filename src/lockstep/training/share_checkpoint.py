"""One checkpoint for all ranks of a run: the newest that any node has, and its bytes on every node."""

import contextlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.callbacks.ranks import broadcast_object, gather_objects
from lockstep.distributed.cluster import Cluster
from lockstep.launch.plan import ResumePoint, RunPlan
from lockstep.runs.batch import Batch
from lockstep.runs.errors import UserError
from lockstep.runs.files import Checksum, checksum_of
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import RunRecord, read_record, take_over_record
from lockstep.runs.typed_json import from_json, to_json
from lockstep.storage.checkpoint_files import complete, fault_of, measure, parse_checksums
from lockstep.storage.run_bucket import FILE_NAME
from lockstep.storage.shards import shards_of

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**20
Files = dict[str, Checksum]  # by name

Offer = tuple[str | None, int | None]  # a checkpoint and its step: None where the user named it for a new run


def share_checkpoint(plan: RunPlan) -> RunPlan:
    """The run goes on from the newest whole checkpoint that any node has; nodes without a copy of it get its bytes.

    Of a sharded one each node may hold its own ranks' shards only. One of which shards are nowhere is passed over.

    Returns:
        The plan with the same step and batch on every rank, and a path that exists on this node.
    """
    cluster, folder = plan.cluster, plan.folder
    mine: Offer = (plan.checkpoint, plan.resume_step)
    while True:
        offers = [_offer(each) for each in gather_objects(mine)]
        source = newest_offer(offers)
        path, step = offers[source]
        if path is None:
            return _starting_at(_with_batch_of(plan, source), None, step)
        try:
            local = fetch_from_rank_zero(Path(path), cluster, folder, source)
            break
        except UserError as error:
            if not step:
                raise  # the user named it
            if cluster.is_rank_zero:
                log.info(f"Passed over: {error}")
            mine = _before(folder, step) or (plan.initial_weights, None if plan.resume is None else 0)
    plan = _starting_at(_with_batch_of(plan, source), str(local), step)
    if source != 0:
        known = cluster.rank == source and folder.record.exists()
        record = broadcast_object(to_json(read_record(folder.record)) if known else None, source)
        if cluster.is_rank_zero:
            log.info(f"Going on from step {step}: node {source // cluster.devices} has the newest checkpoint.")
            before = record and from_json(RunRecord, record)
            take_over_record(folder.record, before, plan.batch, step=step or 0, checkpoint=path)
    return plan


def _with_batch_of(plan: RunPlan, source: int) -> RunPlan:
    """Cut as on the rank whose checkpoint counts: the others may not know how many images a device of the run takes."""
    accumulate, batch = broadcast_object(plan.batch.accumulate, source), plan.batch
    return replace(plan, batch=Batch.cut(batch.global_size, plan.cluster.world_size, accumulate))


def _starting_at(plan: RunPlan, path: str | None, step: int | None) -> RunPlan:
    """From the run's own checkpoint where a step was made, else with these weights from the start."""
    if step:
        return replace(plan, resume=ResumePoint(step, path))
    return replace(plan, resume=None if step is None else ResumePoint(0), initial_weights=path)


def _before(folder: RunFolder, step: int) -> Offer | None:
    """What a rank offers after the checkpoint of `step` could not be had: the run's newest here of an earlier step."""
    for older, sidecar in complete(folder.checkpoints):
        if sidecar.step < step and fault_of(older) is None:
            return str(older), sidecar.step
    return None


def newest_offer(offers: Sequence[Offer]) -> int:
    """The rank whose (checkpoint, step) is the furthest; rank 0 where nobody states a step."""
    steps = [step if path is not None and step is not None else -1 for path, step in offers]
    return steps.index(max(steps))


def fetch_from_rank_zero(path: Path, cluster: Cluster, folder: RunFolder, source: int = 0) -> Path:
    """A local path to the checkpoint that lies at `path` on the host of rank 0 (or `source`).

    The same place in this node's run folder where it has all its bytes there, else a copy in from-rank-0/ of it, file
    by file, each from the first node that has it: of a sharded checkpoint every node may hold its own ranks' files
    only. Every rank calls it.

    Raises:
        UserError: a file is on no node, or a copy is not what was sent.
    """
    home, told = folder.path.resolve(), None
    if cluster.rank == source:
        inside = path.resolve().is_relative_to(home)
        listed = {name: asdict(file) for name, file in _files_of(path).items()}
        told = [listed, str(path.resolve().relative_to(home)) if inside else None]
    files, within = _told(broadcast_object(told, source))
    path, cache = home / within if within else path, folder.path / "from-rank-0"
    here: list[str] = []
    if cluster.rank == cluster.node_rank * cluster.devices:  # one rank of each node looks, for all of them
        here = [name for name, file in files.items() if _is_whole(path / name, file)]
    everyone = gather_objects(here)
    holders = {name: [rank for rank, names in enumerate(everyone) if name in names] for name in files}
    if lost := next((name for name in files if not holders[name]), None):
        raise UserError(f"{path.name} is torn: {lost} is on none of these nodes.")
    if all(len(ranks) == cluster.num_nodes for ranks in holders.values()):
        return path
    have = everyone[cluster.node_rank * cluster.devices]
    target = path if len(have) == len(files) else cache / path.name
    writes = cluster.local_rank == 0 and target != path
    if writes:
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)
    for name, file in files.items():
        if writes and name in have:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path / name, target / name)
        if len(holders[name]) < cluster.num_nodes:
            reads = cluster.rank == holders[name][0]
            gets = writes and name not in have
            _copy_file(path / name, target / name, file.bytes, reads, gets, holders[name][0])
    whole = not writes or all(_is_whole(target / name, file) for name, file in files.items())
    if not all(gather_objects(whole)):
        raise UserError(f"{path.name} did not arrive whole on every node: is there room in {cache}?")
    return target


def _offer(given: Any) -> Offer:
    """
    Raises:
        RuntimeError: a rank sent something else.
    """
    match given:
        case [str() | None as path, int() | None as step]:
            return path, step
    raise RuntimeError(f"a rank offers no checkpoint: {str(given)[:100]}")


def _told(given: Any) -> tuple[Files, str | None]:
    """The files of a checkpoint, and where it lies in the run's folder.

    Raises:
        RuntimeError: something else, or a name that leaves the folder.
    """
    try:
        listed, within = given
        files = parse_checksums(listed)
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError):
        raise RuntimeError("a rank names no files of a checkpoint") from None
    names = [name for name in [*files, within] if name]
    if bad := next((name for name in names if not _stays_inside(name)), None):
        raise RuntimeError(f"a rank names {str(bad)[:100]!r}, which no checkpoint has")
    return files, within


def _stays_inside(name: Any) -> bool:
    return isinstance(name, str) and all(FILE_NAME.fullmatch(part) for part in name.split("/"))


def _files_of(path: Path) -> Files:
    """By name: a file under the empty one; of shards also what lies on other nodes."""
    found = measure(path)
    if found.files is None:
        return {"": Checksum(found.bytes, found.sha256)}
    return {**found.files, **shards_of(path)}


def _is_whole(path: Path, wanted: Checksum) -> bool:
    """By its size, and where that is right by its content."""
    return path.is_file() and path.stat().st_size == wanted.bytes and checksum_of(path) == wanted


def _copy_file(source: Path, target: Path, size: int, reads: bool, writes: bool, rank: int) -> None:
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(source.open("rb")) if reads else None
        if writes:
            target.parent.mkdir(parents=True, exist_ok=True)
        writer = stack.enter_context(target.open("wb")) if writes else None
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            if reader:
                data = torch.frombuffer(bytearray(reader.read(length)), dtype=torch.uint8)
            else:
                data = torch.empty(length, dtype=torch.uint8)
            dist.broadcast(data, src=rank)
            if writer:
                writer.write(data.numpy().tobytes())
