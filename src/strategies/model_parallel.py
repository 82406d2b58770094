"""Split the net into stages on several devices of one process (trainer=model_parallel).

The devices work one after the other. With micro-batches the next one enters the first stage while
the last stage still computes; this needs GPUs, whose kernels run asynchronously.
`trainer.stage_devices=[cpu,cpu]` runs the same code without a GPU.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from lockstep.process.errors import UserError
from lockstep.strategies.base import Capabilities


class NetInStages(Capabilities, Strategy):
    """A net in stages on the `process_devices` of one process; a base before Lightning's strategy.

    Weights keep their names: checkpoints are those of the unsplit model.

    Attributes:
        group_starts: the number of the first stage on each device except the first, as [5]; None
            balances the parameters.
    """

    no_ema = "the averaged copy would lie on one device, which the stages are there to avoid"
    spreads_net = True
    supports_compile = False
    group_starts: list[int] | None = None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        # Lightning has moved what an optimizer begins with, as Adagrad's sums, to the first device.
        for optimizer in self.optimizers:
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())

    def model_to_device(self) -> None:
        """Move each group of stages to its device, and other parts of the module to the first."""
        module = self.lightning_module
        net = module.net
        if not hasattr(net, "stages"):
            raise UserError(
                f"{type(net).__name__} names no stages(), so that it cannot be cut: choose "
                "trainer=ddp (on CPUs ddp_sim), or add the method to the net."
            )
        groups = cut_into_groups(net, len(self.process_devices), self.group_starts)

        # The whole net may not fit on the first device.
        module.net = nn.Identity()
        module.to(self.root_device)
        module.net = net
        for group, device in zip(groups, self.process_devices, strict=True):
            group.to(device)
        net.__dict__["forward"] = Pipeline(groups, self.process_devices, self.micro_batches)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each state to its parameter's device; Lightning moves all of them to the first."""
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        self.lightning_module.net.__dict__.pop("forward", None)
        super().teardown()


class ModelParallel(NetInStages, SingleDeviceStrategy):
    """One process whose net is in stages.

    Args:
        stage_devices: one device for each stage, in order, as ["cuda:0", "cuda:1"]; None for all
            GPUs.
        micro_batches: the number of parts in which a batch goes through the stages.
        cut: the group_starts of NetInStages.
    Raises:
        UserError: fewer than two devices, devices that this machine lacks, a net with fewer
            stages than devices.
    """

    def __init__(
        self,
        stage_devices: list[str] | None = None,
        micro_batches: int = 1,
        cut: list[int] | None = None,
    ) -> None:
        self.process_devices = parse_devices(stage_devices)
        super().__init__(device=self.process_devices[0])
        self.micro_batches = check_micro_batches(micro_batches)
        self.group_starts = cut


class Pipeline:
    """Run the net's forward: micro-batches pass through the stages one after the other.

    The logits return to the first device.
    """

    def __init__(
        self, groups: list[nn.Module], devices: list[torch.device], micro_batches: int
    ) -> None:
        self.groups = groups
        self.micro_batches = micro_batches
        self.steps = [*zip(groups, devices, strict=True), (nn.Identity(), devices[0])]

    def __call__(self, images: Tensor) -> Tensor:
        parts = images.tensor_split(min(self.micro_batches, len(images)))
        return torch.cat([self._run_stages(part) for part in parts])

    def _run_stages(self, x: Tensor) -> Tensor:
        for group, device in self.steps:
            x = group(_move_to_stage(x, device, group))
        return x


def _move_to_stage(x: Tensor, device: torch.device, group: nn.Module) -> Tensor:
    """Return a stage's input on its device."""
    if device.type != "cpu":
        return x.to(device, non_blocking=True)
    # Wait for the copy, because a CPU would read values that have not arrived.
    x = x.to(device)
    # A GPU's autocast does not reach a CPU: bf16 meets float32 weights.
    weight = next(group.parameters(), None)
    if weight is not None:
        x = x.to(weight.dtype)
    return x


