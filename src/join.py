"""The ranks of one run find each other: store, process group, and proof that all run the same thing."""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import provenance
from cluster import Cluster
from compose import REPOSITORY
from errors import UserError
from launch import config_hash

SPEAK_INTERVAL_S = 5.0

def join(cluster: Cluster, device: torch.device, timeout_s: float) -> Any:
    """Make the default process group, saying which ranks are still missing; returns its store.

    Raises:
        UserError: a rank did not come in time.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _store(cluster, timeout_s)
    _wait_for_all(store, cluster, timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("lockstep", store),
        rank=cluster.rank,
        world_size=cluster.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return store


def _store(cluster: Cluster, timeout_s: float) -> Any:
    """torchrun's agent serves a store already; else rank 0 does."""
    serves = cluster.rank == 0 and cluster.launcher != "torchrun"
    try:
        return dist.TCPStore(
            cluster.master_addr, cluster.master_port, is_master=serves, wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
    except (RuntimeError, dist.DistError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {cluster.rank} cannot reach rank 0 at {cluster.master_addr}:{cluster.master_port} "
            f"within {timeout_s:.0f} s ({reason}): check MASTER_ADDR and MASTER_PORT."
        ) from None


def _wait_for_all(store: Any, cluster: Cluster, timeout_s: float) -> None:
    store.set(f"lockstep/here/{cluster.rank}", "1")
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    while True:
        missing = [rank for rank in range(cluster.world_size) if not store.check([f"lockstep/here/{rank}"])]
        if not missing:
            return
        nodes = ", ".join(str(node) for node in sorted({rank // cluster.devices for rank in missing}))
        if time.monotonic() > deadline:
            raise UserError(f"node rank {nodes} did not arrive within {timeout_s:.0f} s: is it running the same command?")
        if time.monotonic() > speak_at and cluster.local_rank == 0:
            print(f"Waiting for node rank {nodes} (ranks {', '.join(map(str, missing[:8]))}) …", flush=True)
            speak_at += SPEAK_INTERVAL_S
        time.sleep(0.05)


def check_all_equal(config: dict[str, Any], cluster: Cluster) -> list[dict[str, Any]]:
    """Every rank's host facts, in rank order, once all run the same code, options and packages.

    Raises:
        UserError: on every rank, naming the first that differs.
    """
    mine = {
        "tree_hash": provenance.tree_hash(REPOSITORY), "config_hash": config_hash(config),
        "versions": provenance.versions(), **provenance.host(cluster.node_rank),
    }  # fmt: skip
    everyone: list[Any] = [None] * cluster.world_size
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        who = f"rank {rank} on {other['host']}"
        if other["tree_hash"] != everyone[0]["tree_hash"]:
            raise UserError(f"{who} runs other code than rank 0: make src, configs and requirements.txt equal on all nodes.")
        if other["config_hash"] != everyone[0]["config_hash"]:
            raise UserError(f"{who} runs with other options than rank 0: give every node the same command.")
        for name, version in everyone[0]["versions"].items():
            if other["versions"][name] != version:
                raise UserError(f"{who} has {name} {other['versions'][name]}, rank 0 has {version}: run make install there.")
    return everyone


def share_checkpoint(config: dict[str, Any], cluster: Cluster, folder: Any) -> None:
    """Rank 0 decides which checkpoint the run goes on from; nodes without a copy of it get its bytes.

    Sets config["ckpt_path"] to a path that exists on this node, and config["resume_step"], on every rank.
    """
    from pathlib import Path

    decision = [config.get("ckpt_path"), config.get("resume_step")]
    dist.broadcast_object_list(decision, src=0)
    config["ckpt_path"], config["resume_step"] = decision
    if decision[0] is None:
        return
    config["ckpt_path"] = str(fetch_from_rank_zero(Path(decision[0]), cluster, folder.path / "from-rank-0"))


def fetch_from_rank_zero(path: Any, cluster: Cluster, cache: Any) -> Any:
    """A local path to what lies at `path` on rank 0's host: the same path where this node has it, else a copy.

    Folders of shards are copied file by file. Every rank calls it.
    """
    import shutil
    from pathlib import Path

    from checkpoint_files import measure

    files = [None]
    if cluster.rank == 0:
        names = [""] if path.is_file() else [str(p.relative_to(path)) for p in sorted(path.rglob("*")) if p.is_file()]
        files = [[(name, (path / name if name else path).stat().st_size) for name in names], measure(path)["sha256"]]
    files = files if cluster.rank == 0 else [None, None]
    dist.broadcast_object_list(files, src=0)
    names, sha256 = files
    have = path.exists() and (cluster.rank == 0 or measure(path)["sha256"] == sha256)
    everyone: list[Any] = [None] * cluster.world_size
    dist.all_gather_object(everyone, have)
    if all(everyone):
        return path
    target = path if have else Path(cache) / path.name
    writes = cluster.local_rank == 0 and not have
    if writes:
        shutil.rmtree(cache, ignore_errors=True)
        Path(cache).mkdir(parents=True)
    for name, size in names:
        _copy_file(path / name if name else path, target / name if name else target, size, cluster, writes)
    dist.barrier()
    if not have and measure(target)["sha256"] != sha256:
        raise UserError(f"{path.name} did not arrive whole from rank 0: is there room in {cache}?")
    return target


CHUNK_BYTES = 64 * 2**20


def _copy_file(source: Any, target: Any, size: int, cluster: Cluster, writes: bool) -> None:
    import contextlib

    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(source.open("rb")) if cluster.rank == 0 else None
        if writes:
            target.parent.mkdir(parents=True, exist_ok=True)
        writer = stack.enter_context(target.open("wb")) if writes else None
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            data = torch.frombuffer(bytearray(reader.read(length)), dtype=torch.uint8) if reader else torch.empty(
                length, dtype=torch.uint8)  # fmt: skip
            dist.broadcast(data, src=0)
            if writer:
                writer.write(data.numpy().tobytes())
