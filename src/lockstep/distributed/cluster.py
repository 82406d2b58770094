"""The world that a process was started in, as one frozen Cluster; the only reader of the environment.

Four ways to be started are told apart: by nothing (this machine alone), by one command per node (MASTER_ADDR,
MASTER_PORT, NODE_RANK, WORLD_SIZE), by torchrun, and by SLURM's srun. A rank that our own supervisor started
looks like one of torchrun's, with LOCKSTEP_CONFIG naming the composed config.
"""

import itertools
import logging
import os
import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lockstep.runs.errors import UserError

log = logging.getLogger(__name__)

SUPERVISED_CONFIG = "LOCKSTEP_CONFIG"
SUPERVISOR_PORT = "LOCKSTEP_SUPERVISOR_PORT"


@dataclass(frozen=True)
class Cluster:
    """Who this process is in the world.

    `local_rank` is None in a node's supervisor, which is no rank itself.
    """

    launcher: str  # none | nodes | torchrun | slurm
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
        """Rank zero of the world, or the supervisor of node 0."""
        return self.rank == 0

    @property
    def is_supervisor(self) -> bool:
        return self.local_rank is None

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


def describe(
    environ: Mapping[str, str], *, devices: int | None, num_nodes: int | None, several_processes: bool, machine: int
) -> Cluster:
    """The Cluster that the environment and the trainer's options describe together.

    Args:
        devices: trainer.devices where the user stated it.
        num_nodes: trainer.num_nodes where the user stated it.
        several_processes: the trainer wants one process per device.
        machine: how many devices a process-per-device trainer uses here when nobody says otherwise.
    Raises:
        UserError: the two contradict each other, or something is missing.
    """
    if _started_by_torchrun(environ):
        return _from_torchrun(environ, devices, num_nodes, several_processes)
    if _started_by_srun(environ):
        return _from_srun(environ, devices, num_nodes, several_processes)
    if not several_processes:
        return Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)
    if "NODE_RANK" in environ or (num_nodes or 1) > 1:
        return _from_nodes(environ, devices, num_nodes, machine)
    devices = devices or machine
    return Cluster("none", 1, devices, 0, None if devices > 1 else 0, "127.0.0.1", None)


def supervised_config(environ: Mapping[str, str] | None = None) -> str | None:
    """The composed config's path in a rank that our supervisor started; None anywhere else."""
    return (os.environ if environ is None else environ).get(SUPERVISED_CONFIG)


def environment() -> dict[str, str]:
    """A copy of this process's environment: doors hand it on, nothing else reads it."""
    return dict(os.environ)


def outside_run_id(environ: Mapping[str, str]) -> str | None:
    """The run id that whatever started this process gives to all its processes, or None.

    torchrun's "none" counts as unset; a SLURM job shares its id over a requeue, so the run goes on in its folder.
    """
    if environ.get("RUN_ID"):
        return environ["RUN_ID"]
    elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
    if elastic != "none":
        return re.sub(r"[^A-Za-z0-9._-]", "-", elastic).lstrip("._-")[:100] or None
    if "SLURM_JOB_ID" in environ and _started_by_srun(environ):
        return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}"
    return None


def adopt(cluster: Cluster, environ: dict[str, str] | None = None) -> None:
    """Give this process the environment variables of its rank, as libraries beneath read them."""
    target = os.environ if environ is None else environ
    for name, value in cluster.rank_environment(cluster.local_rank or 0, cluster.master_port or 0).items():
        target[name] = value
    target.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi counts, and our readings do
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


def agent_id(environ: Mapping[str, str]) -> str | None:
    """What would start this process again in the same run: torchrun's agent or the SLURM step; else None.

    torchrun counts its restarts on each node for itself, so the count tells nothing.
    """
    if _started_by_torchrun(environ) and SUPERVISED_CONFIG not in environ:
        parent = os.getppid()
        return f"torchrun-{socket.gethostname()}-{parent}-{_started_at(parent):.0f}"
    if _started_by_srun(environ):
        return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}"
    return None


