"""This process's environment: its variables, which only this file reads, its GPUs and cores."""

import contextlib
import ctypes
import itertools
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
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
    """Replace all variables of this process by these."""
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
    visible_devices = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:
        # CUDA, too, stops at the first name that is no GPU, such as -1 or SLURM's NoDevFiles.
        names = (name.strip() for name in visible_devices.split(","))
        return len(list(itertools.takewhile(_is_gpu_name, names)))
    if not any(map(os.path.exists, DRIVER_FILES)):
        return 0
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:
        # NVML raises errors of its own. A container may have CUDA without NVML.
        return _count_gpus_of_driver()


def _is_gpu_name(name: str) -> bool:
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
    for folder, is_version_2 in _control_groups("cpu", proc, mount):
        names = ("cpu.max",) if is_version_2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        cores = max(1, min(cores, _cpu_quota(folder, names)))
    return cores


def available_memory(
    total: int, proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes that this process may use: all, within the limits of its control groups."""
    for folder, is_version_2 in _control_groups("memory", proc, mount):
        name = "memory.max" if is_version_2 else "memory.limit_in_bytes"
        # The root group and the folders above it have no such file, and "max" is no number.
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int((folder / name).read_text()))
    return total


def _control_groups(controller: str, proc: Path, mount: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups and all folders above them.

    The second value is True for version 2 of control groups, which does not name controllers.
    """
    if not proc.exists():
        return
    for line in proc.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        folder = mount / group.strip("/")
        if controllers:
            folder = mount / controller / group.strip("/")
        if not controllers or controller in controllers.split(","):
            for level in (folder, *folder.parents):
                yield level, not controllers


def _cpu_quota(folder: Path, names: tuple[str, ...]) -> int:
    """Return the whole cores that a control group may use; NO_QUOTA if it has none."""
    try:
        text = " ".join((folder / name).read_text() for name in names)
        quota, period = map(int, text.split())
    except (OSError, ValueError):
        # The root group and the folders above it have no such files, and "max" is no number.
        return NO_QUOTA
    return quota // period if quota > 0 else NO_QUOTA


def cores_of_task() -> int:
    """Return the cores of this machine or, in a step of srun, of this task.

    SLURM may not bind the task to its cores, so that it sees all cores of its node. Then
    SLURM_CPUS_PER_TASK tells how many belong to the task.
    """
    environ = environment()
    cores = available_cores()
    if "SLURM_STEP_NUM_TASKS" in environ:
        cores = min(cores, int(environ.get("SLURM_CPUS_PER_TASK") or cores))
    return cores


def cores_of_rank() -> int:
    """Return the cores of this rank, at least 1.

        the rank is                                  its cores
        a task of srun that is bound to its cores    all that it sees
        a task of srun that is not bound             a share, at most SLURM_CPUS_PER_TASK
        started by an agent, or in another way       a share of `cores_of_task`

    The ranks of this node, and the jobs of a sweep that run side by side, have equal shares.
    """
    environ = environment()
    cores = available_cores()
    ranks = int(environ.get("LOCAL_WORLD_SIZE") or 1) * int(environ.get(JOBS) or 1)
    has_agent = bool({AGENT, "TORCHELASTIC_RUN_ID"} & environ.keys())
    if environ.get("SLURM_STEP_NUM_TASKS", "1") == "1" or has_agent:
        return max(1, cores_of_task() // ranks)
    if _is_bound_task(environ, cores, ranks):
        return cores
    return max(1, min(cores_of_task(), cores // ranks))


def _is_bound_task(environ: Mapping[str, str], cores: int, ranks: int) -> bool:
    """Return whether SLURM has bound this task to cores that the other tasks do not use.

    Such a task sees fewer cores than all tasks of the node need together. With --cpus-per-gpu
    SLURM does not tell their number, but it lists a mask of cores for each task.
    """
    masks = set(environ.get("SLURM_CPU_BIND_LIST", "").split(","))
    is_too_few_for_all = cores < ranks * int(environ.get("SLURM_CPUS_PER_TASK") or 0)
    return is_too_few_for_all or len(masks) == ranks > 1


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones of this process.

    By default glibc gives each large block back to the kernel, which fills the pages of the next
    block with zeros. With this setting the process holds its peak memory until it ends. Nothing
    changes without glibc, or if the user has chosen an allocator or its options.
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

    By default gloo uses the address of the host's own name. On many machines this is 127.0.1.1,
    which other hosts cannot reach.
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
