"""Get and set the random states of torch, numpy and Python, and of generators in objects."""

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

RandomState = dict[str, Any]

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# A trainer refers to every object of a run, and is skipped.
SKIPPED_TYPES = (type, ModuleType, torch.Tensor, np.ndarray, pl.Trainer, pl.Callback)
# A generator lies near its owner. These limits keep the search below some milliseconds.
MAX_LEVELS = 6
MAX_ITEMS = 100
MAX_OBJECTS = 20_000


def random_state(owners: Any = (), devices: Sequence[torch.device] = ()) -> RandomState:
    """Return the state of every generator that this process draws from, as plain values.

    Args:
        owners: objects whose attributes may be generators, such as loaders, data and modules.
        devices: the devices of a rank that computes on several.
    """
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return {
        "torch": torch.get_rng_state(),
        "cuda": _cuda_state(devices),
        "numpy": [name, keys.tolist(), *rest],
        "python": random.getstate(),
        "generators": {
            path: _generator_state(item) for path, item in find_generators(owners).items()
        },
    }


def set_random_state(
    state: RandomState, owners: Any = (), devices: Sequence[torch.device] = ()
) -> None:
    """Set what `random_state` has returned, except for generators that `owners` do not hold."""
    torch.set_rng_state(state["torch"].cpu())
    _set_cuda_state(state["cuda"], devices)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(_python_state(state["python"]))

    # Checkpoints of earlier versions have no such states.
    states = state.get("generators", {})
    for path, generator in find_generators(owners).items():
        if path in states:
            _set_generator_state(generator, states[path])


def _cuda_state(devices: Sequence[torch.device]) -> Any:
    """Return the state of this rank's GPU, or a list of states where it uses several GPUs.

    It is None where CUDA is not used.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    if not torch.distributed.is_initialized():
        # One process may use several GPUs (trainer=dp).
        return torch.cuda.get_rng_state_all()
    gpus = _gpu_indices(devices)
    if len(gpus) > 1:
        return [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    return torch.cuda.get_rng_state()


def _gpu_indices(devices: Sequence[torch.device]) -> list[int]:
    """Return the indices of the GPUs among some devices, each once."""
    return sorted({device.index or 0 for device in devices if device.type == "cuda"})


def _set_cuda_state(state: Any, devices: Sequence[torch.device]) -> None:
    if state is None or not torch.cuda.is_available():
        return
    states = state if isinstance(state, list) else [state]
    if len(states) == 1:
        torch.cuda.set_rng_state(states[0].cpu(), "cuda")
        return
    gpus = list(range(torch.cuda.device_count()))
    if torch.distributed.is_initialized():
        gpus = _gpu_indices(devices) or [torch.cuda.current_device()]
    # This process may have fewer GPUs than the one that saved.
    for gpu, gpu_state in zip(gpus, states):
        torch.cuda.set_rng_state(gpu_state.cpu(), gpu)


def find_generators(owners: Any) -> dict[str, Any]:
    """Return the generators among the attributes of some objects, by their paths."""
    generators: dict[str, Any] = {}
    visited: set[int] = set()
    pending: list[tuple[str, int, Any]] = [("", 0, owners)]
    while pending and len(visited) < MAX_OBJECTS:
        path, level, value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, GENERATORS):
            generators[path] = value
        elif level < MAX_LEVELS:
            children = _children(value)
            pending += [(f"{path}.{name}", level + 1, child) for name, child in children]
    return generators


def _children(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a short container or the attributes of an object, with their names."""
    if isinstance(value, SKIPPED_TYPES):
        return []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value[: MAX_ITEMS + 1]))
    elif hasattr(value, "__dict__"):
        children = list(vars(value).items())
    else:
        return []
    if len(children) > MAX_ITEMS:
        return []
    return [(str(name), child) for name, child in children]


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _to_plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _to_plain(generator.get_state(legacy=False))
    return generator.getstate()


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _from_plain(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_from_plain(state))
    else:
        generator.setstate(_python_state(state))


def _to_plain(value: Any) -> Any:
    """Replace arrays by lists, since a checkpoint is loaded with weights_only=True."""
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def _from_plain(value: Any) -> Any:
    """Undo `_to_plain`."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        return np.array(value["values"], dtype=value["dtype"])
    return {key: _from_plain(item) for key, item in value.items()}


def _python_state(state: Any) -> tuple[Any, ...]:
    """Return a state of Python's generator with tuples, which a checkpoint turns into lists."""
    version, internal, gauss = state
    return version, tuple(internal), gauss