def cut_into_groups(
    net: nn.Module, count: int, group_starts: list[int] | None = None
) -> list[nn.Module]:
    """Return the net's stages in `count` groups.

    Raises:
        UserError: the stages do not hold each parameter once, or cannot be cut so.
    """
    stages = net.stages()
    check_stages(net, stages)
    if count > len(stages):
        raise UserError(
            f"The model has {len(stages)} stages, fewer than the {count} devices that they go to: "
            "name fewer in trainer.stage_devices, or lower trainer.stages."
        )
    balanced = balance_groups([count_parameters(stage) for stage in stages], count)
    if group_starts is None:
        group_starts = balanced
    bounds = [0, *group_starts, len(stages)]
    if len(bounds) != count + 1 or not are_rising_integers(bounds):
        raise UserError(
            f"trainer.cut={group_starts} does not cut {len(stages)} stages into {count}: give "
            f"{count - 1} rising numbers from 1 to {len(stages) - 1}, as {balanced}."
        )
    return [nn.Sequential(*stages[start:end]) for start, end in pairwise(bounds)]


def check_stages(net: nn.Module, stages: list[nn.Module]) -> None:
    """Refuse stages that miss a parameter of the net, or hold one twice."""
    owners: Counter[int] = Counter()
    for stage in stages:
        owners.update(id(parameter) for parameter in stage.parameters())
    wrong_names = [name for name, parameter in net.named_parameters() if owners[id(parameter)] != 1]
    if wrong_names:
        raise UserError(
            f"{type(net).__name__}.stages() does not hold each parameter once: "
            f"{', '.join(wrong_names[:3])}."
        )


def count_parameters(stage: nn.Module) -> int:
    return sum(parameter.numel() for parameter in stage.parameters())


def are_rising_integers(bounds: list[Any]) -> bool:
    if not all(isinstance(bound, int) for bound in bounds):
        return False
    return all(start < end for start, end in pairwise(bounds))


def balance_groups(stage_costs: list[int], num_groups: int) -> list[int]:
    """Return the number of the first stage of each group except the first group.

    The groups are chosen so that the most expensive one is as cheap as possible.

    >>> balance_groups([1, 1, 1, 9, 1, 1], 2)
    [3]
    """

    @cache
    def balance_first(num_stages: int, groups: int) -> tuple[int, list[int]]:
        """Return the cost of the most expensive group of the first stages, and starts."""
        if groups == 1:
            return sum(stage_costs[:num_stages]), []
        choices = []
        for start in range(groups - 1, num_stages):
            cost, starts = balance_first(start, groups - 1)
            cost_of_last = sum(stage_costs[start:num_stages])
            choices.append((max(cost, cost_of_last), [*starts, start]))
        return min(choices)

    return balance_first(len(stage_costs), num_groups)[1]


def check_micro_batches(number: int) -> int:
    """Return the number, or refuse one below 1."""
    if number < 1:
        raise UserError(f"trainer.micro_batches={number}: give a whole number from 1 on.")
    return number


def parse_devices(names: list[str] | None) -> list[torch.device]:
    """Return two devices of this machine or more, by default all GPUs."""
    gpus = torch.cuda.device_count()
    all_gpus = [f"cuda:{index}" for index in range(gpus)]
    try:
        devices = [torch.device(name) for name in names or all_gpus]
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"trainer.stage_devices={names}: {reason}") from None
    if len(devices) < 2 or not all(_is_device_there(device, gpus) for device in devices):
        example = "[cuda:0,cpu]" if gpus else "[cpu,cpu]"
        raise UserError(
            f"trainer.stage_devices={names or 'null'} must name two devices or more of this "
            f"machine, which has {gpus} GPUs: {example} works."
        )
    return devices


def _is_device_there(device: torch.device, gpus: int) -> bool:
    if device.type != "cuda":
        return True
    return (device.index or 0) < gpus
