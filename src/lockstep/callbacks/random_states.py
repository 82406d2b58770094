"""Read and set the state of every random generator that a rank draws from."""

import random
from typing import Any

import numpy as np
import torch

State = dict[str, Any]  # plain values and byte tensors by their names, as a checkpoint holds them


def random_state() -> State:
    """Return the state of every generator that this process draws from."""
    cuda: Any = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # one process may use several GPUs (dp)
        several = not torch.distributed.is_initialized() and torch.cuda.device_count() > 1
        cuda = torch.cuda.get_rng_state_all() if several else torch.cuda.get_rng_state()
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(), "cuda": cuda, "numpy": [name, keys.tolist(), *rest],
        "python": random.getstate(),
    }  # fmt: skip


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