def launched_alone(environ: Mapping[str, str]) -> bool:
    """Neither torchrun nor srun decided how many ranks there are."""
    return not (_started_by_torchrun(environ) or _started_by_srun(environ))


def first_on_node(environ: Mapping[str, str]) -> bool:
    """Of the processes that a launcher started on this node the one that prepares what all of them read."""
    if _started_by_torchrun(environ):
        return environ.get("LOCAL_RANK") == "0"
    return not _started_by_srun(environ) or environ.get("SLURM_LOCALID") == "0"


def slurm_task(environ: Mapping[str, str]) -> tuple[int, int]:
    """This process's number among a SLURM step's tasks, and how often its job was queued again; (0, 0) elsewhere."""
    return int(environ.get("SLURM_PROCID") or 0), int(environ.get("SLURM_RESTART_COUNT") or 0)


def agent_run_id(environ: Mapping[str, str]) -> str:
    """A run id for all ranks that this torchrun agent starts, now and after its restarts."""
    import hashlib
    from datetime import UTC, datetime

    started = datetime.fromtimestamp(_started_at(os.getppid()), UTC)
    return f"{started:%Y-%m-%d_%H-%M-%S}_{hashlib.sha256(str(agent_id(environ)).encode()).hexdigest()[:6]}"


def _started_at(pid: int) -> float:
    """Seconds since 1970; a pid alone may be used again."""
    import psutil

    return psutil.Process(pid).create_time()


def supervisor_port(environ: Mapping[str, str] | None = None) -> int | None:
    """Where a rank's heartbeat goes on this host; None without a supervisor."""
    return int((os.environ if environ is None else environ).get(SUPERVISOR_PORT, 0)) or None


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


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as this process was given it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def host_name() -> str:
    return socket.gethostname()


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise UserError(f"{name} is not set, and this launch needs it.") from None
    except ValueError:
        raise UserError(f"{name}={environ[name]!r} is no whole number.") from None


def _agree(name: str, stated: int | None, given: int, source: str) -> None:
    if stated is not None and stated != given:
        raise UserError(f"trainer.{name}={stated}, but {source} started {given}: leave trainer.{name} out, or equal.")


def _started_by_torchrun(environ: Mapping[str, str]) -> bool:
    return ("TORCHELASTIC_RUN_ID" in environ or SUPERVISED_CONFIG in environ) and "RANK" in environ


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    """Inside an srun step of several tasks; a batch script or an interactive shell has no such step."""
    return "SLURM_STEP_ID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", 1))) > 1


