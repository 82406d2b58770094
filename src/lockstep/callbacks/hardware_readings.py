"""What the GPUs and CPUs of this machine do right now: readings through NVML and psutil, oddities named once."""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

GIB = 2**30
DRIVER = Path("/proc/driver/nvidia/version")
Reading = dict[str, float | str | None]

THROTTLE_REASONS = {  # NVML's bit → word; a GPU that idles or follows a set clock is not throttled
    0x4: "power-cap",
    0x8: "hw-slowdown",
    0x10: "sync-boost",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "hw-power-brake",
}


def say(message: str) -> None:
    log.info(f"hardware: {message}")


@dataclass
class Gpu:
    """One GPU or MIG instance. `parent` answers what NVML knows of the whole card only."""

    index: int
    handle: Any
    parent: Any
    facts: dict[str, object] = field(default_factory=dict)
    unsupported: set[str] = field(default_factory=set)
    lost: bool = False

    @property
    def is_mig(self) -> bool:
        return self.handle is not self.parent


class GpuReader:
    """Readings of the GPUs that this machine's training processes see.

    Args:
        nvml: the pynvml module, or what answers like it; None: there is none.
        visible: CUDA_VISIBLE_DEVICES of the training processes; None: unset, so all.
        tell: gets each oddity once, as a sentence.
    """

    def __init__(self, nvml: Any, visible: str | None = None, tell: Callable[[str], None] = say) -> None:
        self.nvml, self.tell = nvml, tell
        self.told: set[str] = set()
        self.gpus: list[Gpu] = []
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
        except (nvml.NVMLError, OSError) as error:
            self._once(f"no GPU readings: {error}")
            return
        try:
            handles = self._visible_handles(visible)
        except nvml.NVMLError as error:
            self._once(f"no GPU readings: {error}")
            return
        for handle in handles:
            try:
                self._add(handle, whole_card=visible is None)
            except nvml.NVMLError as error:
                self._once(f"a GPU does not answer ({error}): no readings of it")

    def facts(self) -> list[dict[str, object]]:
        """Name and memory of each, for the record."""
        return [gpu.facts for gpu in self.gpus]

    def read(self) -> Reading:
        """`gpu0/memory_gib` and so on; None where the card does not say."""
        readings: Reading = {}
        for gpu in self.gpus:
            for name, query in self._queries(gpu).items():
                readings[f"gpu{gpu.index}/{name}"] = self._ask(gpu, name, query)
        return readings

    def close(self) -> None:
        if self.gpus and not all(gpu.lost for gpu in self.gpus):
            try:
                self.nvml.nvmlShutdown()
            except self.nvml.NVMLError as error:
                self._once(f"NVML did not shut down: {error}")
        self.gpus = []

    def _queries(self, gpu: Gpu) -> dict[str, Callable[[], Any]]:
        nvml, card = self.nvml, gpu.parent
        return {
            "utilisation_percent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu),
            "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu.handle).used / GIB,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000,
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
            "sm_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM)),
            "ecc_errors": lambda: self._ecc_errors(gpu),
            "throttle": lambda: throttle_words(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)),
        }

    def _ecc_errors(self, gpu: Gpu) -> float | None:
        """Memory errors since the driver was loaded that ECC could not correct; None on cards without ECC."""
        nvml = self.nvml
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        try:
            count = nvml.nvmlDeviceGetTotalEccErrors(gpu.parent, kind, nvml.NVML_VOLATILE_ECC)
        except nvml.NVMLError_NotSupported:
            return None
        if count:
            self._once(f"gpu{gpu.index} has memory errors that ECC could not correct: have it reset or replaced")
        return float(count)

    def _ask(self, gpu: Gpu, name: str, query: Callable[[], Any]) -> Any:
        if gpu.lost or name in gpu.unsupported:
            return None
        try:
            return query()
        except self.nvml.NVMLError_NotSupported:
            gpu.unsupported.add(name)
            kind = "MIG instances" if gpu.is_mig else "this GPU"
            self._once(f"gpu{gpu.index}: {kind} do not report {name}" if gpu.is_mig else f"gpu{gpu.index}: no {name}")
        except self.nvml.NVMLError as error:
            if self._is_gone(error):
                gpu.lost = True
                self._once(f"gpu{gpu.index} no longer answers ({error}); its readings end here")
            else:
                self._once(f"gpu{gpu.index}: {name} left out where NVML answers {error!r}")
        return None

    def _is_gone(self, error: Any) -> bool:
        names = ("GPU_IS_LOST", "UNINITIALIZED", "DRIVER_NOT_LOADED", "UNKNOWN", "RESET_REQUIRED")
        gone = [getattr(self.nvml, f"NVML_ERROR_{name}", None) for name in names]
        return getattr(error, "value", None) in [value for value in gone if value is not None]

    def _visible_handles(self, visible: str | None) -> list[Any]:
        """As CUDA reads CUDA_VISIBLE_DEVICES: indices or UUIDs, up to the first that does not exist."""
        count = self.nvml.nvmlDeviceGetCount()
        if visible is None:
            return [handle for index in range(count) if (handle := self._by_index(index)) is not None]
        handles = []
        for word in (word.strip() for word in visible.split(",")):
            if word.isdigit() and int(word) < count:
                handle = self._by_index(int(word))
                if handle is None:
                    continue
            else:
                handle = self._by_uuid(word, count) if word.startswith(("GPU-", "MIG-")) else None
            if handle is None:
                if word not in ("", "-1"):
                    self._once(f"CUDA_VISIBLE_DEVICES names {word!r}, which is not here; CUDA stops there too")
                break
            handles.append(handle)
        return handles

    def _by_index(self, index: int) -> Any:
        """None where this one does not answer; the others do."""
        try:
            return self.nvml.nvmlDeviceGetHandleByIndex(index)
        except self.nvml.NVMLError as error:
            self._once(f"GPU {index} does not answer ({error}): no readings of it")
            return None

    def _by_uuid(self, word: str, count: int) -> Any:
        """A full UUID, or the beginning of a GPU's."""
        nvml = self.nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(word)
        except nvml.NVMLError:
            for index in range(count):
                try:
                    if (handle := self._by_index(index)) and text(nvml.nvmlDeviceGetUUID(handle)).startswith(word):
                        return handle
                except nvml.NVMLError as error:
                    self._once(f"GPU {index} does not answer ({error}): no readings of it")
            return None

    def _add(self, handle: Any, whole_card: bool) -> None:
        """
        Args:
            whole_card: with all its MIG instances; CUDA takes the first one of a card that is named.
        """
        nvml = self.nvml
        try:
            divided = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
        except nvml.NVMLError:  # cards without MIG, and MIG instances themselves
            divided = False
        instances = self._mig_instances(handle) if divided else []
        if divided and not instances:
            self._once("a GPU is in MIG mode without an instance: CUDA cannot use it")
        for found in (instances if whole_card else instances[:1]) if divided else [handle]:
            gpu = Gpu(len(self.gpus), found, self._parent(found))
            gpu.facts = self._facts_of(gpu)
            self.gpus.append(gpu)

    def _facts_of(self, gpu: Gpu) -> dict[str, object]:
        nvml, handle = self.nvml, gpu.handle
        return {
            "name": self._ask(gpu, "name", lambda: text(nvml.nvmlDeviceGetName(handle))),
            "memory_gib": self._ask(
                gpu, "total memory", lambda: round(nvml.nvmlDeviceGetMemoryInfo(handle).total / GIB, 2)
            ),
        }

    def _mig_instances(self, handle: Any) -> list[Any]:
        found = []
        for index in range(self.nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                found.append(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
            except self.nvml.NVMLError_NotFound:
                continue
        return found

    def _parent(self, handle: Any) -> Any:
        try:
            return self.nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        except self.nvml.NVMLError:  # a whole card has none
            return handle

    def _once(self, message: str) -> None:
        if message not in self.told:
            self.told.add(message)
            self.tell(message)


class CpuReader:
    """Use of every core, memory of the rank processes and of the machine, load.

    Args:
        processes: rank → process id, for the ranks of this node.
        psutil: the library, or what answers like it.
    """

    def __init__(self, processes: dict[int, int], psutil: Any) -> None:
        self.psutil = psutil
        self.ranks: dict[int, Any] = {}
        for rank, pid in processes.items():
            try:
                self.ranks[rank] = psutil.Process(pid)
            except psutil.Error:
                say(f"rank {rank} has no process {pid} to measure")
        psutil.cpu_percent(percpu=True)  # the first call has nothing to compare with

    def read(self) -> Reading:
        cores = self.psutil.cpu_percent(percpu=True)
        readings: Reading = {"cpu/percent": sum(cores) / max(len(cores), 1)}
        readings |= {f"cpu{core}/percent": percent for core, percent in enumerate(cores)}
        readings |= {f"rank{rank}/memory_gib": self._memory(process) for rank, process in self.ranks.items()}
        readings["machine/memory_gib"] = self.psutil.virtual_memory().used / GIB
        readings["machine/load_1min"] = self.psutil.getloadavg()[0]
        return readings

    def _memory(self, process: Any) -> float | None:
        try:
            return process.memory_info().rss / GIB
        except self.psutil.Error:  # it has ended
            return None


def throttle_words(bits: int) -> str:
    """`power-cap|sw-thermal`; empty where nothing holds the clocks down."""
    return "|".join(word for bit, word in THROTTLE_REASONS.items() if bits & bit)


def text(value: bytes | str) -> str:
    """Older NVML bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def nvidia_smi() -> str | None:
    """The whole text of nvidia-smi, or None where there is none or it does not answer within 20 s."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi did not answer: {error}\n"
    return done.stdout + done.stderr


def nvml_library() -> Any:
    """pynvml, or None where it is not installed, which is said where there is a driver that it could ask."""
    try:
        import pynvml
    except ImportError:
        if DRIVER.exists():
            say("no GPU readings: the package nvidia-ml-py is not installed")
        return None
    return pynvml


def cpu_name() -> str:
    """As /proc/cpuinfo names the processor; the architecture elsewhere."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return os.uname().machine
