"""Split the net into stages on several devices of one process (trainer=model_parallel).

The devices work one after the other; with micro-batches the next one enters the first stage while the last stage still
computes, on GPUs, whose kernels run asynchronously. `trainer.stage_devices=[cpu,cpu]` runs the same code without a GPU.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lockstep.runs.errors import UserError
from lockstep.strategies.base import Capabilities


class ModelParallel(Capabilities, SingleDeviceStrategy):
    """Weights keep their names: checkpoints are those of the unsplit model.

    Args:
        stage_devices: one device for each stage, in order, as ["cuda:0", "cuda:1"]; None for all GPUs.
        micro_batches: parts in which a batch goes through the stages.
        cut: the stages with which the second device, the third, … begin, as [5]; None: balance the parameters.
    Raises:
        UserError: fewer than two devices, devices that are not here, a net with fewer stages than devices.
    """

    no_ema = "the averaged copy would lie on one device, which the stages are there to avoid"
    supports_compile = False

    def __init__(
        self, stage_devices: list[str] | None = None, micro_batches: int = 1, cut: list[int] | None = None
    ) -> None:
        if micro_batches < 1:
            raise UserError(f"trainer.micro_batches={micro_batches}: give a whole number from 1 on.")
        self.process_devices = checked_devices(stage_devices)
        super().__init__(device=self.process_devices[0])
        self.micro_batches, self.cut = micro_batches, cut

    def model_to_device(self) -> None:
        """Move each group of stages to its device, and other parts of the module to the first."""
        module = self.lightning_module
        if not hasattr(module.net, "stages"):
            raise UserError(f"{type(module.net).__name__} names no stages(): trainer=model_parallel cannot cut it.")
        groups = cut_into_groups(module.net, len(self.process_devices), self.cut)
        net, module.net = module.net, nn.Identity()
        module.to(self.root_device)
        module.net = net
        for group, device in zip(groups, self.process_devices, strict=True):
            group.to(device)
        module.net.__dict__["forward"] = Pipeline(groups, self.process_devices, self.micro_batches)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each state to its parameter's device; Lightning would move all of them to the first."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        self.lightning_module.net.__dict__.pop("forward", None)
        super().teardown()


class Pipeline:
    """Run the net's forward: micro-batches pass through the stages, and the logits return to the first device."""

    def __init__(self, groups: list[nn.Module], devices: list[torch.device], micro_batches: int) -> None:
        self.groups, self.micro_batches = groups, micro_batches
        self.way = [*zip(groups, devices, strict=True), (nn.Identity(), devices[0])]

    def __call__(self, images: Tensor) -> Tensor:
        results = []
        for x in images.tensor_split(min(self.micro_batches, len(images))):
            for group, device in self.way:
                x = x.to(device, non_blocking=device.type != "cpu")  # a CPU would read what has not arrived
                if device.type == "cpu" and (weight := next(group.parameters(), None)) is not None:
                    x = x.to(weight.dtype)  # a GPU's autocast does not reach a CPU
                x = group(x)
            results.append(x)
        return torch.cat(results)


def cut_into_groups(net: nn.Module, count: int, cut: list[int] | None = None) -> list[nn.Module]:
    """Return the net's stages in `count` groups.

    Raises:
        UserError: the stages do not hold each parameter once, or cannot be cut so.
    """
    stages = net.stages()
    owners = Counter(id(parameter) for stage in stages for parameter in stage.parameters())
    if wrong := [name for name, parameter in net.named_parameters() if owners[id(parameter)] != 1]:
        raise UserError(f"{type(net).__name__}.stages() does not hold each parameter once: {', '.join(wrong[:3])}.")
    if count > len(stages):
        raise UserError(f"The model has {len(stages)} stages, fewer than trainer.stage_devices has devices: {count}.")
    balanced = balanced_cut([sum(parameter.numel() for parameter in stage.parameters()) for stage in stages], count)
    bounds = [0, *(balanced if cut is None else cut), len(stages)]
    if len(bounds) != count + 1 or not all(isinstance(b, int) and a < b for a, b in pairwise(bounds)):
        raise UserError(
            f"trainer.cut={cut} does not cut {len(stages)} stages into {count}: give {count - 1} rising numbers from 1 "
            f"to {len(stages) - 1}, as {balanced}."
        )
    return [nn.Sequential(*stages[start:end]) for start, end in pairwise(bounds)]


def balanced_cut(costs: list[int], parts: int) -> list[int]:
    """Return the first stage of the second part, the third, …, so that the most expensive part is as cheap as possible.

    >>> balanced_cut([1, 1, 1, 9, 1, 1], 2)
    [3]
    """

    @cache
    def best(n: int, parts: int) -> tuple[int, list[int]]:  # cost of the dearest part, and cut, of the first n stages
        if parts == 1:
            return sum(costs[:n]), []
        shorter = ((best(m, parts - 1), m) for m in range(parts - 1, n))
        return min((max(dearest, sum(costs[m:n])), [*cut, m]) for (dearest, cut), m in shorter)

    return best(len(costs), parts)[1]


def checked_devices(names: list[str] | None) -> list[torch.device]:
    """Return two devices of this machine or more, by default all GPUs."""
    gpus = torch.cuda.device_count()
    try:
        devices = [torch.device(name) for name in (names or [f"cuda:{index}" for index in range(gpus)])]
    except (RuntimeError, TypeError) as error:
        raise UserError(f"trainer.stage_devices={names}: {str(error).splitlines()[0]}") from None
    if len(devices) < 2 or any(device.type == "cuda" and (device.index or 0) >= gpus for device in devices):
        raise UserError(
            f"trainer.stage_devices={names or 'null'} must name two devices or more of this machine, which has {gpus} "
            f"GPUs: {'[cuda:0,cpu]' if gpus else '[cpu,cpu]'} works."
        )
    return devices
