"""Find out who started this process, and which rank of how many it is.

A process is started by nobody (on this machine alone), by one command per node (MASTER_ADDR,
MASTER_PORT, NODE_RANK), by Lockstep's own agent, torchrun, SLURM's srun or MPI, or by any other
launcher that sets RANK and WORLD_SIZE.
"""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.process.environment import (
    AGENT,
    count_visible_gpus,
    die_with_parent,
    environment,
    network_interface,
    set_variables,
)
from lockstep.process.errors import UserError
from lockstep.ranks.placement import RequestedDevices, resolve_devices
from lockstep.records.config import Config

log = logging.getLogger(__name__)

Environ = Mapping[str, str]


class Variables(NamedTuple):
    """The names of a launcher's variables."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str


LAUNCHER_VARIABLES = {
    "mpirun": Variables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH and Intel MPI
    "mpiexec": Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # torchrun, torch's env:// and PyTorchJob
    "env": Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}
# The variables of one command per node
NODE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
# Linux lists the devices of InfiniBand, RoCE and EFA here. NCCL finds them by itself.
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Cluster:
    """The rank that this process is, and the ranks around it.

    Args:
        launcher: none, nodes, torchrun, slurm, mpirun, mpiexec or env.
        ranks_per_node: the processes on each node.
        local_rank: None in a process that starts this node's ranks and is none itself.
        master_port: None on a single machine, where any free port will do.
        has_agent_store: an agent (torchrun's or Lockstep's) serves the store, and not rank 0.
        has_agent: Lockstep's agent has started this rank and reports its error.
    """

    launcher: str
    num_nodes: int
    ranks_per_node: int
    node_rank: int
    local_rank: int | None
    master_addr: str
    master_port: int | None
    has_agent_store: bool = False
    has_agent: bool = False
    accelerator: str = "cpu"

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def rank(self) -> int:
        """The global rank; in a process that starts ranks, that of the first one."""
        return self.node_rank * self.ranks_per_node + (self.local_rank or 0)

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def starts_ranks(self) -> bool:
        """True for a process that starts the ranks of its node and is none itself."""
        return self.local_rank is None


def set_rank_environment(cluster: Cluster) -> None:
    """Set torchrun's variables for this rank, and defaults of gloo, NCCL and the CUDA allocator."""
    set_variables(
        {
            "RANK": str(cluster.rank),
            "LOCAL_RANK": str(cluster.local_rank or 0),
            "WORLD_SIZE": str(cluster.world_size),
            "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
            "GROUP_RANK": str(cluster.node_rank),
            "GROUP_WORLD_SIZE": str(cluster.num_nodes),
            "MASTER_ADDR": cluster.master_addr,
            "MASTER_PORT": str(cluster.master_port or 0),
        }
    )
    defaults = {
        # CUDA counts the GPUs as nvidia-smi does.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # For a lost peer torch would print C++ stacks over the error that counts.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # NCCL's flight recorder keeps the last collectives.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # The step that meets a lost GPU raises an exception: NCCL's watchdog would abort the
        # process before that.
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    }
    # The allocator's option has two names. Without it fragments may take half of a GPU.
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment():
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if cluster.world_size > 1:
        defaults |= _choose_interfaces(cluster)
    set_variables(defaults, unless_set=True)


def _choose_interfaces(cluster: Cluster) -> dict[str, str]:
    """Return the network interface by which gloo and NCCL reach the master."""
    address = cluster.master_addr if cluster.num_nodes > 1 else "127.0.0.1"
    interface = network_interface(address)
    if not interface:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": interface}
    # NCCL may take a container's bridge otherwise, and hang.
    if cluster.num_nodes > 1 and not any(INFINIBAND.glob("*")):
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return variables


def find_slurm_step(environ: Environ) -> str | None:
    """Return a name for the srun step of this process, as slurm-1234-0; None if there is none.

    A step of one task counts as none. A batch script and an interactive shell have no step.
    """
    if environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}"


