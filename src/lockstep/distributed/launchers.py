"""How a process was started: one table of launchers, each with its recognition, cluster, run id, agent and command.

Nothing (this machine alone), one command per node (MASTER_ADDR, MASTER_PORT, NODE_RANK, WORLD_SIZE), torchrun, SLURM's
srun, and our own supervisor, whose ranks look like torchrun's. Another launcher is one class more in LAUNCHERS.
"""

import hashlib
import os
import re
import shlex
import socket
from collections.abc import Mapping
from datetime import UTC, datetime

from lockstep.distributed.cluster import PLAN_FILE, Cluster, Wanted
from lockstep.runs.errors import UserError

Environ = Mapping[str, str]


class Launcher:
    """This machine alone; the others differ from it.

    Attributes:
        starts_ranks: it decided how many ranks there are, and this process is one of them.
        restarts_ranks: it starts ranks again that end with another exit code than 0.
    """

    name = "none"
    starts_ranks = False
    restarts_ranks = False

    def recognises(self, environ: Environ, wanted: Wanted) -> bool:
        return True

    def cluster(self, environ: Environ, wanted: Wanted) -> Cluster:
        """
        Raises:
            UserError: environment and options contradict each other, or something is missing.
        """
        devices = (wanted.devices or wanted.machine) if wanted.several_processes else 1
        return Cluster(self.name, 1, devices, 0, None if devices > 1 else 0, "127.0.0.1", None)

    def run_id(self, environ: Environ) -> str | None:
        """What it gives to all processes of a run, and again after a restart."""
        return None

    def agent_id(self, environ: Environ) -> str | None:
        """What would start this process again in the same run."""
        return None

    def is_first_on_node(self, environ: Environ) -> bool:
        """Of the processes that it started on this node the one that prepares what all of them read."""
        return True

    def binds_cores(self, environ: Environ, cores: int) -> bool:
        """The `cores` that this process may use are this rank's alone."""
        return False

    def command_line(self, typed: list[str], cluster: Cluster, gpus: bool) -> str:
        """The line that starts such a run again.

        Args:
            typed: the program, relative to the repository, and its options.
        """
        return shlex.join(["python", *typed])


class Nodes(Launcher):
    """One command on each node; our supervisor starts its ranks."""

    name = "nodes"

    def recognises(self, environ: Environ, wanted: Wanted) -> bool:
        return wanted.several_processes and ("NODE_RANK" in environ or (wanted.num_nodes or 1) > 1)

    def cluster(self, environ: Environ, wanted: Wanted) -> Cluster:
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
        local_rank, port = 0 if devices * num_nodes == 1 else None, _integer(environ, "MASTER_PORT")
        return Cluster(self.name, num_nodes, devices, node_rank, local_rank, environ["MASTER_ADDR"], port)

    def command_line(self, typed: list[str], cluster: Cluster, gpus: bool) -> str:
        address = f"MASTER_ADDR={cluster.master_addr} MASTER_PORT={cluster.master_port}"
        size = f"WORLD_SIZE={cluster.world_size} NODE_RANK={cluster.node_rank}"
        return f"{address} {size} {super().command_line(typed, cluster, gpus)}"


def _shape(world_size: int | None, wanted: Wanted) -> tuple[int, int]:
    """(devices on each node, nodes) where WORLD_SIZE may say what the options do not."""
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


