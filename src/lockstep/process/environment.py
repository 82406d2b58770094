"""This process's environment: its variables, which only this file reads, its GPUs and cores."""

import ctypes
import itertools
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

# Set in the ranks that agent.py starts: the agent's pid, the ranks' cluster, and the folder for
# their output.
AGENT = "LOCKSTEP_AGENT"
# Set in the jobs of a sweep: how many of them run side by side on this machine.
JOBS = "LOCKSTEP_JOBS"
# The driver's files. On WSL it is the last one.
DRIVER_FILES = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
PR_SET_PDEATHSIG = 1
NO_QUOTA = sys.maxsize
# Parameters of glibc's mallopt, and the bytes that it keeps
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT_BYTES = 2**30


def environment() -> dict[str, str]:
    """Return a copy of the environment variables."""
    return dict(os.environ)


def set_variables(variables: Mapping[str, str], *, unless_set: bool = False) -> None:
    """Set variables of this process and its children.

    Args:
        unless_set: keep those that the user has set.
    """
    for name, value in variables.items():
        if not unless_set or name not in os.environ:
            os.environ[name] = value


def replace_variables(variables: Mapping[str, str]) -> None:
    """Set all variables of this process: those that are not given are removed."""
    os.environ.clear()
    os.environ.update(variables)


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends, however it ends; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def count_visible_gpus(environ: Mapping[str, str] | None = None) -> int:
    """Count the NVIDIA GPUs that a process started now would see, without torch."""
    listed = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        # CUDA too stops at the first name of no GPU, such as -1 or SLURM's NoDevFiles.
        names = (name.strip() for name in listed.split(","))
        return len(list(itertools.takewhile(_names_gpu, names)))
    if not any(map(os.path.exists, DRIVER_FILES)):
        return 0
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:
        # NVML raises errors of its own. A container without it may have CUDA all the same.
        return _count_gpus_of_driver()


def _names_gpu(name: str) -> bool:
    return name.isdigit() or name.startswith(("GPU-", "MIG-"))


def _count_gpus_of_driver() -> int:
    count = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        log.info(f"GPUs cannot be counted ({error}); none is used.")
        return 0
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def available_cores(
    proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the cores that this process may use.

    These are its affinity, within the CPU quotas of all control groups above it.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    if not proc.exists():
        return cores
    for line in proc.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        # Version 2 has one file, and no names of controllers.
        names: tuple[str, ...] = ("cpu.max",)
        folder = mount / group.strip("/")
        if controllers:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            folder = mount / "cpu" / group.strip("/")
        if not controllers or "cpu" in controllers.split(","):
            quotas = [_cpu_quota(level, names) for level in (folder, *folder.parents)]
            cores = max(1, min(cores, *quotas))
    return cores


def _cpu_quota(folder: Path, names: tuple[str, ...]) -> int:
    """Return the whole cores that a control group may use; NO_QUOTA if it has none."""
    try:
        text = " ".join((folder / name).read_text() for name in names)
        quota, period = map(int, text.split())
    except (OSError, ValueError):
        # The root group and folders above it have none, and "max" is none, too.
        return NO_QUOTA
    return quota // period if quota > 0 else NO_QUOTA


def cores_of_task() -> int:
    """Return the cores that this process and those beside it in one task of SLURM may use.

    SLURM may bind no task to its cores: each then sees all those of its node. Without SLURM they
    are the machine's.
    """
    environ = environment()
    cores = available_cores()
    if "SLURM_STEP_NUM_TASKS" in environ:
        cores = min(cores, int(environ.get("SLURM_CPUS_PER_TASK") or cores))
    return cores


def cores_of_rank() -> int:
    """Return the cores of this rank, as 4 for one of two ranks on a machine with 8.

    They are those of its SLURM task, or its share of them.
    The ranks of this node, and the jobs of a sweep that run side by side, share the machine's.
    """
    environ = environment()
    ranks = int(environ.get("LOCAL_WORLD_SIZE") or 1) * int(environ.get(JOBS) or 1)
    has_agent = bool({AGENT, "TORCHELASTIC_RUN_ID"} & environ.keys())
    is_task = environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" and not has_agent
    if not is_task:
        return max(1, cores_of_task() // ranks)

    cores = available_cores()
    # With --cpus-per-gpu SLURM may bind each task to its own cores, and names no number.
    masks = set(environ.get("SLURM_CPU_BIND_LIST", "").split(","))
    is_bound = cores < ranks * int(environ.get("SLURM_CPUS_PER_TASK") or 0)
    if is_bound or len(masks) == ranks > 1:
        return cores
    return max(1, min(cores_of_task(), cores // ranks))


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones of this process.

    It would give each large block back to the kernel, which fills the pages of the next one with
    zeros again. The process then holds its peak until it ends. Elsewhere than on glibc, and where
    the user has chosen an allocator or its options, nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc" or _has_chosen_allocator(environment()):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    # Before version 2.35 glibc takes no more than 32 MiB.
    if not mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)


def _has_chosen_allocator(environ: Mapping[str, str]) -> bool:
    """Return whether the environment names options of malloc, or another allocator."""
    if any(name.startswith("MALLOC_") for name in environ):
        return True
    preloaded = environ.get("LD_PRELOAD", "")
    has_other = any(name in preloaded for name in ("jemalloc", "tcmalloc", "mimalloc"))
    return has_other or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")


def cpu_name() -> str:
    """Return the processor's name as /proc/cpuinfo has it, or the architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = (line for line in file if line.startswith("model name"))
            return next(lines).split(":", 1)[1].strip()
    except (OSError, StopIteration):
        return os.uname().machine


def network_interface(address: str) -> str | None:
    """Return the network interface by which this host reaches `address`; None if there is none.

    gloo uses the address that the host's own name resolves to, on many machines 127.0.1.1, where
    others never reach it.
    """
    import psutil

    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # A datagram socket sends nothing when it connects.
            probe.connect(target)
            local_address = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if local_address in [entry.address for entry in addresses]:
            return str(name)
    return None