def detect_launcher(environ: Environ) -> str | None:
    """Name the launcher that decided how many ranks there are; None if none did."""
    for name, variable in (("agent", AGENT), ("torchrun", "TORCHELASTIC_RUN_ID")):
        if "RANK" in environ and variable in environ:
            return name
    if find_slurm_step(environ):
        return "slurm"
    for name, variables in LAUNCHER_VARIABLES.items():
        # srun with PMI-2 sets them in a step of one task, too, which has no launcher.
        is_step_of_one = name == "mpiexec" and environ.get("SLURM_STEP_NUM_TASKS") == "1"
        if variables.rank in environ and variables.world_size in environ and not is_step_of_one:
            return name
    return None


def is_first_on_node(environ: Environ) -> bool:
    """Return whether this process prepares what all ranks of its node read."""
    names = ["SLURM_LOCALID", *(variables.local_rank for variables in LAUNCHER_VARIABLES.values())]
    return all(environ.get(name, "0") == "0" for name in names)


def read_cluster(environ: Environ, requested: RequestedDevices) -> Cluster:
    """Return the cluster that the environment and the trainer's options describe together.

    Raises:
        UserError: they contradict each other.
    """
    name = detect_launcher(environ)
    if name == "agent":
        return _read_agent_cluster(environ)
    if name == "slurm":
        return _read_launched_rank(
            name, {**environ, **_translate_slurm_variables(environ)}, requested
        )
    if name is not None:
        return _read_launched_rank(name, environ, requested)
    if not requested.several_processes:
        return _describe_this_machine(ranks_per_node=1)
    if "NODE_RANK" in environ or (requested.num_nodes or 1) > 1:
        return _read_node_cluster(environ, requested)
    return _describe_this_machine(requested.ranks_per_node or requested.default_ranks)


def _describe_this_machine(ranks_per_node: int) -> Cluster:
    """Return the cluster of a machine on which no launcher has started the ranks."""
    return Cluster(
        launcher="none",
        num_nodes=1,
        ranks_per_node=ranks_per_node,
        node_rank=0,
        local_rank=_choose_local_rank(ranks_per_node),
        master_addr="127.0.0.1",
        master_port=None,
    )


def _choose_local_rank(ranks_per_node: int) -> int | None:
    """Return the local rank of a process that no launcher has given one.

    None if the process has to start several ranks.
    """
    return None if ranks_per_node > 1 else 0


def _read_agent_cluster(environ: Environ) -> Cluster:
    """Return the cluster that Lockstep's agent describes to its ranks."""
    launcher, num_nodes, node_rank, address, port = environ[AGENT].split(maxsplit=6)[1:6]
    return Cluster(
        launcher=launcher,
        num_nodes=int(num_nodes),
        ranks_per_node=int(environ["LOCAL_WORLD_SIZE"]),
        node_rank=int(node_rank),
        local_rank=int(environ["LOCAL_RANK"]),
        master_addr=address,
        master_port=int(port),
        has_agent_store=num_nodes == "1",
        has_agent=True,
    )


def _read_node_cluster(environ: Environ, requested: RequestedDevices) -> Cluster:
    """Return the cluster of one command per node."""
    ranks_per_node = requested.ranks_per_node or requested.default_ranks
    num_nodes = requested.num_nodes or 0
    world_size = ranks_per_node * num_nodes
    node_rank = _read_integer(environ, "NODE_RANK", 0)
    is_complete = all(environ.get(name) for name in NODE_VARIABLES)
    has_world_size = _read_integer(environ, "WORLD_SIZE", world_size) == world_size
    if not (is_complete and has_world_size and 0 <= node_rank < num_nodes):
        names = (*NODE_VARIABLES, "WORLD_SIZE")
        shown = " ".join(f"{name}={environ.get(name) or 'unset'}" for name in names)
        raise UserError(
            f"{shown} do not fit trainer.devices={ranks_per_node * requested.devices_per_rank} "
            f"trainer.num_nodes={num_nodes or 'unset'}: start on each of N nodes "
            "MASTER_ADDR=<address of node 0> MASTER_PORT=29500 NODE_RANK=<0 to N - 1> python "
            "src/train.py trainer.num_nodes=<N> …; WORLD_SIZE is N × trainer.devices, or "
            "not set."
        )
    return Cluster(
        launcher="nodes",
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        node_rank=node_rank,
        local_rank=_choose_local_rank(ranks_per_node),
        master_addr=_read_master_address(environ),
        master_port=_read_integer(environ, "MASTER_PORT"),
    )


