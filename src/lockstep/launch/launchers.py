"""Find out who started this process, and which rank of how many it is.

Nobody (this machine alone), one command per node (MASTER_ADDR, MASTER_PORT, NODE_RANK), Lockstep's own agent, torchrun,
SLURM's srun, MPI, or any other launcher that sets RANK and WORLD_SIZE.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.runs.environment import AGENT, environment, network_interface, set_variables
from lockstep.runs.errors import UserError
from lockstep.strategies.placement import RequestedDevices

Environ = Mapping[str, str]
# Each launcher's variables for rank, world size, local rank and ranks of the node
VARIABLES = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    "env": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun, torch's env://, PyTorchJob
}  # fmt: skip
NODES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")  # one command per node
INFINIBAND = Path("/sys/class/infiniband")  # InfiniBand, RoCE or EFA, which NCCL finds by itself


@dataclass(frozen=True)
class Cluster:
    """The rank that this process is, and the ranks around it.

    Args:
        launcher: none, nodes, torchrun, slurm, mpirun, mpiexec or env.
        devices: ranks on each node.
        local_rank: None in a process that starts this node's ranks and is none itself.
        master_port: None on a single machine, where any free port will do.
        agent_store: torchrun's agent or Lockstep's, not rank 0, serves the store at that address.
        has_agent: Lockstep's agent has started this rank and reports its error.
    """

    launcher: str
    num_nodes: int
    devices: int
    node_rank: int
    local_rank: int | None
    master_addr: str
    master_port: int | None
    agent_store: bool = False
    has_agent: bool = False

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices

    @property
    def rank(self) -> int:
        """The global rank; of a process that starts ranks, its first one's."""
        return self.node_rank * self.devices + (self.local_rank or 0)

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0


def set_rank_environment(cluster: Cluster) -> None:
    """Set torchrun's variables for this rank, and defaults of gloo, NCCL and the CUDA allocator."""
    set_variables({
        "RANK": str(cluster.rank), "LOCAL_RANK": str(cluster.local_rank or 0), "WORLD_SIZE": str(cluster.world_size),
        "LOCAL_WORLD_SIZE": str(cluster.devices), "GROUP_RANK": str(cluster.node_rank),
        "GROUP_WORLD_SIZE": str(cluster.num_nodes), "MASTER_ADDR": cluster.master_addr,
        "MASTER_PORT": str(cluster.master_port or 0),
    })  # fmt: skip
    defaults = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as nvidia-smi counts
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else a lost peer prints C++ stacks over the error that counts
        "TORCH_FR_BUFFER_SIZE": "2000",  # NCCL's flight recorder keeps the last collectives
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # The step that meets a lost GPU raises an exception: NCCL's watchdog would abort the process before that
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    }
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment():  # the older name of the same option
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # else half a GPU is lost to fragments
    where = cluster.master_addr if cluster.num_nodes > 1 else "127.0.0.1"
    if cluster.world_size > 1 and (interface := network_interface(where)):
        defaults["GLOO_SOCKET_IFNAME"] = interface
        if cluster.num_nodes > 1 and not any(INFINIBAND.glob("*")):  # else NCCL may take a container's bridge and hang
            defaults["NCCL_SOCKET_IFNAME"] = f"={interface}"
    set_variables(defaults, unless_set=True)


def slurm_step(environ: Environ) -> str | None:
    """Name the srun step of several tasks that this process is one of; a step of one task is a plain machine."""
    is_step = environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"  # a batch script or an interactive shell has none
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}" if is_step else None


def launcher_of(environ: Environ) -> str | None:
    """Name the launcher that decided how many ranks there are and which this process is; None if none did."""
    for name, variable in (("agent", AGENT), ("torchrun", "TORCHELASTIC_RUN_ID")):
        if "RANK" in environ and variable in environ:
            return name
    if slurm_step(environ):
        return "slurm"
    return next((name for name, (rank, size, *_) in VARIABLES.items() if rank in environ and size in environ), None)


def is_first_on_node(environ: Environ) -> bool:
    """Return whether this process prepares what all ranks of its node read."""
    names = ("SLURM_LOCALID", *(local_rank for _, _, local_rank, _ in VARIABLES.values()))
    return all(environ.get(name, "0") == "0" for name in names)


