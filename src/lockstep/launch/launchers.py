"""Who started this process, and which rank of how many it is: one class for each launcher.

This machine alone, one command per node (MASTER_ADDR, MASTER_PORT, NODE_RANK), Lockstep's own agent, torchrun, SLURM's
srun, MPI, and any other launcher that sets RANK and WORLD_SIZE. A new launcher is a class in LAUNCHERS.
"""

import os
import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from lockstep.runs.environment import environment, network_interface, set_variables
from lockstep.runs.errors import UserError
from lockstep.strategies.placement import RequestedDevices

Environ = Mapping[str, str]
AGENT = "LOCKSTEP_AGENT"  # set in the ranks that launch/agent.py starts: what their cluster is
OUTPUT = "LOCKSTEP_OUTPUT"  # and the folder for the output of local ranks other than 0


@dataclass(frozen=True)
class Cluster:
    """Which rank this process is, and of how many.

    Args:
        launcher: a name in LAUNCHERS.
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

    def rank_environment(self, local_rank: int, master_port: int) -> dict[str, str]:
        """Return the variables that torchrun sets for a local rank."""
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


def set_rank_environment(cluster: Cluster) -> None:
    """Set the variables of this rank as torch and other libraries read them."""
    set_variables(cluster.rank_environment(cluster.local_rank or 0, cluster.master_port or 0))
    defaults = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as nvidia-smi counts
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else a lost peer prints C++ stacks over the error that counts
    }
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment():  # the older name of the same option
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # else half a GPU is lost to fragments
    where = cluster.master_addr if cluster.num_nodes > 1 else "127.0.0.1"
    if cluster.world_size > 1 and (interface := network_interface(where)):
        defaults["GLOO_SOCKET_IFNAME"] = interface
    set_variables(defaults, unless_set=True)


class Launcher:
    """This machine alone: the base of the others.

    Attributes:
        starts_ranks: it decided how many ranks there are, and this process is one of them.
        restarts_ranks: it starts ranks again that end with an exit code other than 0.
    """

    name = "none"
    starts_ranks = False
    restarts_ranks = False

    def recognises(self, environ: Environ, wanted: RequestedDevices) -> bool:
        return True

    def cluster(self, environ: Environ, wanted: RequestedDevices) -> Cluster:
        """Return the cluster that the environment and the trainer's options describe together.

        Raises:
            UserError: the two contradict each other, or something is missing.
        """
        devices = (wanted.devices or wanted.machine) if wanted.several_processes else 1
        return Cluster(self.name, 1, devices, 0, None if devices > 1 else 0, "127.0.0.1", None)

    def run_id(self, environ: Environ) -> str | None:
        """Return the run id that it gives to all its processes, also after a restart."""
        return None

    def agent_id(self, environ: Environ) -> str | None:
        """Name what would start this process again in the same run."""
        return None

    def is_first_on_node(self, environ: Environ) -> bool:
        return True

    def binds_cores(self, environ: Environ, cores: int) -> bool:
        """Return whether the `cores` that this process may use belong to this rank alone."""
        return False

    def command_line(self, typed: list[str], cluster: Cluster, gpus: bool) -> str:
        """Return the line that starts such a run again."""
        return shlex.join(["python", *typed])


class Nodes(Launcher):
    """One command on each node."""

    name = "nodes"

    def recognises(self, environ: Environ, wanted: RequestedDevices) -> bool:
        return wanted.several_processes and ("NODE_RANK" in environ or (wanted.num_nodes or 1) > 1)

    def cluster(self, environ: Environ, wanted: RequestedDevices) -> Cluster:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not environ.get(name)]
        if missing:
            raise UserError(
                f"Several nodes, and {' and '.join(missing)} not set: start on each node "
                "MASTER_ADDR=<address of node 0> MASTER_PORT=29500 NODE_RANK=<0, 1, …> python src/train.py …"
            )
        world_size = _integer(environ, "WORLD_SIZE") if environ.get("WORLD_SIZE") else None
        devices, num_nodes = _shape(world_size, wanted)
        node_rank = _integer(environ, "NODE_RANK")
        if not 0 <= node_rank < num_nodes:
            raise UserError(
                f"NODE_RANK={node_rank}, but trainer.num_nodes={num_nodes}: it counts from 0 to {num_nodes - 1}."
            )
        local_rank = 0 if devices == 1 else None
        return Cluster(
            self.name, num_nodes, devices, node_rank, local_rank, environ["MASTER_ADDR"],
            _integer(environ, "MASTER_PORT"),
        )  # fmt: skip

    def command_line(self, typed: list[str], cluster: Cluster, gpus: bool) -> str:
        address = f"MASTER_ADDR={cluster.master_addr} MASTER_PORT={cluster.master_port}"
        size = f"WORLD_SIZE={cluster.world_size} NODE_RANK={cluster.node_rank}"
        return f"{address} {size} {super().command_line(typed, cluster, gpus)}"


def _shape(world_size: int | None, wanted: RequestedDevices) -> tuple[int, int]:
    """Return (devices of each node, nodes) if WORLD_SIZE may say what the options do not."""
    devices, num_nodes = wanted.devices, wanted.num_nodes
    if devices is None:
        divides = world_size and num_nodes and world_size % num_nodes == 0
        devices = world_size // num_nodes if world_size and num_nodes and divides else wanted.machine
    if num_nodes is None:
        if world_size is None:
            raise UserError("NODE_RANK is set, but not how many nodes there are: give trainer.num_nodes=N.")
        num_nodes = max(world_size // devices, 1)
    if world_size is not None and world_size != devices * num_nodes:
        raise UserError(
            f"WORLD_SIZE={world_size}, but trainer.devices={devices} × trainer.num_nodes={num_nodes} = "
            f"{devices * num_nodes} processes: make them equal, or leave WORLD_SIZE unset."
        )
    return devices, num_nodes


class Variables(Launcher):
    """A launcher that sets RANK and WORLD_SIZE for each process, as torch's env:// reads them (PyTorchJob, …)."""

    name = "env"
    starts_ranks = True
    says = "RANK and WORLD_SIZE"  # how errors name what decided on the ranks
    names = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}

    def recognises(self, environ: Environ, wanted: RequestedDevices) -> bool:
        return self.names["rank"] in environ and self.names["size"] in environ

    def cluster(self, environ: Environ, wanted: RequestedDevices) -> Cluster:
        rank, size = _integer(environ, self.names["rank"]), _integer(environ, self.names["size"])
        devices = self._devices(environ, wanted, size)
        if not 0 <= rank < size or size % devices:
            raise UserError(
                f"{self.says} say rank {rank} of {size}, {devices} on each node: correct them, or unset "
                f"{self.names['rank']} and {self.names['size']} where no launcher has set them."
            )
        if not wanted.several_processes and size > 1:
            raise UserError(
                f"{self.says} started {size} processes, but this trainer runs in one: choose trainer=ddp or "
                f"trainer=fsdp (on CPUs ddp_sim or fsdp_sim), or unset {self.names['rank']} and {self.names['size']}."
            )
        if wanted.several_processes:
            _agree("devices", wanted.devices, devices, self.says)
            _agree("num_nodes", wanted.num_nodes, size // devices, self.says)
        local_rank = _integer(environ, self.names["local_rank"], rank % devices)
        if size > devices and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
            raise UserError(f"{self.says} started {size // devices} nodes: set MASTER_ADDR and MASTER_PORT for all.")
        address, port = environ.get("MASTER_ADDR") or "127.0.0.1", _integer(environ, "MASTER_PORT", 29500)
        store = self.restarts_ranks and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Cluster(self.name, size // devices, devices, rank // devices, local_rank, address, port, store)

    def _devices(self, environ: Environ, wanted: RequestedDevices, size: int) -> int:
        if stated := _integer(environ, self.names["local_size"], 0):
            return stated
        if wanted.devices is None and environ.get(self.names["local_rank"]) is not None and size > 1:
            raise UserError(f"{self.names['local_size']} is not set: give trainer.devices=N, the ranks of each node.")
        return wanted.devices or 1

    def is_first_on_node(self, environ: Environ) -> bool:
        return environ.get(self.names["local_rank"], "0") == "0"


class Torchrun(Variables):
    """One process for each rank, started and started again by torchrun's agent on each node."""

    name = "torchrun"
    says = "torchrun"
    restarts_ranks = True

    def recognises(self, environ: Environ, wanted: RequestedDevices) -> bool:
        return "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ

    def run_id(self, environ: Environ) -> str | None:
        """Return --rdzv-id; torchrun's "none" counts as unset."""
        stated = environ["TORCHELASTIC_RUN_ID"]
        return None if stated == "none" else re.sub(r"[^A-Za-z0-9._-]", "-", stated).lstrip("._-")[:100] or None

    def agent_id(self, environ: Environ) -> str | None:
        """torchrun counts its restarts on each node for itself, so the count tells nothing; a pid may be used again."""
        import psutil

        parent = psutil.Process(os.getppid())
        return f"torchrun-{socket.gethostname()}-{parent.pid}-{parent.create_time():.0f}"

    def command_line(self, typed: list[str], cluster: Cluster, gpus: bool) -> str:
        meeting = [f"--nnodes={cluster.num_nodes}", "--rdzv-backend=c10d"]
        meeting += [f"--rdzv-endpoint={cluster.master_addr}:29500", "--rdzv-id=lockstep"]
        where = ["--standalone"] if cluster.num_nodes == 1 else meeting
        return shlex.join(["torchrun", *where, f"--nproc-per-node={cluster.devices}", *typed])


class Agent(Variables):
    """A rank that launch/agent.py has started on this node."""

    name = "agent"

    def recognises(self, environ: Environ, wanted: RequestedDevices) -> bool:
        return AGENT in environ and "RANK" in environ

    def cluster(self, environ: Environ, wanted: RequestedDevices) -> Cluster:
        launcher, num_nodes, node_rank, address, port = environ[AGENT].split()[1:]
        alone = num_nodes == "1"
        return Cluster(
            launcher, int(num_nodes), _integer(environ, "LOCAL_WORLD_SIZE"), int(node_rank),
            _integer(environ, "LOCAL_RANK"), address, _integer(environ, "MASTER_PORT") if alone else int(port),
            agent_store=alone, has_agent=True,
        )  # fmt: skip


class OpenMPI(Variables):
    name = "mpi"
    says = "mpirun"
    names = {
        "rank": "OMPI_COMM_WORLD_RANK", "size": "OMPI_COMM_WORLD_SIZE", "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }  # fmt: skip


class PMI(OpenMPI):
    """MPICH, Intel MPI and others with Hydra's process manager."""

    names = {"rank": "PMI_RANK", "size": "PMI_SIZE", "local_rank": "MPI_LOCALRANKID", "local_size": "MPI_LOCALNRANKS"}


class Slurm(Launcher):
    """A task of an srun step of several tasks; a batch script or an interactive shell has no such step."""

    name = "slurm"
    starts_ranks = True

    def recognises(self, environ: Environ, wanted: RequestedDevices) -> bool:
        tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1
        return "SLURM_STEP_ID" in environ and int(tasks) > 1

    def cluster(self, environ: Environ, wanted: RequestedDevices) -> Cluster:
        tasks = _integer(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
        nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
        if tasks % nodes:
            raise UserError(f"SLURM runs {tasks} tasks on {nodes} nodes: give every node as many (--ntasks-per-node).")
        if not wanted.several_processes:
            raise UserError(
                f"SLURM started {tasks} tasks, but this trainer runs in one process: choose trainer=ddp or fsdp."
            )
        devices, asked = wanted.devices, wanted.num_nodes or nodes
        if devices is not None and devices * asked != tasks:
            raise UserError(
                f"SLURM started {tasks} tasks, but trainer.devices={devices} × trainer.num_nodes={asked} = "
                f"{devices * asked} ranks: set --ntasks-per-node={devices}, or leave trainer.devices out."
            )
        _agree("num_nodes", wanted.num_nodes, nodes, "SLURM")
        node_list = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        number = int(environ["SLURM_JOB_ID"]) + 997 * int(environ.get("SLURM_STEP_ID") or 0)
        port = int(environ.get("MASTER_PORT") or 20000 + 4 * (number % 3000))  # another for each step of each job
        node_rank, local_rank = _integer(environ, "SLURM_NODEID"), _integer(environ, "SLURM_LOCALID")
        address = environ.get("MASTER_ADDR") or first_host(node_list)
        return Cluster(self.name, nodes, tasks // nodes, node_rank, local_rank, address, port)

    def run_id(self, environ: Environ) -> str | None:
        """A job keeps its id over a requeue, so that the run goes on in its folder."""
        return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}"

    def agent_id(self, environ: Environ) -> str | None:
        return self.run_id(environ)

    def is_first_on_node(self, environ: Environ) -> bool:
        return environ.get("SLURM_LOCALID") == "0"

    def binds_cores(self, environ: Environ, cores: int) -> bool:
        return cores <= int(environ.get("SLURM_CPUS_PER_TASK") or 0)

    def command_line(self, typed: list[str], cluster: Cluster, gpus: bool) -> str:
        words = ["srun", f"--nodes={cluster.num_nodes}", f"--ntasks-per-node={cluster.devices}"]
        words += [f"--gpus-per-node={cluster.devices}"] * gpus
        return shlex.join([*words, "python", *typed])


LAUNCHERS = (Agent(), Torchrun(), Slurm(), OpenMPI(), PMI(), Variables(), Nodes(), Launcher())  # the first that fits


def launcher_of(environ: Environ, wanted: RequestedDevices | None = None) -> Launcher:
    return next(each for each in LAUNCHERS if each.recognises(environ, wanted or RequestedDevices()))


def launcher_named(name: str) -> Launcher:
    return next(each for each in LAUNCHERS if each.name == name)


def describe(environ: Environ, wanted: RequestedDevices) -> Cluster:
    """Return the cluster that the environment and the trainer's options describe together.

    Raises:
        UserError: the two contradict each other, or something is missing.
    """
    return launcher_of(environ, wanted).cluster(environ, wanted)


def outside_run_id(environ: Environ) -> str | None:
    """Return the run id of RUN_ID or of the launcher; torchrun inside an srun step may have SLURM's."""
    stated = (each.run_id(environ) for each in LAUNCHERS if each.recognises(environ, RequestedDevices()))
    return environ.get("RUN_ID") or next(filter(None, stated), None)


def agent_id(environ: Environ) -> str | None:
    """Name what would start this process again in the same run: torchrun's agent or the SLURM step; else None."""
    return launcher_of(environ).agent_id(environ)


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list: `gpu[03-05,9],login` → `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,]*)", node_list)
    assert match, node_list
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[,-]", numbers)[0] if numbers else "") + suffix


def restart_run_id(environ: Environ) -> str | None:
    """Return a run id that stays the same when torchrun starts its ranks again; None under any other launcher."""
    if not launcher_of(environ).restarts_ranks:
        return None
    import psutil

    started = datetime.fromtimestamp(psutil.Process(os.getppid()).create_time(), UTC)
    return f"{started:%Y-%m-%d_%H-%M-%S}_{sha256(str(agent_id(environ)).encode()).hexdigest()[:6]}"


def named_run(config: Mapping[str, Any], environ: Environ) -> str | None:
    """Return the run id that the user or the launcher gives the run."""
    return config.get("run_id") or outside_run_id(environ)


def _integer(environ: Environ, name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    try:
        return int(environ[name])
    except KeyError:
        raise UserError(f"{name} is not set, and this launch needs it.") from None
    except ValueError:
        raise UserError(f"{name}={environ[name]!r} is no whole number.") from None


def _agree(name: str, stated: int | None, given: int, source: str) -> None:
    if stated is not None and stated != given:
        raise UserError(f"trainer.{name}={stated}, but {source} started {given}: leave trainer.{name} out, or equal.")
