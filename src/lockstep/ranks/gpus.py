"""Refuse GPUs that this build of torch cannot use, and name the build that can."""

import warnings
from collections.abc import Iterable

import torch

from lockstep.process.environment import environment
from lockstep.process.errors import UserError
from lockstep.process.gpu_builds import Card, Machine, choose_wheel_tag, has_kernels, read_machine


def refuse_unusable_gpus(indices: Iterable[int]) -> None:
    """Refuse a driver that this torch cannot use, and a GPU that it has no kernels for.

    Raises:
        UserError: it names the build of torch to install, or the variable that hides GPUs.
    """
    # torch itself warns of a GPU without kernels, in twelve lines. A filter hides them.
    # catch_warnings would also undo the hooks of others on warnings.
    for message in (r"\s*Found GPU\d+ ", r"\s*.* with CUDA capability sm_\d+ is not compatible"):
        warnings.filterwarnings("ignore", message, UserWarning)
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        # A build without CUDA raises AssertionError.
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"torch {torch.__version__} cannot use the driver's GPUs "
            f"({reason}{_describe_hidden_gpus()}). {_advise()}"
        ) from None

    architectures = torch.cuda.get_arch_list()
    count = torch.cuda.device_count()
    for index in indices:
        if index >= count:
            raise UserError(f"There is no GPU {index}: CUDA sees {count}{_describe_hidden_gpus()}.")
        card = Card(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        if not has_kernels(architectures, card.capability):
            raise UserError(
                f"torch {torch.__version__} has no kernels for {card}, only for "
                f"{', '.join(architectures)}. {_advise(card)}"
            )


def _describe_hidden_gpus() -> str:
    """Return the variable that chooses GPUs, for the end of a reason; empty if it is not set."""
    visible_devices = environment().get("CUDA_VISIBLE_DEVICES")
    if visible_devices is None:
        return ""
    return f", with CUDA_VISIBLE_DEVICES={visible_devices}"


def _advise(card: Card | None = None) -> str:
    """Return the sentence that says what to type for a build that this machine can run.

    Args:
        card: the GPU without kernels; None if the driver is at fault.
    """
    try:
        machine = read_machine()
        if machine is None:
            return "Mend the driver, or pass trainer=cpu."
        if card is not None:
            machine = Machine(machine.driver, [card])
        tag = choose_wheel_tag(machine)
    except UserError as error:
        return str(error)
    # This build is the right one, so that the driver must be at fault.
    if f"+{tag}" in torch.__version__:
        return f"The driver is {machine.driver}: mend it, or pass trainer=cpu."
    return f"Type make install DEVICE={tag} (the driver is {machine.driver}), or pass trainer=cpu."
