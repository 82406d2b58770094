"""The one place that refuses checkpoints: loads a file of torch's, and looks at what a checkpoint holds.

Needs torch, and is imported only by what reads checkpoints.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.runs.errors import UserError
from lockstep.storage.torch_zip import NotSafe, check_torch_zip

Checkpoint = dict[str, Any]  # Lightning's: tensors and plain values by their names

MAX_DEPTH = 64
MAX_VALUES = 10_000_000  # plain ones, each as often as it stands there
MAX_CLASSES = 1_000_000
MAX_NAME = 1_000  # characters of a class
MAX_SIDE = 2**16  # pixels
MAX_CHANNELS = 64
PLAIN = {type(None), bool, int, float, complex, str, torch.dtype, torch.device}
FIELDS = {
    "epoch": int, "global_step": int, "pytorch-lightning_version": str, "loops": dict, "callbacks": dict,
    "optimizer_states": list, "lr_schedulers": list, "hyper_parameters": Mapping,
}  # fmt: skip
VERSION = re.compile(r"\d{1,4}(\.\d{1,6}){1,3}[A-Za-z0-9.+]{0,40}")


@contextlib.contextmanager
def refused(path: str | Path) -> Iterator[None]:
    """
    Raises:
        UserError: for whatever the block, which reads the checkpoint, raises.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file makes zipfile, pickle and torch raise nearly anything
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if not isinstance(error, NotSafe):
            reason = f"{type(error).__name__}: {reason}"
        raise UserError(f"{path} is no checkpoint that can be loaded safely: {reason}") from None


def load_plain(path: str | Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """What a file of torch.save holds: tensors and plain values; nothing in it chooses code to run.

    Raises:
        NotSafe, or anything else that a damaged file makes torch raise: to be called within `refused`.
    """
    path = Path(path)
    check_torch_zip(path)
    loaded = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    check_plain(loaded)
    return loaded


def check_plain(value: Any) -> None:
    """
    Raises:
        NotSafe: something in it is neither plain nor a dense tensor; too deep; too much of it.
    """
    _count(value, {}, 0)


def _count(value: Any, known: dict[int, int], depth: int) -> int:
    """How many values it holds, what stands there twice counted twice.

    Args:
        known: the same of lists and mappings that were seen before, by their id.
    """
    if depth > MAX_DEPTH:
        raise NotSafe(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Tensor):
        return _check_tensor(value)
    if isinstance(value, dict):
        items = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        items = list(value)
    else:
        return _check_value(value)
    if id(value) not in known:
        few = set(map(type, items)) <= {int, float, bool, type(None)}
        count = 1 + len(items) if few else 1 + sum(_count(item, known, depth + 1) for item in items)
        if count > MAX_VALUES:
            raise NotSafe(f"it holds more than {MAX_VALUES} values")
        known[id(value)] = count
    return known[id(value)]


def _check_value(value: Any) -> int:
    if type(value) not in PLAIN:
        raise NotSafe(f"it holds a {type(value).__name__}")
    return 1


def _check_tensor(tensor: Tensor) -> int:
    kind = type(tensor)
    if kind not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise NotSafe(f"it holds a tensor that is not dense ({kind.__name__}, {tensor.layout}, {tensor.device.type})")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise NotSafe(f"a tensor of shape {list(tensor.shape)} is larger than its bytes")
    return 1


def checked_checkpoint(loaded: Any) -> Checkpoint:
    """What was loaded, where it has the form of a checkpoint. Keys that are missing are missed by who needs them.

    Raises:
        NotSafe: a part of it is not what it must be, named.
    """
    _require(isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict), "it holds no state_dict")
    state = loaded["state_dict"]
    named = all(type(name) is str and isinstance(value, Tensor) for name, value in state.items())
    _require(named, "its state_dict is not tensors by name")
    for key, kind in FIELDS.items():
        _require(key not in loaded or isinstance(loaded[key], kind), f"its {key} is a {type(loaded.get(key)).__name__}")
    written_by = loaded.get("pytorch-lightning_version", "0.0")
    _require(VERSION.fullmatch(written_by) is not None, f"its version is {written_by[:40]!r}")
    for optimizer in loaded.get("optimizer_states", ()):
        _check_optimizer(optimizer)
    if "lockstep" in loaded:
        _check_own(loaded["lockstep"])
    return {**loaded, "state_dict": dict(state)}  # without the attributes that torch hangs on it: versions of modules


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise NotSafe(reason)


