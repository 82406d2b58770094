"""The net cut into stages on several devices of one process (trainer=model_parallel): features here, head there.

It makes room for models that one device cannot hold. The devices work one after the other; with micro-batches the
next one enters the first stage while the last stage still computes, on GPUs, whose kernels run asynchronously.
`trainer.stage_devices=[cpu,cpu]` runs the same code without a GPU.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lockstep.runs.errors import UserError
from lockstep.strategies.base import Capabilities, move_all_but_net


class ModelParallel(Capabilities, SingleDeviceStrategy):
    """Weights keep their names: checkpoints are those of the unsplit model.

    Args:
        stage_devices: one device for each stage, in order, as ["cuda:0", "cuda:1"]; None for all GPUs.
        micro_batches: parts in which a batch goes through the stages.
        cut: the stages with which the second device, the third, … begin, as [5]; None: where it balances parameters.
    Raises:
        UserError: fewer than two devices, devices that are not here, a net with fewer stages than devices.
    """

    no_ema = "the averaged copy would lie on one device, which the stages are there to avoid"
    supports_compile = False

    def __init__(
        self, stage_devices: list[str] | None = None, micro_batches: int = 1, cut: list[int] | None = None
    ) -> None:
        self.process_devices = checked_devices(stage_devices)
        if micro_batches < 1:
            raise UserError(f"trainer.micro_batches={micro_batches}: a whole number from 1 on.")
        super().__init__(device=self.process_devices[0])
        self.micro_batches, self.stated_cut = micro_batches, cut

    def model_to_device(self) -> None:
        """The stages to their devices, and what the module has beside the net to the first."""
        module = self.lightning_module
        if not hasattr(module.net, "stages"):
            raise UserError(f"{type(module.net).__name__} names no stages(): trainer=model_parallel cannot cut it.")
        stages = module.net.stages()
        check_cover(module.net, stages)
        if self.stated_cut is None:
            costs = [sum(p.numel() for p in stage.parameters()) for stage in stages]
            ends = balanced_cut(costs, len(self.process_devices))
        else:
            ends = checked_cut(self.stated_cut, len(stages), len(self.process_devices))
        self.cut = [list(range(start, end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        groups = [nn.Sequential(*(stages[i] for i in part)) for part in self.cut]
        move_all_but_net(module, self.root_device)
        for group, device in zip(groups, self.process_devices, strict=True):
            group.to(device)
        module.net.__dict__["forward"] = Pipeline(groups, self.process_devices, self.micro_batches)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each state to its parameter's device; Lightning would move all of them to the first."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        self.lightning_module.net.__dict__.pop("forward", None)
        super().teardown()


class Pipeline:
    """net's forward: micro-batches through the stages; the logits come back to the first device."""

    def __init__(self, groups: list[nn.Module], devices: list[torch.device], micro_batches: int) -> None:
        self.groups, self.devices, self.micro_batches = groups, devices, micro_batches

    def __call__(self, images: Tensor) -> Tensor:
        parts = images.tensor_split(min(self.micro_batches, len(images)))
        return torch.cat([self._through(part) for part in parts])

    def _through(self, x: Tensor) -> Tensor:
        for group, device in zip(self.groups, self.devices, strict=True):
            x = group(moved(x, device, group))
        return moved(x, self.devices[0])


def moved(x: Tensor, device: torch.device, group: nn.Module | None = None) -> Tensor:
    """On `device`: to a GPU without waiting; a CPU would read what has not arrived.

    On a CPU there is no autocast beside a GPU's: there x gets the type of the group's weights.
    """
    if device.type != "cpu" or x.device.type == "cpu":
        return x.to(device, non_blocking=True)
    weights = next(group.parameters(), None) if group is not None else None
    return x.to(device, dtype=None if weights is None else weights.dtype)


def balanced_cut(costs: list[int], parts: int) -> list[int]:
    """The ends of `parts` runs of consecutive stages, none empty, whose most expensive one is as cheap as can be.

    >>> balanced_cut([1, 1, 1, 9, 1, 1], 2)
    [3, 6]

    Raises:
        UserError: more parts than stages.
    """
    if parts > len(costs):
        raise UserError(f"The model has {len(costs)} stages, trainer.stage_devices {parts}: give {len(costs)} at most.")
    sums = [0, *accumulate(costs)]
    # best[n] = (cost of the dearest run, ends) for the first n stages
    best = {n: (sums[n], [n]) for n in range(1, len(costs) + 1)}
    for count in range(2, parts + 1):
        best = {
            n: min((max(best[m][0], sums[n] - sums[m]), [*best[m][1], n]) for m in range(count - 1, n))
            for n in range(count, len(costs) + 1)
        }
    return best[len(costs)][1]


def checked_cut(cut: list[int], num_stages: int, parts: int) -> list[int]:
    """Return the ends of the runs of stages that trainer.cut states.

    >>> checked_cut([5], 8, 2)
    [5, 8]

    Raises:
        UserError: it does not make `parts` runs, none of them empty.
    """
    ends = [*cut, num_stages]
    rises = all(isinstance(end, int) and start < end for start, end in zip([0, *ends], ends, strict=False))
    if len(ends) != parts or not rises:
        example = [num_stages * part // parts for part in range(1, parts)]
        raise UserError(
            f"trainer.cut={list(cut)} does not cut {num_stages} stages into {parts}: give {parts - 1} rising "
            f"numbers from 1 to {num_stages - 1}, as {example}."
        )
    return ends


def check_cover(net: nn.Module, stages: list[nn.Module]) -> None:
    """Every parameter in exactly one stage, or the cut would leave some of them behind on the wrong device."""
    owners: dict[int, int] = {}
    for stage in stages:
        for parameter in stage.parameters():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    wrong = [name for name, parameter in net.named_parameters() if owners.get(id(parameter)) != 1]
    if wrong:
        raise UserError(f"{type(net).__name__}.stages() does not hold each parameter once: {', '.join(wrong[:3])}.")


def checked_devices(names: list[str] | None) -> list[torch.device]:
    """The devices, each of them here."""
    found = torch.cuda.device_count()
    if names is None:
        if found < 2:
            raise UserError(
                f"trainer=model_parallel needs two devices and {found} GPU{'' if found == 1 else 's'} is here: "
                f"trainer.stage_devices=[{'cuda:0,cpu' if found else 'cpu,cpu'}] works."
            )
        return [torch.device("cuda", index) for index in range(found)]
    try:
        devices = [torch.device(name) for name in names]
    except (RuntimeError, TypeError) as error:
        raise UserError(f"trainer.stage_devices={names}: {str(error).splitlines()[0]}") from None
    missing = [str(d) for d in devices if d.type == "cuda" and (d.index or 0) >= found]
    if missing:
        raise UserError(f"trainer.stage_devices names {missing[0]}, and {found} GPUs are here: [cpu,cpu] works.")
    if len(devices) < 2:
        raise UserError("trainer.stage_devices needs two devices or more; [cpu,cpu] works everywhere.")
    return devices