def _read_master_address(environ: Environ) -> str:
    """Return MASTER_ADDR; an IPv6 address may stand in brackets, as in URLs."""
    address = environ.get("MASTER_ADDR") or "127.0.0.1"
    return address.removeprefix("[").removesuffix("]")


def _read_launched_rank(name: str, environ: Environ, requested: RequestedDevices) -> Cluster:
    """Return the cluster of a launcher that sets the rank of each process."""
    variables = LAUNCHER_VARIABLES.get(name, LAUNCHER_VARIABLES["env"])
    rank = _read_integer(environ, variables.rank)
    ranks_per_node = _read_integer(environ, variables.local_size, requested.ranks_per_node or 1)
    cluster = Cluster(
        launcher=name,
        num_nodes=_read_integer(environ, variables.world_size) // ranks_per_node,
        ranks_per_node=ranks_per_node,
        node_rank=rank // ranks_per_node,
        local_rank=_read_integer(environ, variables.local_rank, rank % ranks_per_node),
        master_addr=_read_master_address(environ),
        master_port=_read_integer(environ, "MASTER_PORT", 29500),
        has_agent_store=name == "torchrun"
        and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    _check_launched_rank(cluster, variables, environ, requested)
    if cluster.num_nodes > 1 and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        raise UserError(
            f"{_describe_launcher(name)} started {cluster.num_nodes} nodes: set MASTER_ADDR and "
            "MASTER_PORT for all."
        )
    return cluster


def _describe_launcher(launcher: str) -> str:
    """Return the name of a launcher as errors say it."""
    return "RANK and WORLD_SIZE" if launcher == "env" else launcher


def _check_launched_rank(
    cluster: Cluster, variables: Variables, environ: Environ, requested: RequestedDevices
) -> None:
    """Refuse ranks that contradict the trainer's options or their own launcher."""
    rank = _read_integer(environ, variables.rank)
    world_size = _read_integer(environ, variables.world_size)
    launcher = _describe_launcher(cluster.launcher)
    unset = ""
    if cluster.launcher != "slurm":
        unset = f", or unset {variables.rank} and {variables.world_size}"

    if world_size > 1 and not requested.several_processes:
        raise UserError(
            f"{launcher} started {world_size} processes, but this trainer runs in one: choose "
            f"trainer=ddp or trainer=fsdp (on CPUs ddp_sim or fsdp_sim){unset}."
        )
    devices = "ranks on a node"
    if requested.devices_per_rank > 1:
        devices += f" × {requested.devices_per_rank}"
    ranks_per_node = requested.ranks_per_node or cluster.ranks_per_node
    numbers = (world_size, rank)
    is_in_row = rank in range(world_size) and (cluster.world_size, cluster.rank) == numbers
    if not is_in_row or not _matches_request(requested, cluster):
        raise UserError(
            f"{launcher} started rank {rank} of {world_size}, number {cluster.local_rank} of "
            f"{cluster.ranks_per_node} on its node, but trainer.devices="
            f"{ranks_per_node * requested.devices_per_rank} × "
            f"trainer.num_nodes={requested.num_nodes or cluster.num_nodes}: every node needs as "
            f"many ranks, numbered in a row. Give trainer.devices=<{devices}>, or leave both "
            f"out{unset}."
        )


def _matches_request(requested: RequestedDevices, cluster: Cluster) -> bool:
    """Return whether a launcher started what the options ask for, where they ask for a number."""
    if not requested.several_processes:
        return True
    has_ranks = requested.ranks_per_node in (None, cluster.ranks_per_node)
    return has_ranks and requested.num_nodes in (None, cluster.num_nodes)


def _translate_slurm_variables(environ: Environ) -> dict[str, str]:
    """Return torchrun's variables for a task of an srun step."""
    tasks = _read_integer(environ, "SLURM_STEP_NUM_TASKS")
    ranks_per_node = tasks // _read_integer(environ, "SLURM_STEP_NUM_NODES")
    local_rank = _read_integer(environ, "SLURM_LOCALID")
    rank = _read_integer(environ, "SLURM_NODEID") * ranks_per_node + local_rank
    # Each step of each job has a port of its own.
    number = int(environ["SLURM_JOB_ID"]) + 997 * int(environ["SLURM_STEP_ID"])
    address = environ.get("MASTER_ADDR") or parse_first_host(environ["SLURM_STEP_NODELIST"])
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + number % 12000),
    }


