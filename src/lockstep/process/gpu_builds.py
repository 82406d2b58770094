"""Find the build of PyTorch that this machine's driver and GPUs can run, for DEVICE=.

    python -m lockstep.process.gpu_builds      prints it, and the reason on stderr

launch/install.sh calls it.

Imports nothing that has to be installed.
"""

import os
import re
import subprocess
import sys
from typing import NamedTuple

from lockstep.process.environment import DRIVER_FILES
from lockstep.process.errors import EXIT_OK, EXIT_USER_ERROR, UserError

Capability = tuple[int, int]

SMI_COMMAND = ("nvidia-smi", "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader")
SMI_WAIT_S = 30
# Driver, capability and name of a GPU, as 580.95.05, 9.0, NVIDIA H200.
GPU_LINE = re.compile(r"^(\d[\d.]*), (\d+)\.(\d+), (.+)$", re.MULTILINE)
ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)(a?)")


class Build(NamedTuple):
    """A build of PyTorch 2.14 for CUDA.

    Attributes:
        wheel_tag: the word of DEVICE=.
        driver: the lowest major version of NVIDIA's driver.
        architectures: those of the GPUs that it has kernels for.
    """

    wheel_tag: str
    driver: int
    architectures: tuple[str, ...]

    def serves(self, cards: list["Card"]) -> bool:
        return all(has_kernels(self.architectures, card.capability) for card in cards)


# The best one first. The drivers are those of docs.nvidia.com/deploy/cuda-compatibility. The
# architectures of CUDA 13.0 are torch's own, and those of 12.6 are from PyTorch's plan of release
# 2.14 (github.com/pytorch/pytorch/issues/190355), which has no build for CUDA 12.8.
BUILDS = (
    Build("cu130", 580, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    Build("cu126", 525, ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")),
)


class Card(NamedTuple):
    """A GPU as the driver describes it."""

    name: str
    capability: Capability

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (capability {major}.{minor})"


class Machine(NamedTuple):
    """The NVIDIA driver, as 580.95.05, and its GPUs."""

    driver: str
    cards: list[Card]


def has_kernels(architectures: list[str] | tuple[str, ...], capability: Capability) -> bool:
    """Return whether a build with these architectures runs on a GPU of this capability.

    Kernels of sm_XY run on GPUs with the same X and at least Y, those of sm_XYa on XY alone. The
    driver compiles compute_XY (PTX) for every GPU from XY on.
    """
    return any(_runs_on(architecture, capability) for architecture in architectures)


def _runs_on(architecture: str, capability: Capability) -> bool:
    match = ARCHITECTURE.fullmatch(architecture)
    if match is None:
        return False
    kind, major, minor, is_exact = match.groups()
    target = (int(major), int(minor))
    if is_exact:
        return target == capability
    if kind == "compute":
        return capability >= target
    return capability[0] == target[0] and capability >= target


def read_machine() -> Machine | None:
    """Ask nvidia-smi for the driver and its GPUs; None without an NVIDIA driver.

    Raises:
        UserError: there is a driver, and nvidia-smi does not answer.
    """
    try:
        answer = subprocess.run(SMI_COMMAND, capture_output=True, text=True, timeout=SMI_WAIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        if not any(map(os.path.exists, DRIVER_FILES)):
            return None
        raise UserError(
            f"This machine has an NVIDIA driver, but nvidia-smi does not answer ({error}): "
            "name the build yourself, as DEVICE=cu130 or DEVICE=cu126."
        ) from None
    gpus = GPU_LINE.findall(answer.stdout)
    if not gpus or len(gpus) < len(answer.stdout.splitlines()):
        complaint = " ".join(answer.stdout.split())[:200]
        raise UserError(
            f"nvidia-smi cannot list GPUs ({complaint}): mend the driver, or pass DEVICE=cpu."
        )
    cards = [Card(name, (int(major), int(minor))) for _, major, minor, name in gpus]
    return Machine(gpus[0][0], cards)


def choose_wheel_tag(machine: Machine) -> str:
    """Return the word of DEVICE= whose build runs on all GPUs of a machine.

    Raises:
        UserError: there is none; it says what to do.
    """
    fitting = [build for build in BUILDS if build.serves(machine.cards)]
    cards = _join_card_names(machine.cards)
    if not fitting:
        raise UserError(
            f"No build of PyTorch 2.14 has kernels for {cards}: train on CPUs with DEVICE=cpu."
        )
    driver = int(machine.driver.partition(".")[0])
    for build in fitting:
        if driver >= build.driver:
            return build.wheel_tag
    raise UserError(
        f"The driver {machine.driver} is too old for {cards}: install {fitting[-1].driver} or "
        "later, or train without GPUs, with DEVICE=cpu."
    )


def _join_card_names(cards: list[Card]) -> str:
    return ", ".join(dict.fromkeys(map(str, cards)))


def main() -> int:
    """Print the word of DEVICE= that fits this machine, and on stderr the reason."""
    try:
        machine = read_machine()
        wheel_tag = "cpu" if machine is None else choose_wheel_tag(machine)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    reason = "no NVIDIA driver"
    if machine is not None:
        reason = f"driver {machine.driver}, {_join_card_names(machine.cards)}"
    print(f"DEVICE=auto chose {wheel_tag}: {reason}.", file=sys.stderr)
    print(wheel_tag)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
