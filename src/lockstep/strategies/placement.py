"""The processes, GPUs and nodes that the options of each trainer ask for. Imports no torch: the launcher asks."""

from dataclasses import dataclass

from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import REPOSITORY


@dataclass(frozen=True)
class RequestedDevices:
    """The devices that the options of a trainer ask for.

    Args:
        devices, num_nodes: trainer.devices and trainer.num_nodes if the user stated them.
        several_processes: one process for each device; else one process, whatever it computes on.
        machine: the default number of devices of this machine.
    """

    devices: int | None = None
    num_nodes: int | None = None
    several_processes: bool = True
    machine: int = 1


def place(trainer: Config, name: str, gpus: int) -> tuple[str, RequestedDevices]:
    """Return "cpu" or "gpu", and what the launcher has to start.

    Args:
        trainer: the config's trainer node.
        name: the option that was chosen, as trainer=name.
        gpus: that this process sees.
    Raises:
        UserError: a GPU is asked for on a machine that has none, with the option that works there; one process is
            asked to be several.
    """
    devices, num_nodes = (None if trainer[key] == "auto" else trainer[key] for key in ("devices", "num_nodes"))
    is_one = trainer["launch"] == "one_process"
    if is_one and (devices or 1, num_nodes or 1) != (1, 1):
        raise UserError(
            f"trainer.devices={devices} trainer.num_nodes={num_nodes}, but trainer={name} is one process: trainer=ddp "
            "(on CPUs ddp_sim) has several; dp takes trainer.num_gpus, model_parallel trainer.stage_devices."
        )
    if devices is not None and (not isinstance(devices, int) or devices < 1):
        raise UserError(f"trainer.devices={devices!r}: give a number from 1 on, or auto.")
    accelerator = str(trainer["accelerator"])
    needed = gpus_needed(trainer, devices or 1)
    process_devices = trainer.get("process_devices")
    if isinstance(process_devices, list):
        accelerator = "cpu" if str(process_devices[0]).startswith("cpu") else "gpu"
    elif accelerator == "auto":
        accelerator = "gpu" if gpus else "cpu"
    if accelerator == "gpu" and gpus < needed:
        has = f"{gpus or 'no'} GPU{'s' if gpus > 1 else ''}"
        raise UserError(
            f"trainer={name} asks for {needed} GPU{'s' if needed > 1 else ''} and this machine has {has}: "
            f"trainer={option_for_cpus(name)} works here."
        )
    return accelerator, RequestedDevices(devices, num_nodes, not is_one, gpus if accelerator == "gpu" else 1)


def gpus_needed(trainer: Config, devices: int) -> int:
    """Return the number of GPUs of a node that a trainer needs, if it runs on GPUs.

    Args:
        devices: the processes on each node.
    """
    process_devices = trainer.get("process_devices", devices)
    if isinstance(process_devices, int):
        return process_devices
    # The strategy itself checks the names of its devices, and that `null` leaves it enough of them
    # where it runs on CPUs too.
    if process_devices or trainer["accelerator"] != "gpu":
        return 1
    return 2


def option_for_cpus(name: str) -> str:
    """Return the option that a machine without the GPUs of trainer=NAME can run."""
    simulated = f"{name}_sim"
    if (REPOSITORY / "configs" / "trainer" / f"{simulated}.yaml").is_file():
        return simulated
    return "cpu"
