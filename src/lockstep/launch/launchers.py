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

from lockstep.runs.environment import environment, network_interface, set_variables
from lockstep.runs.errors import UserError
from lockstep.strategies.placement import RequestedDevices

Environ = Mapping[str, str]
AGENT = "LOCKSTEP_AGENT"  # set in the ranks that agent.py starts: its pid, their cluster, the folder for their output
ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun, torch's env://, PyTorchJob
MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # MPICH, Intel MPI
NODES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")  # one command per node
VARIABLES = {"mpirun": MPI, "mpiexec": PMI, "env": ENV}
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
    """Set torchrun's variables for this rank, as torch and other libraries read them."""
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
    if "RANK" in environ and AGENT in environ:
        return "agent"
    if "RANK" in environ and "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if slurm_step(environ):
        return "slurm"
    return next((name for name, (rank, size, *_) in VARIABLES.items() if rank in environ and size in environ), None)


def is_first_on_node(environ: Environ) -> bool:
    """Return whether this process prepares what all ranks of its node read."""
    return all(environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "SLURM_LOCALID", MPI[2], PMI[2]))


def describe(environ: Environ, wanted: RequestedDevices) -> Cluster:
    """Return the cluster that the environment and the trainer's options describe together.

    Raises:
        UserError: the two contradict each other, or something is missing.
    """
    name = launcher_of(environ)
    if name == "agent":
        launcher, nodes, node, address, meet_at = environ[AGENT].split(maxsplit=6)[1:6]
        ranks, alone = (int(environ["LOCAL_WORLD_SIZE"]), int(node), int(environ["LOCAL_RANK"])), nodes == "1"
        return Cluster(launcher, int(nodes), *ranks, address, int(meet_at), agent_store=alone, has_agent=True)
    if name is not None:
        return _ranks(name, {**environ, **_of_slurm(environ)} if name == "slurm" else environ, wanted)
    devices = (wanted.devices or wanted.machine) if wanted.several_processes else 1
    local_rank = None if devices > 1 else 0
    if not wanted.several_processes or ("NODE_RANK" not in environ and (wanted.num_nodes or 1) == 1):
        return Cluster("none", 1, devices, 0, local_rank, "127.0.0.1", None)
    num_nodes, missing = wanted.num_nodes or 0, [name for name in NODES if not environ.get(name)]
    if missing or not num_nodes:
        raise UserError(
            f"Several nodes, and {' and '.join(missing or ['trainer.num_nodes'])} not set: start on each node "
            "MASTER_ADDR=<address of node 0> MASTER_PORT=29500 NODE_RANK=<0, 1, …> python src/train.py "
            "trainer.num_nodes=<N> …"
        )
    size, node_rank = _integer(environ, "WORLD_SIZE", devices * num_nodes), _integer(environ, "NODE_RANK")
    if size != devices * num_nodes:
        raise UserError(
            f"WORLD_SIZE={size}, but trainer.devices={devices} × trainer.num_nodes={num_nodes} = {devices * num_nodes} "
            "processes: make them equal, or leave WORLD_SIZE unset."
        )
    if not 0 <= node_rank < num_nodes:
        raise UserError(
            f"NODE_RANK={node_rank}, but trainer.num_nodes={num_nodes}: it counts from 0 to {num_nodes - 1}."
        )
    port = _integer(environ, "MASTER_PORT")
    return Cluster("nodes", num_nodes, devices, node_rank, local_rank, environ["MASTER_ADDR"], port)


def _ranks(name: str, environ: Environ, wanted: RequestedDevices) -> Cluster:
    """Return the cluster of a launcher that sets the rank of each process."""
    of_rank, of_size, of_local_rank, of_local_size = VARIABLES.get(name, ENV)
    who = "RANK and WORLD_SIZE" if name == "env" else name
    unset = "" if name == "slurm" else f", or unset {of_rank} and {of_size}"
    rank, size = _integer(environ, of_rank), _integer(environ, of_size)
    devices = _integer(environ, of_local_size, wanted.devices or 1)
    local_rank, nodes = _integer(environ, of_local_rank, rank % devices), size // devices
    if not 0 <= rank < size or size % devices or local_rank != rank % devices:
        raise UserError(
            f"{who} say rank {rank} of {size}, on its node {local_rank} of {devices}: every node needs as many ranks, "
            f"numbered in a row; give trainer.devices=N{unset}."
        )
    if not wanted.several_processes and size > 1:
        raise UserError(
            f"{who} started {size} processes, but this trainer runs in one: choose trainer=ddp or trainer=fsdp "
            f"(on CPUs ddp_sim or fsdp_sim){unset}."
        )
    stated = (wanted.devices or devices, wanted.num_nodes or nodes)
    if wanted.several_processes and stated != (devices, nodes):
        raise UserError(
            f"{who} started {size} processes, {devices} on each of {nodes} nodes, but trainer.devices={stated[0]} × "
            f"trainer.num_nodes={stated[1]}: make them equal, or leave trainer.devices and trainer.num_nodes out."
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
    return {
        "RANK": str(_integer(environ, "SLURM_NODEID") * devices + local_rank), "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(devices),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + number % 12000),  # another for each step of each job
    }  # fmt: skip


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list: `gpu[03-05,9],login` → `gpu03`."""
    return re.sub(r"^([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,]*).*", r"\1\2\3", node_list)


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

    started = datetime.fromtimestamp(psutil.Process(os.getppid()).create_time(), UTC)  # a pid is used again
    return f"{started:%Y-%m-%d_%H-%M-%S}_torchrun-{os.getppid()}"


def fault(cluster: Cluster) -> str | None:
    """Return a sentence if other nodes cannot reach the address of this one."""
    is_local = cluster.master_addr.startswith(("127.", "localhost", "::1"))
    if cluster.num_nodes == 1 or is_local or network_interface(cluster.master_addr) != "lo":
        return None
    return (
        f"{cluster.master_addr} is this host by its loopback interface, which other nodes cannot reach: "
        "give the address of node 0 in MASTER_ADDR, or correct /etc/hosts."
    )


def _integer(environ: Environ, name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    try:
        return int(environ[name])
    except KeyError:
        raise UserError(f"{name} is not set, and this launch needs it.") from None
    except ValueError:
        raise UserError(f"{name}={environ[name]!r} is no whole number.") from None
