"""Find out who started this process, and which rank of how many it is.

Nobody (this machine alone), one command per node (MASTER_ADDR, MASTER_PORT, NODE_RANK), Lockstep's own agent, torchrun,
SLURM's srun, MPI, or any other launcher that sets RANK and WORLD_SIZE.
"""

import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.runs.environment import environment, network_interface, set_variables
from lockstep.runs.errors import UserError
from lockstep.strategies.placement import RequestedDevices

Environ = Mapping[str, str]
AGENT = "LOCKSTEP_AGENT"  # set in the ranks that launch/agent.py starts: what their cluster is
OUTPUT = "LOCKSTEP_OUTPUT"  # and the folder for the output of local ranks other than 0
ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
VARIABLES = {  # rank, number of ranks, rank on the node, ranks of the node
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    "env": ENV,  # torch's env://, PyTorchJob
}  # fmt: skip


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

    @property
    def starts_ranks(self) -> bool:
        return self.local_rank is None

    @property
    def is_restarted(self) -> bool:
        """Return whether torchrun starts ranks again that end with an exit code other than 0."""
        return self.launcher == "torchrun"


INFINIBAND = Path("/sys/class/infiniband")  # InfiniBand, RoCE or EFA, which NCCL finds by itself


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
    }
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment():  # the older name of the same option
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # else half a GPU is lost to fragments
    where = cluster.master_addr if cluster.num_nodes > 1 else "127.0.0.1"
    if cluster.world_size > 1 and (interface := network_interface(where)):
        defaults["GLOO_SOCKET_IFNAME"] = interface
        if cluster.num_nodes > 1 and not any(INFINIBAND.glob("*")):  # else NCCL may take a container's bridge and hang
            defaults["NCCL_SOCKET_IFNAME"] = f"={interface}"
    set_variables(defaults, unless_set=True)


def launcher_of(environ: Environ, wanted: RequestedDevices | None = None) -> str:
    """Name what has started this process."""
    wanted = wanted or RequestedDevices()
    for name, variable in (("agent", AGENT), ("torchrun", "TORCHELASTIC_RUN_ID")):
        if variable in environ and "RANK" in environ:
            return name
    # A batch script or an interactive shell has no step; a step of one task is a plain machine.
    if "SLURM_STEP_ID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1) > 1:
        return "slurm"
    for name, (rank, size, *_) in VARIABLES.items():
        if rank in environ and size in environ:
            return name
    return "nodes" if wanted.several_processes and ("NODE_RANK" in environ or (wanted.num_nodes or 1) > 1) else "none"


def is_started_rank(environ: Environ) -> bool:
    """Return whether a launcher has decided how many ranks there are, and this process is one of them."""
    return launcher_of(environ) not in ("none", "nodes")


def is_first_on_node(environ: Environ) -> bool:
    """Return whether this process prepares what all ranks of its node read."""
    names = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    return not is_started_rank(environ) or all(environ.get(name, "0") == "0" for name in names)


def describe(environ: Environ, wanted: RequestedDevices) -> Cluster:
    """Return the cluster that the environment and the trainer's options describe together.

    Raises:
        UserError: the two contradict each other, or something is missing.
    """
    name = launcher_of(environ, wanted)
    if name == "agent":
        launcher, num_nodes, node_rank, address, port = environ[AGENT].split()[1:]
        alone, devices, local_rank = num_nodes == "1", int(environ["LOCAL_WORLD_SIZE"]), int(environ["LOCAL_RANK"])
        port = environ["MASTER_PORT"] if alone else port
        return Cluster(launcher, int(num_nodes), devices, int(node_rank), local_rank, address, int(port), alone, True)
    if name == "nodes":
        return _nodes(environ, wanted)
    if name == "none":
        devices = (wanted.devices or wanted.machine) if wanted.several_processes else 1
        return Cluster(name, 1, devices, 0, None if devices > 1 else 0, "127.0.0.1", None)
    return _ranks(name, {**environ, **_of_slurm(environ)} if name == "slurm" else environ, wanted)


