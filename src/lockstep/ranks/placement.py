"""The processes, GPUs and nodes that the options of each trainer ask for.

Imports no torch, because it is needed before torch is.
"""

from dataclasses import dataclass

from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.records.config import Config

# Ranks of a strategy over CPUs if neither the user nor a launcher says how many.
CPU_RANKS = 2


@dataclass(frozen=True)
class RequestedDevices:
    """The processes that the options of a trainer ask for.

    Args:
        ranks_per_node: the processes on each node, if the user stated trainer.devices.
        num_nodes: trainer.num_nodes, if the user stated it.
        several_processes: one process for each device, or group of devices; else one process,
            whatever it computes on.
        default_ranks: the processes on each node, if the user stated none.
        devices_per_rank: the devices of one of several processes.
    """

    ranks_per_node: int | None = None
    num_nodes: int | None = None
    several_processes: bool = True
    default_ranks: int = 1
    devices_per_rank: int = 1


def resolve_devices(
    trainer: Config, name: str, gpus: int, is_training: bool = True
) -> tuple[str, RequestedDevices]:
    """Return "cpu" or "gpu", and what the launcher has to start.

    Args:
        trainer: the config's trainer node.
        name: the option that was chosen, as trainer=name.
        gpus: the number of GPUs that this process sees.
        is_training: whether to advise a small recipe, because others train too slowly on a CPU.

    Raises:
        UserError: the options ask for more GPUs than this machine has, for several processes of a
            trainer that is one process, or for devices that do not divide into ranks. It says what
            works here.
    """
    devices = _parse_count(trainer["devices"], "devices")
    num_nodes = _parse_count(trainer["num_nodes"], "num_nodes")
    is_one_process = trainer["launch"] == "one_process"
    if is_one_process and (devices or 1, num_nodes or 1) != (1, 1):
        raise UserError(
            f"trainer.devices={devices} trainer.num_nodes={num_nodes}, but trainer={name} is one "
            "process: trainer=ddp (on CPUs ddp_sim) has several; dp takes trainer.num_gpus, "
            "model_parallel trainer.stage_devices."
        )

    devices_per_rank = count_devices_per_rank(trainer)
    accelerator = _choose_accelerator(trainer, gpus)
    default_ranks = 1
    if accelerator == "gpu":
        _refuse_missing_gpus(trainer, name, gpus, devices or 1, is_training)
        default_ranks = gpus
    elif trainer["strategy"] and not is_one_process:
        default_ranks = CPU_RANKS * devices_per_rank
    ranks_per_node = None
    if devices is None:
        default_ranks = count_ranks_of_node(default_ranks, devices_per_rank)
    else:
        ranks_per_node = count_ranks_of_node(devices, devices_per_rank)
    return accelerator, RequestedDevices(
        ranks_per_node, num_nodes, not is_one_process, default_ranks, devices_per_rank
    )


def count_devices_per_rank(trainer: Config) -> int:
    """Return the number of devices of each rank; 1 for a trainer of one process."""
    if trainer["launch"] == "one_process":
        return 1
    return _parse_count(trainer.get("process_devices", 1), "process_devices") or 1


def count_ranks_of_node(devices: int, devices_per_rank: int) -> int:
    """Return the number of ranks of a node, of `devices_per_rank` devices each.

    Raises:
        UserError: the devices of the node do not divide so.
    """
    ranks, rest = divmod(devices, devices_per_rank)
    if rest:
        fits = max(ranks, 1) * devices_per_rank
        raise UserError(
            f"{devices} devices of a node do not divide into ranks of {devices_per_rank} devices: "
            f"pass trainer.devices={fits} or another multiple of {devices_per_rank}."
        )
    return ranks


def _parse_count(value: int | str, key: str) -> int | None:
    """Return a number of devices or nodes; None for auto."""
    if value == "auto":
        return None
    if not isinstance(value, int) or value < 1:
        raise UserError(f"trainer.{key}={value!r}: give a number from 1 on, or auto.")
    return value


def _choose_accelerator(trainer: Config, gpus: int) -> str:
    """Return "cpu" or "gpu"."""
    process_devices = trainer.get("process_devices")
    if isinstance(process_devices, list):
        return "cpu" if str(process_devices[0]).startswith("cpu") else "gpu"
    if trainer["accelerator"] == "auto":
        return "gpu" if gpus else "cpu"
    return str(trainer["accelerator"])


def _refuse_missing_gpus(
    trainer: Config, name: str, gpus: int, devices: int, is_training: bool
) -> None:
    """Refuse a trainer that asks for more GPUs than there are, and say what works here."""
    needed = count_needed_gpus(trainer, devices)
    if gpus >= needed:
        return
    needed_gpus = f"{needed} GPU" if needed == 1 else f"{needed} GPUs"
    present_gpus = {0: "no GPU", 1: "1 GPU"}.get(gpus, f"{gpus} GPUs")
    advice = f"trainer={choose_cpu_option(name)} works here."
    if is_training:
        advice = f"experiment=quickstart {advice}"
    raise UserError(
        f"trainer={name} asks for {needed_gpus} and this machine has {present_gpus}: {advice}"
    )


def count_needed_gpus(trainer: Config, devices: int) -> int:
    """Return the number of GPUs of a node that a trainer needs, if it runs on GPUs.

    Args:
        devices: trainer.devices, or 1 for auto.
    """
    process_devices = trainer.get("process_devices", devices)
    if isinstance(process_devices, int):
        return max(process_devices, devices)
    # The strategy itself checks the names of its devices. If it can run on CPUs, it also checks
    # that `null` leaves it enough devices.
    if process_devices or trainer["accelerator"] != "gpu":
        return 1
    return 2


def one_process_options(trainer: Config, override_keys: set[str]) -> Config:
    """Return the options of a trainer with those of one process.

    Args:
        override_keys: the keys of the command line's overrides.

    Raises:
        UserError: an override asks for several processes.
    """
    one_process = {
        "launch": "one_process",
        "devices": 1,
        "num_nodes": 1,
        "process_devices": 1,
        "strategy": None,
    }
    for option, value in one_process.items():
        if f"trainer.{option}" in override_keys and trainer[option] != value:
            raise UserError(
                f"trainer.{option}={trainer[option]} needs trainer=, as trainer=ddp: without it "
                "one process works on one device."
            )
    return {**trainer, **one_process}


def choose_cpu_option(name: str) -> str:
    """Return the option that a machine without the GPUs of trainer=NAME can run."""
    simulated = f"{name}_sim"
    if (REPOSITORY / "configs" / "trainer" / f"{simulated}.yaml").is_file():
        return simulated
    return "cpu"