class Supervised(Launcher):
    """A rank of our own supervisor, which has decided everything already; its environment is like torchrun's."""

    name = "supervisor"
    starts_ranks = True

    def recognises(self, environ: Environ, wanted: Wanted) -> bool:
        return PLAN_FILE in environ and "RANK" in environ

    def cluster(self, environ: Environ, wanted: Wanted) -> Cluster:
        devices = _integer(environ, "LOCAL_WORLD_SIZE")
        nodes = int(environ.get("GROUP_WORLD_SIZE") or _integer(environ, "WORLD_SIZE") // devices)
        if not wanted.several_processes and devices * nodes > 1:
            raise UserError(
                f"torchrun started {devices * nodes} processes, but this trainer runs in one: "
                "choose trainer=ddp or trainer=fsdp (on CPUs ddp_sim or fsdp_sim), or start it without torchrun."
            )
        if wanted.several_processes:
            _agree("devices", wanted.devices, devices, "torchrun")
            _agree("num_nodes", wanted.num_nodes, nodes, "torchrun")
        node_rank, local_rank = _integer(environ, "RANK") // devices, _integer(environ, "LOCAL_RANK")
        address, port = environ.get("MASTER_ADDR", "127.0.0.1"), _integer(environ, "MASTER_PORT")
        agent_store = self.restarts_ranks and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Cluster(self.name, nodes, devices, node_rank, local_rank, address, port, agent_store)

    def is_first_on_node(self, environ: Environ) -> bool:
        return environ.get("LOCAL_RANK") == "0"


class Torchrun(Supervised):
    """One process for each rank, started and started again by torchrun's agent on each node."""

    name = "torchrun"
    restarts_ranks = True

    def recognises(self, environ: Environ, wanted: Wanted) -> bool:
        return "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ

    def run_id(self, environ: Environ) -> str | None:
        """--rdzv-id; torchrun's "none" counts as unset."""
        stated = environ["TORCHELASTIC_RUN_ID"]
        return None if stated == "none" else re.sub(r"[^A-Za-z0-9._-]", "-", stated).lstrip("._-")[:100] or None

    def agent_id(self, environ: Environ) -> str | None:
        """torchrun counts its restarts on each node for itself, so the count tells nothing."""
        parent = os.getppid()
        return f"torchrun-{socket.gethostname()}-{parent}-{_started_at(parent):.0f}"

    def command_line(self, typed: list[str], cluster: Cluster, gpus: bool) -> str:
        meeting = [f"--nnodes={cluster.num_nodes}", "--rdzv-backend=c10d"]
        meeting += [f"--rdzv-endpoint={cluster.master_addr}:29500", "--rdzv-id=lockstep"]
        where = ["--standalone"] if cluster.num_nodes == 1 else meeting
        return shlex.join(["torchrun", *where, f"--nproc-per-node={cluster.devices}", *typed])


class Slurm(Launcher):
    """A task of an srun step of several tasks; a batch script or an interactive shell has no such step."""

    name = "slurm"
    starts_ranks = True

    def recognises(self, environ: Environ, wanted: Wanted) -> bool:
        tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1
        return "SLURM_STEP_ID" in environ and int(tasks) > 1

    def cluster(self, environ: Environ, wanted: Wanted) -> Cluster:
        tasks = _integer(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
        nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
        self._check(tasks, nodes, wanted)
        node_list = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        address = environ.get("MASTER_ADDR") or first_host(node_list)
        # Four for each step, for the sessions of the batch search too; neighbours on a node and steps of a job differ.
        number = int(environ["SLURM_JOB_ID"]) + 997 * int(environ.get("SLURM_STEP_ID") or 0)
        port = int(environ.get("MASTER_PORT") or 20000 + 4 * (number % 3000))
        node_rank, local_rank = _integer(environ, "SLURM_NODEID"), _integer(environ, "SLURM_LOCALID")
        return Cluster(self.name, nodes, tasks // nodes, node_rank, local_rank, address, port)

    @staticmethod
    def _check(tasks: int, nodes: int, wanted: Wanted) -> None:
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


LAUNCHERS = (Supervised(), Torchrun(), Slurm(), Nodes(), Launcher())  # the first that recognises itself wins


def launcher_of(environ: Environ, wanted: Wanted | None = None) -> Launcher:
    return next(launcher for launcher in LAUNCHERS if launcher.recognises(environ, wanted or Wanted()))


def launcher_named(name: str) -> Launcher:
    return next(launcher for launcher in LAUNCHERS if launcher.name == name)


def describe(environ: Environ, wanted: Wanted) -> Cluster:
    """The Cluster that the environment and the trainer's options describe together.

    Raises:
        UserError: the two contradict each other, or something is missing.
    """
    return launcher_of(environ, wanted).cluster(environ, wanted)


def outside_run_id(environ: Environ) -> str | None:
    """The run id that whatever started this process gives to all its processes, or None.

    Of torchrun inside an srun step SLURM's, where torchrun has none.
    """
    stated = (each.run_id(environ) for each in LAUNCHERS if each.recognises(environ, Wanted()))
    return environ.get("RUN_ID") or next(filter(None, stated), None)


def agent_id(environ: Environ) -> str | None:
    """What would start this process again in the same run: torchrun's agent or the SLURM step; else None."""
    return launcher_of(environ).agent_id(environ)


def agent_run_id(environ: Environ) -> str:
    """A run id for all ranks that this torchrun agent starts, now and after its restarts."""
    started = datetime.fromtimestamp(_started_at(os.getppid()), UTC)
    return f"{started:%Y-%m-%d_%H-%M-%S}_{hashlib.sha256(str(agent_id(environ)).encode()).hexdigest()[:6]}"


def slurm_task(environ: Environ) -> tuple[int, int]:
    """This process's number among a SLURM step's tasks, and how often its job was queued again; (0, 0) elsewhere."""
    return int(environ.get("SLURM_PROCID") or 0), int(environ.get("SLURM_RESTART_COUNT") or 0)


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: `gpu[03-05,9],login` → `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,]*)", node_list)
    assert match, node_list
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[,-]", numbers)[0] if numbers else "") + suffix


def _started_at(pid: int) -> float:
    """Seconds since 1970; a pid alone may be used again."""
    import psutil

    return psutil.Process(pid).create_time()


def _integer(environ: Environ, name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise UserError(f"{name} is not set, and this launch needs it.") from None
    except ValueError:
        raise UserError(f"{name}={environ[name]!r} is no whole number.") from None


def _agree(name: str, stated: int | None, given: int, source: str) -> None:
    if stated is not None and stated != given:
        raise UserError(f"trainer.{name}={stated}, but {source} started {given}: leave trainer.{name} out, or equal.")
