"""Optimizer steps on a rank's own shards as plain tensors.

An elementwise update of a sharded parameter is the same update of each shard. Through DTensor each of its operations
on each parameter is dispatched by itself, which costs several times the update; on plain tensors one kernel does it.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

ELEMENTWISE = (SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop)


def step_on_shards(optimizer: Optimizer) -> None:
    """From now on an elementwise optimizer sees plain tensors while it steps; its state stays DTensors outside."""
    if type(optimizer) in ELEMENTWISE:
        shards = _Shards()
        optimizer.register_step_pre_hook(shards.take)
        optimizer.register_step_post_hook(shards.give_back)


class _Shards:
    def __init__(self) -> None:
        self.groups: list[list[Tensor]] = []
        self.state: Any = None
        self.whole: dict[int, DTensor] = {}  # by id of the shard

    def take(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = None
        if closure is not None:  # forward and backward happen in it, on the sharded parameters
            with torch.enable_grad():
                loss = closure()
        self.groups, self.state = [group["params"] for group in optimizer.param_groups], optimizer.state
        self.whole = {}
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        with torch.no_grad():
            for group in optimizer.param_groups:
                shards = [self._shard(parameter) for parameter in group["params"]]
                for parameter, shard in zip(group["params"], shards, strict=True):
                    shard.grad = None if parameter.grad is None else self._shard(parameter.grad)
                    if parameter in self.state:
                        state[shard] = {name: self._shard(value) for name, value in self.state[parameter].items()}
                group["params"] = shards
        optimizer.state = state
        return (optimizer,), {**kwargs, "closure": None if closure is None else lambda: loss}

    def _shard(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        shard = value.to_local()
        self.whole[id(shard)] = value
        return shard

    def give_back(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for group, parameters in zip(optimizer.param_groups, self.groups, strict=True):
            for parameter, shard in zip(parameters, group["params"], strict=True):
                shard.grad = None
                if shard in optimizer.state:
                    values = optimizer.state[shard].items()
                    self.state[parameter] = {name: self._like(parameter, shard, value) for name, value in values}
            group["params"] = parameters
        optimizer.state = self.state
        self.whole = {}

    def _like(self, parameter: Tensor, shard: Tensor, value: Any) -> Any:
        """A value of the state as it was, or, where the step made it for this shard, sharded as the parameter is."""
        if id(value) in self.whole:
            return self.whole[id(value)]
        if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == shard.shape):
            return value
        return DTensor.from_local(
            value, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