def _from_torchrun(environ, devices, num_nodes, several_processes) -> Cluster:
    given_devices = _integer(environ, "LOCAL_WORLD_SIZE")
    given_nodes = int(environ.get("GROUP_WORLD_SIZE") or _integer(environ, "WORLD_SIZE") // given_devices)
    if not several_processes and given_devices * given_nodes > 1:
        raise UserError(
            f"torchrun started {given_devices * given_nodes} processes, but this trainer runs in one: "
            "choose trainer=ddp or trainer=fsdp (on CPUs ddp_sim or fsdp_sim), or start it without torchrun."
        )
    if several_processes:
        _agree("devices", devices, given_devices, "torchrun")
        _agree("num_nodes", num_nodes, given_nodes, "torchrun")
    return Cluster(
        "supervisor" if SUPERVISED_CONFIG in environ else "torchrun",
        given_nodes,
        given_devices,
        _integer(environ, "RANK") // given_devices,
        _integer(environ, "LOCAL_RANK"),
        environ.get("MASTER_ADDR", "127.0.0.1"),
        _integer(environ, "MASTER_PORT"),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and SUPERVISED_CONFIG not in environ,
    )


def _from_srun(environ, devices, num_nodes, several_processes) -> Cluster:
    tasks = _integer(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    given_nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", 1))
    if tasks % given_nodes:
        raise UserError(
            f"SLURM runs {tasks} tasks on {given_nodes} nodes: give every node as many (--ntasks-per-node)."
        )
    given_devices = tasks // given_nodes
    if not several_processes:
        raise UserError(
            f"SLURM started {tasks} tasks, but this trainer runs in one process: choose trainer=ddp or fsdp."
        )
    nodes = num_nodes or given_nodes
    if devices is not None and devices * nodes != tasks:
        raise UserError(
            f"SLURM started {tasks} tasks, but trainer.devices={devices} × trainer.num_nodes={nodes} = "
            f"{devices * nodes} ranks: set --ntasks-per-node={devices}, or leave trainer.devices out."
        )
    _agree("num_nodes", num_nodes, given_nodes, "SLURM")
    node_rank, local_rank = _integer(environ, "SLURM_NODEID"), _integer(environ, "SLURM_LOCALID")
    address = environ.get("MASTER_ADDR") or first_host(
        environ.get("SLURM_STEP_NODELIST", environ["SLURM_JOB_NODELIST"])
    )
    # Four for each step, for the sessions of the batch search too; neighbours on a node and steps of a job differ.
    number = int(environ["SLURM_JOB_ID"]) + 997 * int(environ.get("SLURM_STEP_ID") or 0)
    port = int(environ.get("MASTER_PORT") or 20000 + 4 * (number % 3000))
    return Cluster("slurm", given_nodes, given_devices, node_rank, local_rank, address, port)


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: `gpu[03-05,9],login` → `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,]*)", node_list)
    assert match, node_list
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[,-]", numbers)[0] if numbers else "") + suffix


def _from_nodes(environ, devices, num_nodes, machine) -> Cluster:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not environ.get(name)]
    if missing:
        raise UserError(
            f"Several nodes, and {' and '.join(missing)} not set: start on each node "
            "MASTER_ADDR=<address of node 0> MASTER_PORT=29500 NODE_RANK=<0, 1, …> python src/train.py …"
        )
    world_size = _integer(environ, "WORLD_SIZE") if environ.get("WORLD_SIZE") else None
    if devices is None:
        devices = world_size // num_nodes if world_size and num_nodes and world_size % num_nodes == 0 else machine
    if num_nodes is None:
        if world_size is None:
            raise UserError("NODE_RANK is set, but not how many nodes there are: give trainer.num_nodes=N.")
        num_nodes = max(world_size // devices, 1)
    if world_size is not None and world_size != devices * num_nodes:
        raise UserError(
            f"WORLD_SIZE={world_size}, but trainer.devices={devices} × trainer.num_nodes={num_nodes} = "
            f"{devices * num_nodes} processes: make them equal, or leave WORLD_SIZE unset."
        )
    node_rank = _integer(environ, "NODE_RANK")
    if not 0 <= node_rank < num_nodes:
        raise UserError(
            f"NODE_RANK={node_rank}, but trainer.num_nodes={num_nodes}: it counts from 0 to {num_nodes - 1}."
        )
    port = _integer(environ, "MASTER_PORT")
    cluster = Cluster("nodes", num_nodes, devices, node_rank, None, environ["MASTER_ADDR"], port)
    return replace(cluster, local_rank=0) if cluster.world_size == 1 else cluster


def command_line(typed: list[str], cluster: Cluster, gpus: bool) -> str:
    """The line that starts such a run again: the program and options as typed, behind what launched its ranks.

    Args:
        typed: the program, relative to the repository, and its options.
    """
    nodes, ranks = cluster.num_nodes, cluster.devices
    python = ["python", *typed]
    if cluster.launcher == "slurm":
        words = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={ranks}", *([f"--gpus-per-node={ranks}"] * gpus)]
        return shlex.join([*words, *python])
    if cluster.launcher == "torchrun":
        meeting = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.master_addr}:29500"]
        where = ["--standalone"] if nodes == 1 else [*meeting, "--rdzv-id=lockstep"]
        return shlex.join(["torchrun", *where, f"--nproc-per-node={ranks}", *typed])
    if cluster.launcher == "nodes":
        address = f"MASTER_ADDR={cluster.master_addr} MASTER_PORT={cluster.master_port}"
        return f"{address} WORLD_SIZE={cluster.world_size} NODE_RANK={cluster.node_rank} {shlex.join(python)}"
    return shlex.join(python)
