"""This process's environment: its variables, which only this file reads, its GPUs, network interface and parent."""

import ctypes
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def environment() -> dict[str, str]:
    """Return a copy of the environment variables."""
    return dict(os.environ)


def set_variables(variables: Mapping[str, str], *, unless_set: bool = False) -> None:
    """Set environment variables of this process and of the children that it starts.

    Args:
        unless_set: keep a value that the user has set.
    """
    os.environ.update({name: value for name, value in variables.items() if not (unless_set and name in os.environ)})


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let Linux send this process a signal when its parent ends, however it ends; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


def visible_gpus(environ: Mapping[str, str] | None = None) -> int:
    """Count the NVIDIA GPUs that a process started now would see, by the driver's library and without torch."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        words = [word.strip() for word in chosen.split(",")]
        names = itertools.takewhile(lambda word: word.isdigit() or word.startswith(("GPU-", "MIG-")), words)
        return len(list(names))  # CUDA too stops at the first that is none, such as -1 or SLURM's NoDevFiles
    if not any(os.path.exists(path) for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")):  # dxg: WSL
        return 0
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # NVML raises errors of its own; a container without it may have CUDA all the same
        count = ctypes.c_int()
        try:
            cuda = ctypes.CDLL("libcuda.so.1")
            return 0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value
        except OSError as error:
            log.info(f"GPUs cannot be counted ({error}); going on with the CPU.")
            return 0


def slurm_task(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's number among a SLURM step's tasks and how often its job was requeued; (0, 0) elsewhere."""
    return int(environ.get("SLURM_PROCID") or 0), int(environ.get("SLURM_RESTART_COUNT") or 0)


def network_interface(address: str) -> str | None:
    """Return the network interface by which this host reaches `address`; None if that cannot be found.

    gloo uses the address that the host's own name resolves to, on many machines 127.0.1.1, where others never reach it.
    """
    import psutil

    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = [name for name, found in psutil.net_if_addrs().items() if any(entry.address == own for entry in found)]
    return names[0] if names else None
