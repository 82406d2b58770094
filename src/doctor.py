"""Is this machine, this cluster, this bucket ready? One sentence per finding, with the mend.

    python src/doctor.py trainer=ddp trainer.num_nodes=2      on each node, with the options of the run to come
"""

import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import cluster as world
import provenance
from compose import REPOSITORY, plain, run_door
from errors import EXIT_FAILED, EXIT_OK, UserError

FREE_DISK_GIB = 5.0
STALE = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
Finding = tuple[bool, str]


def examine(config: dict[str, Any], environment: dict[str, str]) -> Iterator[Finding]:
    """(fine, sentence) for each check that needs only this node."""
    from launch import describe_batch, resolve_cluster

    stale = [name for name in STALE if name in environment]
    if stale and "TORCHELASTIC_RUN_ID" not in environment:
        yield False, f"{' and '.join(stale)} set, but nothing that starts ranks is at work: unset {' '.join(stale)}."
    try:
        cluster = resolve_cluster(config, environment)
        describe_batch(config, cluster)
        yield True, f"settings: {cluster.world_size} ranks on {cluster.num_nodes} nodes, this is node {cluster.node_rank}."
    except UserError as error:
        yield False, str(error)
        return
    yield _name_resolves(cluster)
    yield _disk(Path(config["paths"]["log_dir"]))
    yield _packages()
    yield from _gpus(config)
    yield from _bucket(config)
    if cluster.num_nodes > 1 and cluster.is_supervisor:
        yield from _other_nodes(config, cluster)


def _name_resolves(cluster: world.Cluster) -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = None
    if cluster.num_nodes == 1 or (address and not address.startswith("127.")):
        return True, f"host {name} is {address or 'without an address of its own, which one node does not need'}."
    return False, (
        f"host {name} resolves to {address or 'nothing'}, so other nodes cannot reach its ranks: "
        "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network's interface."
    )


def _disk(folder: Path) -> Finding:
    while not folder.exists():
        folder = folder.parent
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < FREE_DISK_GIB:
        return False, f"only {free_gib:.1f} GiB free at {folder}: make room, or set paths.log_dir to another disk."
    return True, f"{free_gib:.0f} GiB free for run folders."


def _packages() -> Finding:
    missing = [name for name, version in provenance.versions().items() if version == "missing"]
    if missing:
        return False, f"{', '.join(missing)} not installed: run make install."
    return True, "packages installed."


def _gpus(config: dict[str, Any]) -> Iterator[Finding]:
    if config["trainer"]["accelerator"] != "gpu":
        return
    import torch

    if not torch.cuda.is_available():
        yield False, f"the driver shows GPUs, but torch {torch.__version__} cannot use them: driver and CUDA do not fit."
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        fine = free > 0.9 * total
        words = "" if fine else ": another process is using it"
        yield fine, f"GPU {index} {name}: {free / 2**30:.0f} of {total / 2**30:.0f} GiB free{words}."


def _bucket(config: dict[str, Any]) -> Iterator[Finding]:
    uri = (config.get("s3") or {}).get("uri")
    if not uri:
        return
    from storage import check_writable

    try:
        check_writable(uri, **{k: v for k, v in config["s3"].items() if k == "endpoint_url"})
        yield True, f"{uri} can be written."
    except UserError as error:
        yield False, str(error)


def _other_nodes(config: dict[str, Any], cluster: world.Cluster) -> Iterator[Finding]:
    from launch import config_hash
    from rendezvous import agree

    mine = {
        "run_id": None, "host": socket.gethostname(), "tree_hash": provenance.tree_hash(REPOSITORY),
        "config_hash": config_hash(config), "versions": provenance.versions(),
    }  # fmt: skip
    try:
        answer = agree(cluster, mine, config["trainer"]["timeout_s"])
    except UserError as error:
        yield False, str(error)
        return
    for node in answer["nodes"]:
        offset = abs(node.get("clock_offset_s", 0.0))
        yield offset < 5, f"node {node['node_rank']} is {node['host']}, its clock within {max(offset, 0.1):.1f} s."
    yield True, "same code, options and packages on all nodes."
    yield from _all_reduce(config, cluster)


def _all_reduce(config: dict[str, Any], cluster: world.Cluster) -> Iterator[Finding]:
    """Latency and bandwidth between the nodes, one process a node, over gloo."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(cluster.master_addr, cluster.master_port, is_master=cluster.node_rank == 0,
                          wait_for_workers=False, timeout=timedelta(seconds=60))  # fmt: skip
    dist.init_process_group("gloo", store=store, rank=cluster.node_rank, world_size=cluster.num_nodes,
                            timeout=timedelta(seconds=60))  # fmt: skip
    small, large = _seconds(lambda: dist.all_reduce(torch.zeros(1)), 20), 0.0
    tensor = torch.zeros(8 * 2**20)
    large = _seconds(lambda: dist.all_reduce(tensor), 3)
    dist.destroy_process_group()
    yield True, f"all-reduce: {small * 1e3:.2f} ms latency, {tensor.nbytes / large / 2**20:.0f} MiB/s for 32 MiB."


def _seconds(action: Callable[[], Any], times: int) -> float:
    action()
    started = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - started) / times


def diagnose(cfg: Any) -> int:
    config = plain(cfg)
    config["choices"] = {key: value for key, value in cfg.hydra.runtime.choices.items() if not key.startswith("hydra")}
    bad = 0
    for fine, sentence in examine(config, world.environment()):
        print(f"{'ok  ' if fine else 'MEND'}  {sentence}", flush=True)
        bad += not fine
    return EXIT_FAILED if bad else EXIT_OK


def main(argv: list[str]) -> int:
    return run_door("train", argv, diagnose, (__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
