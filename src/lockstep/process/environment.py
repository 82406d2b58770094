"""This process's environment: its variables, which only this file reads, its GPUs, cores, network
and parent.
"""

import ctypes
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

AGENT = "LOCKSTEP_AGENT"  # set in the ranks that agent.py starts: its pid, their cluster, the folder for their output
# Set in the jobs of a sweep: how many of them run side by side on this machine
JOBS = "LOCKSTEP_JOBS"


def environment() -> dict[str, str]:
    """Return a copy of the environment variables."""
    return dict(os.environ)


def set_variables(variables: Mapping[str, str], *, unless_set: bool = False) -> None:
    """Set variables of this process and its children.

    With `unless_set` only those that the user has not set.
    """
    os.environ.update({name: value for name, value in variables.items() if not (unless_set and name in os.environ)})


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends, however it ends; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def visible_gpus(environ: Mapping[str, str] | None = None) -> int:
    """Count the NVIDIA GPUs that a process started now would see, by the driver's library and
    without torch.
    """
    chosen = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:  # CUDA too stops at the first word that is none, such as -1 or SLURM's NoDevFiles
        words = map(str.strip, chosen.split(","))
        return len(list(itertools.takewhile(lambda word: word.isdigit() or word.startswith(("GPU-", "MIG-")), words)))
    if not any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))):  # dxg: WSL
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
            log.info(f"GPUs cannot be counted ({error}); continuing with the CPU.")
    return 0


def available_cores(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may use: its affinity, within the CPU quotas of all
    control groups above.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for line in proc.read_text().splitlines() if proc.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)  # version 2 has cpu.max
        inner = mount / (controllers and "cpu") / group.strip("/")
        for folder in (inner, *inner.parents):
            try:
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            except (OSError, ValueError):
                continue  # the root group and folders above it state none; "max" is none, too
            cores = max(1, min(cores, quota // period)) if quota > 0 else cores
    return cores


def cores_of_rank() -> int:
    """Return the cores of this rank: those that SLURM has bound it to, else its share.

    The ranks of this node, and the jobs of a sweep that run side by side, share the machine's.
    """
    environ = environment()
    cores = available_cores()
    ranks = int(environ.get("LOCAL_WORLD_SIZE") or 1) * int(environ.get(JOBS) or 1)
    has_agent = bool({AGENT, "TORCHELASTIC_RUN_ID"} & environ.keys())
    is_task = environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" and not has_agent
    is_bound = is_task and cores < ranks * int(environ.get("SLURM_CPUS_PER_TASK") or 0)
    if is_bound:
        return cores
    return max(1, cores // ranks)


def cpu_name() -> str:
    """Return the processor's name as /proc/cpuinfo has it, or the architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return os.uname().machine


def network_interface(address: str) -> str | None:
    """Return the network interface by which this host reaches `address`.

    None if that cannot be found.

    gloo uses the address that the host's own name resolves to, on many machines 127.0.1.1, where
    others never reach it.
    """
    import psutil

    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    return next(
        (name for name, found in psutil.net_if_addrs().items() if own in [each.address for each in found]), None
    )
