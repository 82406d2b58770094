"""Full tensors ↔ shards, for weights and for optimizer states of any optimizer, empty ones too.

A full optimizer state looks as an unsharded optimizer's own state_dict: states by the parameter's number. Torch's
`get_optimizer_state_dict` is not used: it takes a step with an optimizer whose state is empty.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

State = dict[str, Any]  # of a module or an optimizer, as torch makes it, or a whole checkpoint


def full(value: Any, keep: bool) -> Any:
    """The whole of a sharded tensor in CPU memory where `keep`, else None; a collective that every rank must join.

    Tensors that are not sharded come back as CPU copies, anything else as it is. A copy from a GPU is only queued:
    `wait_for_copies` before anyone reads it.
    """
    if isinstance(value, DTensor):
        whole = value.detach().full_tensor()
        return whole.to("cpu", non_blocking=True) if keep else None
    return value.detach().to("cpu", copy=True, non_blocking=True) if isinstance(value, Tensor) else value


def wait_for_copies() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def full_state_dict(state: Mapping[str, Any], keep: bool) -> State:
    """Each tensor whole, one after the other; empty where not `keep`, but every rank must call it."""
    whole = {name: full(value, keep) for name, value in state.items()}
    wait_for_copies()
    return whole if keep else {}


def full_optimizer_state(state: Mapping[str, Any], keep: bool) -> State:
    """What an unsharded optimizer's state_dict() would be."""
    states = {
        number: {name: full(value, keep) for name, value in values.items()} for number, values in state["state"].items()
    }
    wait_for_copies()
    return {"state": states if keep else {}, "param_groups": state["param_groups"]}


def like(value: Any, own: Any) -> Any:
    """`value` (whole, the same on every rank) in the form that `own` has: sharded as it is, else unchanged."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    # Another shape than the parameter's (factored states): whole on every rank.
    placements = own.placements if value.shape == own.shape else [Replicate()] * own.device_mesh.ndim
    device = torch.device(own.device_mesh.device_type)
    shard = distribute_tensor(value.detach().to(device), own.device_mesh, placements, src_data_rank=None)
    return shard.to(own.dtype) if value.shape == own.shape else shard


def sharded_state_dict(state: Mapping[str, Any], own: Mapping[str, Any]) -> State:
    """A full state dict in the shards of `own`; names that `own` lacks stay, so that a strict load names them."""
    return {name: like(value, own.get(name)) for name, value in state.items()}


def sharded_optimizer_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> State:
    """A full optimizer state in the shards of this optimizer's parameters."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    states = {
        number: {name: like(value, parameters.get(number)) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": states}
