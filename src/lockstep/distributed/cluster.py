"""Which rank of which cluster this process is, and its environment: the only file that reads environment variables.

launchers.py makes the Cluster.
"""

import errno
import ipaddress
import itertools
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

PLAN_FILE = "LOCKSTEP_PLAN"  # set in ranks that our supervisor starts
SUPERVISOR_PID = "LOCKSTEP_SUPERVISOR"
SUPERVISOR_LINE = "LOCKSTEP_SUPERVISOR_LINE"  # the descriptor that a rank's heartbeats go to


@dataclass(frozen=True)
class Cluster:
    """Which rank this process is, of how many.

    `local_rank` is None in a node's supervisor, which is no rank itself.
    """

    launcher: str  # a name in the table of launchers.py
    num_nodes: int
    devices: int  # ranks on each node
    node_rank: int
    local_rank: int | None
    master_addr: str
    master_port: int | None  # None: alone on this machine, any free port will do
    agent_store: bool = False  # torchrun's agent, not rank 0, serves the store at that address

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices

    @property
    def rank(self) -> int:
        """Global rank; a supervisor answers for its first rank."""
        return self.node_rank * self.devices + (self.local_rank or 0)

    @property
    def is_rank_zero(self) -> bool:
        """Global rank zero, or the supervisor of node 0."""
        return self.rank == 0

    @property
    def is_supervisor(self) -> bool:
        return self.local_rank is None

    @property
    def is_supervised(self) -> bool:
        """A rank that our own supervisor started, which reads its error file and completes its record."""
        return self.launcher == "supervisor"

    def rank_environment(self, local_rank: int, master_port: int) -> dict[str, str]:
        """What torchrun would set for one local rank."""
        return {
            "RANK": str(self.node_rank * self.devices + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(master_port),
        }


@dataclass(frozen=True)
class Wanted:
    """What the trainer's options ask for.

    Args:
        devices: trainer.devices where the user stated it.
        num_nodes: trainer.num_nodes where the user stated it.
        several_processes: one process per device; else one process whatever it computes on.
        machine: how many devices a process-per-device trainer uses here when nobody says otherwise.
    """

    devices: int | None = None
    num_nodes: int | None = None
    several_processes: bool = True
    machine: int = 1


def plan_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """The plan that our supervisor hands to the rank that it started; None anywhere else."""
    path = (os.environ if environ is None else environ).get(PLAN_FILE)
    return Path(path) if path else None


def environment() -> dict[str, str]:
    """A copy of this process's environment variables, which scripts hand on; nothing else reads them."""
    return dict(os.environ)


def adopt(cluster: Cluster, environ: dict[str, str] | None = None, unless_set: Mapping[str, str] | None = None) -> None:
    """Give this process the environment variables of its rank, as libraries beneath read them.

    Args:
        unless_set: others, for what the user has not set.
    """
    target = os.environ if environ is None else environ
    for name, value in (unless_set or {}).items():
        target.setdefault(name, value)
    for name, value in cluster.rank_environment(cluster.local_rank or 0, cluster.master_port or 0).items():
        target[name] = value
    target.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi counts, and our readings do
    if "PYTORCH_CUDA_ALLOC_CONF" not in target:  # the older name, which the user may have set
        target.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # else half a GPU is lost to fragments
    target.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a lost peer prints C++ stacks over the error that counts
    where = cluster.master_addr if cluster.num_nodes > 1 else "127.0.0.1"  # ranks of one machine listen to it alone
    interface = network_interface(where) if cluster.world_size > 1 else None
    if interface:
        target.setdefault("GLOO_SOCKET_IFNAME", interface)


def network_interface(address: str) -> str | None:
    """The interface by which this host reaches `address`; None where nobody can tell.

    gloo uses the address that the host's own name resolves to, on many machines 127.0.1.1, where others never reach it.
    """
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = [name for name, found in psutil.net_if_addrs().items() if any(entry.address == own for entry in found)]
    return names[0] if names else None


def listen(cluster: Cluster) -> socket.socket:
    """Return a socket that listens at MASTER_PORT, only on the address that MASTER_ADDR names where that is possible.

    It listens on every interface where the address is translated by the network, or where this machine's own name
    stands for loopback (Debian's 127.0.1.1), which other nodes cannot reach.

    Raises:
        OSError: another program uses the port.
    """
    everywhere, backlog = ("", cluster.master_port or 0), 1024
    family, _, _, _, address = socket.getaddrinfo(cluster.master_addr, cluster.master_port, type=socket.SOCK_STREAM)[0]
    is_loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    if cluster.num_nodes > 1 and is_loopback and address[0] != cluster.master_addr:
        return socket.create_server(everywhere, backlog=backlog)
    try:
        return socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(everywhere, backlog=backlog)


def visible_gpus(environ: Mapping[str, str] | None = None) -> int:
    """How many NVIDIA GPUs a process started now would see; asks the driver's library, imports no torch."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        words = [word.strip() for word in chosen.split(",")]
        names = itertools.takewhile(lambda word: word.isdigit() or word.startswith(("GPU-", "MIG-")), words)
        return len(list(names))  # CUDA too stops at the first that is none, such as -1 or SLURM's NoDevFiles
    if not any(os.path.exists(path) for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")):  # dxg: WSL
        return 0
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception as error:  # no driver, or a broken one: NVML raises its own family of errors
        log.info(f"GPUs cannot be counted ({error}); going on with the CPU.")
        return 0
