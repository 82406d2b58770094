"""Read, gather and set the state of every random generator that a rank draws from."""

import random
from typing import Any

import numpy as np
import torch

from lockstep.callbacks.ranks import gather_objects

State = dict[str, Any]  # plain values and byte tensors by their names, as a checkpoint holds them


def random_state() -> State:
    """Return the state of every generator that this process draws from."""
    numpy_state = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": _cuda_state(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "python": _as_lists(random.getstate()),
    }


def _cuda_state() -> torch.Tensor | list[torch.Tensor] | None:
    """The state of this rank's GPU; of all GPUs if one process uses several (dp, model_parallel)."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    several = not torch.distributed.is_initialized() and torch.cuda.device_count() > 1
    return torch.cuda.get_rng_state_all() if several else torch.cuda.get_rng_state()


def set_random_state(state: State) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        states = state["cuda"] if isinstance(state["cuda"], list) else [state["cuda"]]
        for device, own in zip(range(torch.cuda.device_count()), states, strict=False):  # there may be fewer here
            torch.cuda.set_rng_state(own.cpu(), device if len(states) > 1 else "cuda")
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def gather_random_states() -> list[State]:
    """Return one state per rank, in rank order, on every rank."""
    if not torch.distributed.is_initialized():
        return [random_state()]
    return gather_objects(random_state())