def describe(environ: Environ, wanted: RequestedDevices) -> Cluster:
    """Return the cluster that the environment and the trainer's options describe together; UserError if they differ."""
    name = launcher_of(environ)
    if name == "agent":
        launcher, nodes, node, address, port = environ[AGENT].split(maxsplit=6)[1:6]
        own = (int(environ["LOCAL_WORLD_SIZE"]), int(node), int(environ["LOCAL_RANK"]))
        return Cluster(launcher, int(nodes), *own, address, int(port), agent_store=nodes == "1", has_agent=True)
    if name is not None:
        return _started_rank(name, {**environ, **_of_slurm(environ)} if name == "slurm" else environ, wanted)
    devices = (wanted.devices or wanted.machine) if wanted.several_processes else 1
    local_rank = None if devices > 1 else 0
    if not wanted.several_processes or ("NODE_RANK" not in environ and (wanted.num_nodes or 1) == 1):
        return Cluster("none", 1, devices, 0, local_rank, "127.0.0.1", None)
    num_nodes = wanted.num_nodes or 0
    has_all, size = all(map(environ.get, NODES)), _integer(environ, "WORLD_SIZE", devices * num_nodes)
    node_rank = _integer(environ, "NODE_RANK", 0)
    if not has_all or size != devices * num_nodes or not 0 <= node_rank < num_nodes:
        shown = " ".join(f"{name}={environ.get(name) or 'unset'}" for name in (*NODES, "WORLD_SIZE"))
        raise UserError(
            f"{shown} do not fit trainer.devices={devices} trainer.num_nodes={num_nodes or 'unset'}: start on each of "
            "N nodes MASTER_ADDR=<address of node 0> MASTER_PORT=29500 NODE_RANK=<0 to N - 1> python src/train.py "
            "trainer.num_nodes=<N> …; WORLD_SIZE is N × trainer.devices, or not set."
        )
    address, meet_at = environ["MASTER_ADDR"], _integer(environ, "MASTER_PORT")
    return Cluster("nodes", num_nodes, devices, node_rank, local_rank, address, meet_at)


def _started_rank(name: str, environ: Environ, wanted: RequestedDevices) -> Cluster:
    """Return the cluster of a launcher that sets the rank of each process."""
    of_rank, of_size, of_local_rank, of_local_size = VARIABLES.get(name, VARIABLES["env"])
    rank, size = _integer(environ, of_rank), _integer(environ, of_size)
    devices = _integer(environ, of_local_size, wanted.devices or 1)
    local_rank, nodes = _integer(environ, of_local_rank, rank % devices), size // devices
    who = "RANK and WORLD_SIZE" if name == "env" else name
    unset = "" if name == "slurm" else f", or unset {of_rank} and {of_size}"
    if not wanted.several_processes and size > 1:
        raise UserError(
            f"{who} started {size} processes, but this trainer runs in one: choose trainer=ddp or trainer=fsdp "
            f"(on CPUs ddp_sim or fsdp_sim){unset}."
        )
    stated = (wanted.devices or devices, wanted.num_nodes or nodes) if wanted.several_processes else (devices, nodes)
    is_in_a_row = 0 <= rank < size and size % devices == 0 and local_rank == rank % devices
    if stated != (devices, nodes) or not is_in_a_row:
        raise UserError(
            f"{who} started rank {rank} of {size}, number {local_rank} of {devices} on its node, but trainer.devices="
            f"{stated[0]} × trainer.num_nodes={stated[1]}: every node needs as many ranks, numbered in a row. Give "
            f"trainer.devices=<ranks on a node>, or leave both out{unset}."
        )
    if nodes > 1 and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        raise UserError(f"{who} started {nodes} nodes: set MASTER_ADDR and MASTER_PORT for all.")
    agent_store = name == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = environ.get("MASTER_ADDR") or "127.0.0.1", _integer(environ, "MASTER_PORT", 29500)
    return Cluster(name, nodes, devices, rank // devices, local_rank, address, port, agent_store)


def _of_slurm(environ: Environ) -> dict[str, str]:
    """Return torchrun's variables for a task of an srun step."""
    tasks, local_rank = _integer(environ, "SLURM_STEP_NUM_TASKS"), _integer(environ, "SLURM_LOCALID")
    devices = tasks // _integer(environ, "SLURM_STEP_NUM_NODES")
    number = int(environ["SLURM_JOB_ID"]) + 997 * int(environ["SLURM_STEP_ID"])
    # The first host of a node list: `gpu[03-05,9],login` → `gpu03`
    first = re.sub(r"^([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,]*).*", r"\1\2\3", environ["SLURM_STEP_NODELIST"])
    return {
        "RANK": str(_integer(environ, "SLURM_NODEID") * devices + local_rank), "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(devices),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + number % 12000),  # another for each step of each job
    }  # fmt: skip


def named_run(config: Mapping[str, Any], environ: Environ) -> str | None:
    """Return the run id that the user, torchrun (--rdzv-id) or SLURM's job gives the run, also after a restart."""
    stated = environ.get("TORCHELASTIC_RUN_ID", "none")
    torchrun = "" if stated == "none" else re.sub(r"[^A-Za-z0-9._-]", "-", stated).lstrip("._-")[:100]
    return config.get("run_id") or environ.get("RUN_ID") or torchrun or slurm_step(environ)


def agent_id(environ: Environ) -> str | None:
    """Name what would start this process again in the same run: torchrun's agent or the SLURM step; else None."""
    if launcher_of(environ) != "torchrun":
        return slurm_step(environ)
    import psutil

    agent = psutil.Process(os.getppid())
    return f"{datetime.fromtimestamp(agent.create_time(), UTC):%Y-%m-%d_%H-%M-%S}_torchrun-{agent.pid}"


def _integer(environ: Environ, name: str, default: int | None = None) -> int:
    stated = environ.get(name) or default
    if stated is None:
        raise UserError(f"{name} is not set, and this launch needs it.")
    try:
        return int(stated)
    except ValueError:
        raise UserError(f"{name}={stated!r} is not a whole number.") from None
