"""What the options of each trainer ask of a machine: processes, GPUs, nodes. Imports no torch: the launcher asks.

A process computes on one device but under trainer=dp (num_gpus) and trainer=model_parallel (stage_devices).
"""

from dataclasses import dataclass
from typing import Any

from lockstep.runs.config import Config
from lockstep.runs.environment import environment, visible_gpus
from lockstep.runs.errors import UserError

SEVERAL_IN_ONE_PROCESS = ("num_gpus", "stage_devices")
OF_ONE_STRATEGY = {*SEVERAL_IN_ONE_PROCESS, "micro_batches", "cut"}
WITHOUT_GPUS = {"ddp": "ddp_sim", "fsdp": "fsdp_sim", "allreduce": "allreduce_sim", "dp": "ddp_sim"}


@dataclass(frozen=True)
class RequestedDevices:
    """What the options of a trainer ask for.

    Args:
        devices: trainer.devices if the user stated it.
        num_nodes: trainer.num_nodes if the user stated it.
        several_processes: one process for each device; else one process, whatever it computes on.
        machine: the default number of devices of this machine.
    """

    devices: int | None = None
    num_nodes: int | None = None
    several_processes: bool = True
    machine: int = 1


def place(trainer: Config, name: str, gpus: int) -> tuple[str, RequestedDevices]:
    """("cpu" or "gpu", what is asked of the launcher).

    Args:
        trainer: the config's trainer node.
        name: the option that was chosen, as trainer=name.
        gpus: that this process sees.
    Raises:
        UserError: a GPU is asked for where there is none, with the option that works here; one process is asked to
            be several.
    """
    _check_one_process(trainer, name)
    accelerator = _accelerator(trainer, gpus)
    stated = None if trainer["devices"] == "auto" else trainer["devices"]
    if stated is not None and (not isinstance(stated, int) or stated < 1):
        raise UserError(f"trainer.devices={stated!r}: give a number from 1 on, or auto.")
    if accelerator == "gpu":
        _check_gpus(trainer, name, gpus, stated)
    return accelerator, RequestedDevices(
        devices=stated,
        num_nodes=None if trainer["num_nodes"] == "auto" else trainer["num_nodes"],
        several_processes=trainer["launch"] == "process_per_device",
        machine=gpus if accelerator == "gpu" else 1,
    )


def _check_one_process(trainer: Config, name: str) -> None:
    """A trainer that runs in one process would silently leave out what it cannot do."""
    own = next((f"give trainer.{key}" for key in SEVERAL_IN_ONE_PROCESS if key in trainer), None)
    for key in ("devices", "num_nodes"):
        if trainer["launch"] == "one_process" and trainer[key] not in ("auto", 1):
            instead = (key == "devices" and own) or "trainer=ddp (on CPUs ddp_sim) has several"
            raise UserError(f"trainer.{key}={trainer[key]}, but trainer={name} is one process: {instead}.")


def _accelerator(trainer: Config, gpus: int) -> str:
    if stages := trainer.get("stage_devices"):
        return "cpu" if str(stages[0]).startswith("cpu") else "gpu"
    if trainer["accelerator"] == "auto":
        return "gpu" if gpus else "cpu"
    return str(trainer["accelerator"])


def _check_gpus(trainer: Config, name: str, gpus: int, devices: int | None) -> None:
    needed = (trainer["num_gpus"] or 2) if "num_gpus" in trainer else devices or 1
    if gpus < needed:
        has = "no GPU" if gpus == 0 else f"{gpus} GPU{'s' if gpus > 1 else ''}"
        raise UserError(
            f"trainer={name} asks for {needed} GPU{'s' if needed > 1 else ''} and this machine has {has}: "
            f"trainer={WITHOUT_GPUS.get(name, 'cpu')} works here."
        )


def devices_of_process(trainer: Config, accelerator: str, local_rank: int) -> list[str]:
    """What one process computes on, each once, the device of its data first: ["cuda:1"]."""
    if trainer.get("stage_devices"):
        return list(dict.fromkeys("cuda:0" if name == "cuda" else str(name) for name in trainer["stage_devices"]))
    if accelerator != "gpu":
        return ["cpu"]
    if "stage_devices" in trainer or "num_gpus" in trainer:
        return [f"cuda:{index}" for index in range(gpus_sharing_batch(trainer) or visible_gpus(environment()))]
    return [f"cuda:{local_rank}"]


def gpus_sharing_batch(trainer: Config) -> int | None:
    """Under trainer=dp: all of this machine where none are chosen. None under any other."""
    if "num_gpus" not in trainer:
        return None
    return trainer["num_gpus"] or visible_gpus(environment())


def in_one_process(trainer: Config, accelerator: str) -> dict[str, Any]:
    """The same options without the strategy that spread the work."""
    kept = {key: value for key, value in trainer.items() if key not in OF_ONE_STRATEGY}
    one = {"launch": "one_process", "devices": 1, "num_nodes": 1, "strategy": None}
    return {**kept, **one, "accelerator": accelerator}