def parse_first_host(node_list: str) -> str:
    """Return the first host of SLURM's node list: rack1gpu03 of `rack[1-2]gpu[03-05,9],login`."""
    # A comma within brackets separates numbers, and one outside of them separates names.
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", node_list)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def find_requested_run_id(config: Mapping[str, Any], environ: Environ) -> str | None:
    """Return the run id that the user, torchrun (--rdzv-id) or SLURM's job gives the run.

    It is the same after a restart.
    """
    rendezvous = environ.get("TORCHELASTIC_RUN_ID", "none")
    id_of_torchrun = ""
    if rendezvous != "none":
        id_of_torchrun = re.sub(r"[^A-Za-z0-9._-]", "-", rendezvous).lstrip("._-")[:100]
    return (
        config.get("run_id") or environ.get("RUN_ID") or id_of_torchrun or find_slurm_step(environ)
    )


def find_restart_id(environ: Environ) -> str | None:
    """Return a name for torchrun's agent or the SLURM step that would start this process again.

    None if nothing would.
    """
    if detect_launcher(environ) != "torchrun":
        return find_slurm_step(environ)
    import psutil

    agent = psutil.Process(os.getppid())
    started_at = datetime.fromtimestamp(agent.create_time(), UTC)
    return f"{started_at:%Y-%m-%d_%H-%M-%S}_torchrun-{agent.pid}"


def _read_integer(environ: Environ, name: str, default: int | None = None) -> int:
    value = environ.get(name) or default
    if value is None:
        raise UserError(f"{name} is not set, and this launch needs it.")
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name}={value!r} is not a whole number.") from None


def find_ranks(config: Config, environ: Environ | None = None) -> Cluster:
    """Return the cluster of this process, from the trainer's options and the environment.

    A rank that Lockstep's agent has started ends with the agent. Its output goes to a file, unless
    it is the first rank of its node.

    Args:
        environ: the environment variables; None: those of this process.

    Raises:
        UserError: the options do not fit this machine. It says what works here.
    """
    if environ is None:
        environ = environment()
    gpus = count_visible_gpus(environ)
    trainer_name = (config.get("choices") or {}).get("trainer", "this trainer")
    is_training = config["task_name"] == "train"
    accelerator, requested = resolve_devices(config["trainer"], trainer_name, gpus, is_training)
    cluster = replace(read_cluster(environ, requested), accelerator=accelerator)
    needed_gpus = cluster.ranks_per_node * requested.devices_per_rank
    if requested.several_processes and accelerator == "gpu" and needed_gpus > gpus:
        gpus_of_rank = {1: "one"}.get(requested.devices_per_rank, requested.devices_per_rank)
        raise UserError(
            f"{cluster.ranks_per_node} ranks on this node see {gpus} "
            f"GPU{'s' if gpus != 1 else ''}: "
            "each rank must see all of its node's (SLURM: --gpus-per-node, not --gpus-per-task), "
            f"and there must be {gpus_of_rank} for each."
        )
    elif cluster.is_rank_zero and requested.several_processes and accelerator == "gpu":
        _warn_of_idle_gpus(cluster, requested, gpus - needed_gpus)
    if cluster.has_agent:
        _attach_to_agent(cluster, environ[AGENT])
    return cluster


def _warn_of_idle_gpus(cluster: Cluster, requested: RequestedDevices, idle_gpus: int) -> None:
    """Warn if a launcher started fewer ranks than the node has GPUs for, as srun may do."""
    if idle_gpus < requested.devices_per_rank or requested.ranks_per_node is not None:
        return
    log.warning(
        f"{idle_gpus} GPUs of this node stay idle: {_describe_launcher(cluster.launcher)} started "
        f"{cluster.ranks_per_node} rank{'s' if cluster.ranks_per_node != 1 else ''} on it (SLURM: "
        "--ntasks-per-node is the number of ranks)."
    )


def _attach_to_agent(cluster: Cluster, description: str) -> None:
    """Let this rank end with its agent, and send its output to a file.

    The first rank writes to the terminal.
    """
    agent_pid, *_, output = description.split(maxsplit=6)
    die_with_parent(int(agent_pid))
    if cluster.local_rank:
        with (Path(output) / f"rank{cluster.rank}.log").open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
