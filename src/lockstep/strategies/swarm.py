"""What a peer of a hivemind swarm needs beside the strategy: the package, its processes, a data order of its own."""

import contextlib
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.supervisor import die_with_parent
from lockstep.runs.errors import UserError


class OwnOrder:
    """A train loader whose epochs are other ones of the same images; to the outside they count from 0."""

    def __init__(self, loader: Any, offset: int) -> None:
        self.loader, self.offset, self.sampler = loader, offset, self

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch + self.offset)

    def state_dict(self) -> dict[str, Any]:
        state = self.loader.state_dict()
        return {**state, "epoch": state["epoch"] - self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict({**state, "epoch": state["epoch"] + self.offset})


def imported() -> Any:
    """The package, without its messages of a step's course."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script.*", FutureWarning)
        import hivemind
    logging.getLogger("hivemind").setLevel(logging.WARNING)
    return hivemind


def start_dht(initial_peers: list[str], **network: Any) -> Any:
    """This peer's node of the hash table through which peers find each other.

    Raises:
        UserError: none of the initial peers answers.
    """
    try:
        return imported().DHT(
            initial_peers=initial_peers, start=True, use_relay=False, use_auto_relay=False, auto_nat=False, **network
        )
    except Exception as error:  # hivemind raises its daemon's own kinds
        raise UserError(
            f"No peer of trainer.initial_peers={initial_peers} could be joined ({str(error).splitlines()[0]}): "
            "give an address that a running peer printed."
        ) from error


@contextlib.contextmanager
def children_end_with_this_process() -> Iterator[None]:
    """hivemind's worker processes, forked inside, die when this process does (its daemon follows them by itself)."""
    inside = [True]

    def in_child() -> None:
        if inside:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(os.getppid())

    os.register_at_fork(after_in_child=in_child)
    try:
        yield
    finally:
        inside.clear()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state tensors exist, as sharing them needs, without moving the weights.

    hivemind would do so by a step with its learning rate and weight decay.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    weights = [parameter.detach().clone() for parameter in parameters_of(optimizer)]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    with torch.no_grad():
        for parameter, weight in zip(parameters_of(optimizer), weights, strict=True):
            parameter.copy_(weight)
            parameter.grad = None
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()  # moments, and Adam's count of steps
                elif name == "step":
                    state[name] = 0


def clip_before_step(optimizer: torch.optim.Optimizer, largest_norm: float) -> None:
    """hivemind steps the optimizer itself, on the swarm's mean gradient: what it steps on is clipped then."""

    def clip(stepping: torch.optim.Optimizer, *_: Any) -> None:  # torch takes anything returned for new arguments
        torch.nn.utils.clip_grad_norm_(parameters_of(stepping), largest_norm)

    optimizer.register_step_pre_hook(clip)
