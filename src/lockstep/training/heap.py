"""The C library's heap: freed memory stays with the process, so that a CPU's steps find it without page faults.

glibc maps every large tensor anew and gives it back when it is freed: in each step the kernel then finds and clears
gigabytes, a fifth to a third of a CPU training's time (benchmarks/heap.py). Kept memory has holes that no tensor fits,
up to a third of it. Where memory becomes scarce, it is given back. MALLOC_MMAP_MAX_=65536 in the environment turns it
off.
"""

import ctypes
import platform
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
SCARCE = 0.15  # of the machine's memory, or of the control group's where that is less
INTERVAL_S = 0.1

kept: bool | None = None  # not asked for yet; once given back, it stays so


def keep_freed_memory(environment: Mapping[str, str], free_share: Callable[[], float] | None = None) -> bool:
    """From now on, until memory is scarce; a thread watches that.

    Args:
        free_share: the share of the memory that is free now.

    Returns:
        False where there is no glibc, or where the user has set its malloc by environment variables.
    """
    global kept
    stated = any(name in environment for name in OF_THE_USER) or "malloc" in environment.get("GLIBC_TUNABLES", "")
    if stated or platform.libc_ver()[0] != "glibc":
        return False
    if kept is None:
        kept = bool(_mallopt(M_MMAP_MAX, 0) and _mallopt(M_TRIM_THRESHOLD, -1))
        arguments = (free_share or free_memory_share,)
        threading.Thread(target=_watch, args=arguments, name="heap", daemon=True).start()
    return bool(kept)


def give_back() -> None:
    """About as glibc is by default, and what is free goes to the kernel at once."""
    global kept
    _mallopt(M_MMAP_MAX, 65536)
    _mallopt(M_MMAP_THRESHOLD, 2**20)
    _mallopt(M_TRIM_THRESHOLD, 2**20)
    ctypes.CDLL(None).malloc_trim(0)
    kept = False


def free_memory_share() -> float:
    """Of the machine's memory, or of a control group's (SLURM, containers) where less of that is free."""
    memory = _numbers(Path("/proc/meminfo"))
    shares = [memory["MemAvailable:"] / memory["MemTotal:"]]
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = "/sys/fs/cgroup", "memory.max", "memory.current", "file"
        elif "memory" in controllers.split(","):
            root, limit, used = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_cache"
        else:
            continue
        place = Path(root, group.lstrip("/"))
        for folder in (place, *place.parents):
            try:
                most, now = int((folder / limit).read_text()), int((folder / used).read_text())
                shares.append(1 - (now - _numbers(folder / "memory.stat")[cache]) / most)
            except (OSError, ValueError, KeyError):  # no such file above the root; "max": no limit
                continue
    return min(shares)


def _numbers(path: Path) -> dict[str, int]:
    return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}


def _watch(free_share: Callable[[], float]) -> None:
    wait, free = threading.Event(), 1.0
    while not wait.wait(INTERVAL_S if free < 0.5 else 5 * INTERVAL_S):  # a reading takes 0.4 ms
        free = free_share()
        if free < SCARCE:
            give_back()  # again and again: what the heap holds leaves holes when it is freed later


def _mallopt(parameter: int, value: int) -> int:
    return ctypes.CDLL(None).mallopt(parameter, value)
