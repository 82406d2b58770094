"""Checks of this node before a run of several ranks, without torch: a warning for each finding."""

import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep.launch.launchers import Cluster, is_started_rank
from lockstep.runs.environment import network_interface

FREE_DISK_GIB = 5.0
STALE = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
Finding = tuple[bool, str]  # fine or not, and one sentence with what to do


def findings(cluster: Cluster, environment: Mapping[str, str], log_dir: Path) -> Iterator[str]:
    """Yield what is not right for a run on this node."""
    checks = [*stale_ranks(environment), own_address(cluster, environment), free_disk(log_dir)]
    yield from (sentence for fine, sentence in checks if not fine)


def stale_ranks(environment: Mapping[str, str]) -> Iterator[Finding]:
    stale = [name for name in STALE if name in environment]
    if stale and not is_started_rank(environment):
        yield False, f"{' and '.join(stale)} set, but no launcher has started this process: unset {' '.join(stale)}."


def own_address(cluster: Cluster, environment: Mapping[str, str]) -> Finding:
    """Check the interface by which this node reaches node 0, and by which the others reach its ranks."""
    name = socket.gethostname()
    if cluster.num_nodes == 1:
        return True, f"host {name}, one node."
    stated = environment.get("GLOO_SOCKET_IFNAME")
    interface = stated or network_interface(cluster.master_addr)
    if stated and stated not in [found for _, found in socket.if_nameindex()]:
        return False, f"host {name} has no interface {stated}: correct GLOO_SOCKET_IFNAME, or unset it."
    if interface is None:
        return False, f"host {name} has no way to {cluster.master_addr}: correct MASTER_ADDR, or the network."
    if interface == "lo" and not cluster.master_addr.startswith(("127.", "localhost", "::1")):
        return False, (
            f"{cluster.master_addr} is this host by its loopback interface, which other nodes cannot reach: "
            "give the address of node 0 in MASTER_ADDR, or correct /etc/hosts."
        )
    return True, f"host {name} reaches the others by {interface}."


def free_disk(folder: Path) -> Finding:
    while not folder.exists():
        folder = folder.parent
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < FREE_DISK_GIB:
        return False, f"only {free_gib:.1f} GiB free at {folder}: make room, or set paths.log_dir to another disk."
    return True, f"{free_gib:.0f} GiB free for run folders."
