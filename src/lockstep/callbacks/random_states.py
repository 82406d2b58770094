"""Every generator that a rank draws from: taken, sent to rank 0 as text, and set again."""

import base64
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from lockstep.distributed.json_collectives import gather_json

State = dict[str, Any]  # plain values and byte tensors by their names, as a checkpoint holds them


def random_state() -> State:
    """Every generator that this process draws from, as plain values and byte tensors."""
    numpy_state = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda_state(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "python": _as_lists(random.getstate()),
    }


def cuda_state() -> torch.Tensor | list[torch.Tensor] | None:
    """Of this process's GPU; of all GPUs where it uses several (dp, model_parallel)."""
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


def gather_random_states(trainer: pl.Trainer) -> list[State]:
    """One state per rank, in rank order, on every rank."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return [random_state()]
    return [state_from_json(state) for state in gather_json(state_to_json(random_state()))]


def state_to_json(state: State) -> dict[str, Any]:
    """A random state whose byte tensors are text."""
    cuda = state["cuda"]
    several = [_to_text(each) for each in cuda] if isinstance(cuda, list) else None
    return {
        **state, "torch": _to_text(state["torch"]),
        "cuda": several if several is not None or cuda is None else _to_text(cuda),
    }  # fmt: skip


def state_from_json(state: dict[str, Any]) -> State:
    """
    Raises:
        RuntimeError: it is no random state.
    """
    try:
        cuda = state["cuda"]
        name, keys, *rest = state["numpy"]
        version, internal, gauss = state["python"]
        return {
            "torch": _from_text(state["torch"]),
            "cuda": [_from_text(each) for each in cuda] if isinstance(cuda, list) else cuda and _from_text(cuda),
            "numpy": [str(name), [int(key) for key in keys], int(rest[0]), int(rest[1]), float(rest[2])],
            "python": [int(version), [int(part) for part in internal], None if gauss is None else float(gauss)],
        }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RuntimeError(f"a rank sent no random state ({type(error).__name__}: {error})") from None


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