def _check_optimizer(optimizer: Any) -> None:
    """{"state": {parameter's number: values by name}, "param_groups": [options, with `params`: the numbers]}."""
    good = isinstance(optimizer, dict)
    good = good and isinstance(optimizer.get("state"), dict) and isinstance(optimizer.get("param_groups"), list)
    good = good and all(isinstance(state, dict) for state in optimizer["state"].values())
    good = good and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in optimizer["param_groups"])
    _require(good, "an optimizer's state is none")


def _check_own(own: Any) -> None:
    """What this project adds: {config, data, point, loader, random}."""
    _require(isinstance(own, dict), f"it carries no config: `lockstep` is a {type(own).__name__}")
    for key in ("config", "data"):
        held = own.get(key, {})
        _require(isinstance(held, dict), f"it carries no config: `lockstep.{key}` is a {type(held).__name__}")
    _require(_is_text_tree(own.get("config", {})), "its config holds what no config can")
    for key, is_right in DATA_FACTS.items():
        facts = own.get("data", {})
        _require(key not in facts or is_right(facts[key]), f"its data.{key} is {str(repr(facts.get(key)))[:60]}")
    _require("point" not in own or _is_point(own["point"]), "it does not say where in training it stands")
    _require(isinstance(own.get("loader", {}), dict), "its loader's state is none")
    states = own.get("random", [])
    _require(isinstance(states, list) and all(map(_is_random_state, states)), "its random states are none")


def _is_text_tree(value: Any) -> bool:
    """What YAML can hold; `check_plain` has seen to the depth."""
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_text_tree(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_text_tree, value))
    return isinstance(value, str | int | float | None)


def _is_point(point: Any) -> bool:
    if not isinstance(point, dict) or point.get("phase") not in ("training", "validation", "epoch_end"):
        return False
    return all(_is_int(point.get(key), 0, 2**53) for key in ("epoch", "batches_done", "batches_per_epoch"))


def _is_random_state(state: Any) -> bool:
    """Of one rank, as callbacks/checkpoints.py writes it."""
    if not isinstance(state, dict) or not {"torch", "cuda", "numpy", "python"} <= state.keys():
        return False
    cuda = state["cuda"] if isinstance(state["cuda"], list) else [state["cuda"]]
    tensors = [state["torch"], *(one for one in cuda if one is not None)]
    if not all(isinstance(one, Tensor) and one.dtype == torch.uint8 and one.dim() == 1 for one in tensors):
        return False
    numpy, python = state["numpy"], state["python"]
    if not (isinstance(numpy, list) and isinstance(python, list) and len(numpy) == 5 and len(python) == 3):
        return False
    return _are_words(numpy[1], 624) and _are_words(python[1], 625) and numpy[0] == "MT19937" and python[0] == 3


def _are_words(values: Any, count: int) -> bool:
    """As many numbers of 32 bits."""
    return isinstance(values, list) and len(values) == count and all(_is_int(v, 0, 2**32 - 1) for v in values)


def _is_int(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_name(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_NAME


def _are_class_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_CLASSES and all(map(_is_name, value))


def _are_channel_values(value: Any) -> bool:
    """One number per channel."""
    return (
        isinstance(value, list | tuple)
        and 1 <= len(value) <= MAX_CHANNELS
        and all(type(number) in (int, float) and math.isfinite(number) for number in value)
    )


DATA_FACTS: dict[str, Callable[[Any], bool]] = {
    "class_names": _are_class_names,
    "num_classes": lambda value: _is_int(value, 1, MAX_CLASSES),
    "image_size": lambda value: _is_int(value, 1, MAX_SIDE),
    "channels": lambda value: _is_int(value, 1, MAX_CHANNELS),
    "mean": _are_channel_values,
    "std": _are_channel_values,
    "data_hash": _is_name,
    "resize": lambda value: _is_int(value, 1, MAX_SIDE),
    "crop_pct": lambda value: type(value) in (int, float) and 0 < value <= 1,
    "fit": _is_name,
    "interpolation": _is_name,
    "class_counts": lambda value: isinstance(value, list) and all(_is_int(number, 0, 2**53) for number in value),
}