def _nodes(environ: Environ, wanted: RequestedDevices) -> Cluster:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not environ.get(name)]
    if missing:
        raise UserError(
            f"Several nodes, and {' and '.join(missing)} not set: start on each node "
            "MASTER_ADDR=<address of node 0> MASTER_PORT=29500 NODE_RANK=<0, 1, …> python src/train.py …"
        )
    size = _integer(environ, "WORLD_SIZE", 0)
    devices = wanted.devices or (size // wanted.num_nodes if wanted.num_nodes else 0) or wanted.machine
    num_nodes = wanted.num_nodes or size // devices
    if not num_nodes:
        raise UserError("NODE_RANK is set, but not how many nodes there are: give trainer.num_nodes=N.")
    if size and size != devices * num_nodes:
        raise UserError(
            f"WORLD_SIZE={size}, but trainer.devices={devices} × trainer.num_nodes={num_nodes} = "
            f"{devices * num_nodes} processes: make them equal, or leave WORLD_SIZE unset."
        )
    node_rank, port = _integer(environ, "NODE_RANK"), _integer(environ, "MASTER_PORT")
    if not 0 <= node_rank < num_nodes:
        raise UserError(
            f"NODE_RANK={node_rank}, but trainer.num_nodes={num_nodes}: it counts from 0 to {num_nodes - 1}."
        )
    local_rank = 0 if devices == 1 else None
    return Cluster("nodes", num_nodes, devices, node_rank, local_rank, environ["MASTER_ADDR"], port)


def _ranks(name: str, environ: Environ, wanted: RequestedDevices) -> Cluster:
    """Return the cluster of a launcher that sets the rank of each process."""
    of_rank, of_size, of_local_rank, of_local_size = VARIABLES.get(name, ENV)
    who = "RANK and WORLD_SIZE" if name == "env" else name
    unset = "" if name == "slurm" else f", or unset {of_rank} and {of_size}"
    rank, size, devices = _integer(environ, of_rank), _integer(environ, of_size), _integer(environ, of_local_size, 0)
    if not devices and wanted.devices is None and of_local_rank in environ and size > 1:
        raise UserError(f"{of_local_size} is not set: give trainer.devices=N, the ranks of each node.")
    devices = devices or wanted.devices or 1
    if not 0 <= rank < size or size % devices:
        raise UserError(f"{who} say rank {rank} of {size}, {devices} on each node: correct them{unset}.")
    if not wanted.several_processes and size > 1:
        raise UserError(
            f"{who} started {size} processes, but this trainer runs in one: choose trainer=ddp or trainer=fsdp "
            f"(on CPUs ddp_sim or fsdp_sim){unset}."
        )
    nodes = size // devices
    stated = (wanted.devices or devices, wanted.num_nodes or nodes)
    if wanted.several_processes and stated != (devices, nodes):
        raise UserError(
            f"{who} started {size} processes, {devices} on each of {nodes} nodes, but trainer.devices={stated[0]} × "
            f"trainer.num_nodes={stated[1]}: make them equal, or leave trainer.devices and trainer.num_nodes out."
        )
    if nodes > 1 and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        raise UserError(f"{who} started {nodes} nodes: set MASTER_ADDR and MASTER_PORT for all.")
    return Cluster(
        name, nodes, devices, rank // devices, _integer(environ, of_local_rank, rank % devices),
        environ.get("MASTER_ADDR") or "127.0.0.1", _integer(environ, "MASTER_PORT", 29500),
        agent_store=name == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )  # fmt: skip


def _of_slurm(environ: Environ) -> dict[str, str]:
    """Return torchrun's variables for a task of an srun step."""
    tasks = _integer(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    if tasks % nodes:
        raise UserError(f"SLURM runs {tasks} tasks on {nodes} nodes: give every node as many (--ntasks-per-node).")
    devices, local_rank = tasks // nodes, _integer(environ, "SLURM_LOCALID")
    node_list = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    number = int(environ["SLURM_JOB_ID"]) + 997 * int(environ.get("SLURM_STEP_ID") or 0)
    return {
        "RANK": str(_integer(environ, "SLURM_NODEID") * devices + local_rank), "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(devices),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(node_list),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + number % 12000),  # another for each step of each job
    }  # fmt: skip


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list: `gpu[03-05,9],login` → `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,]*)", node_list)
    assert match, node_list
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[,-]", numbers)[0] if numbers else "") + suffix


def named_run(config: Mapping[str, Any], environ: Environ) -> str | None:
    """Return the run id that the user, torchrun (--rdzv-id) or SLURM's job gives the run, also after a restart."""
    stated = environ.get("TORCHELASTIC_RUN_ID", "none") if "RANK" in environ else "none"
    torchrun = "" if stated == "none" else re.sub(r"[^A-Za-z0-9._-]", "-", stated).lstrip("._-")[:100]
    step = {key: value for key, value in environ.items() if key.startswith("SLURM_")}
    slurm = agent_id(step) if launcher_of(step) == "slurm" else None
    return config.get("run_id") or environ.get("RUN_ID") or torchrun or slurm or None


def agent_id(environ: Environ) -> str | None:
    """Name what would start this process again in the same run: torchrun's agent or the SLURM step; else None."""
    launcher = launcher_of(environ)
    if launcher == "torchrun":
        import psutil

        started = datetime.fromtimestamp(psutil.Process(os.getppid()).create_time(), UTC)  # a pid is used again
        return f"{started:%Y-%m-%d_%H-%M-%S}_torchrun-{os.getppid()}"
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}" if launcher == "slurm" else None


def command_line(typed: list[str], cluster: Cluster, gpus: bool) -> str:
    """Return the line that starts such a run again."""
    nodes, devices, address = cluster.num_nodes, cluster.devices, cluster.master_addr
    meet = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint={address}:29500" if nodes > 1 else "--standalone"
    where = f"MASTER_ADDR={address} MASTER_PORT={cluster.master_port} WORLD_SIZE={cluster.world_size}"
    prefix = {
        "nodes": f"{where} NODE_RANK={cluster.node_rank} python",
        "torchrun": f"torchrun {meet} --nproc-per-node={devices}",
        "slurm": f"srun --nodes={nodes} --ntasks-per-node={devices}{f' --gpus-per-node={devices}' * gpus} python",
    }
    return f"{prefix.get(cluster.launcher, 'python')} {shlex.join(typed)}"


def _integer(environ: Environ, name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    try:
        return int(environ[name])
    except KeyError:
        raise UserError(f"{name} is not set, and this launch needs it.") from None
    except ValueError:
        raise UserError(f"{name}={environ[name]!r} is no whole number.") from None


def faults(cluster: Cluster, environ: Environ) -> Iterator[str]:
    """Yield a sentence for each thing on this node that is wrong for a run of several ranks."""
    stale = [name for name in (*ENV, "GROUP_RANK") if name in environ and name != "WORLD_SIZE"]
    if stale and not is_started_rank(environ):
        yield f"{' and '.join(stale)} set, but no launcher has started this process: unset {' '.join(stale)}."
    if cluster.num_nodes == 1:
        return
    name, stated = socket.gethostname(), environ.get("GLOO_SOCKET_IFNAME")
    interface = stated or network_interface(cluster.master_addr)
    if stated and stated not in [found for _, found in socket.if_nameindex()]:
        yield f"host {name} has no interface {stated}: correct GLOO_SOCKET_IFNAME, or unset it."
    elif interface is None:
        yield f"host {name} has no way to {cluster.master_addr}: correct MASTER_ADDR, or the network."
    elif interface == "lo" and not cluster.master_addr.startswith(("127.", "localhost", "::1")):
        yield (
            f"{cluster.master_addr} is this host by its loopback interface, which other nodes cannot reach: "
            "give the address of node 0 in MASTER_ADDR, or correct /etc/hosts."
        )
