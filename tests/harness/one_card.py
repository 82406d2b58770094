"""Stands for NVML: one T4 whose memory grows with every reading."""

from types import SimpleNamespace


class OneCard:
    class NVMLError(Exception):
        pass

    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    used = 0

    def nvmlInit(self): ...
    def nvmlShutdown(self): ...

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if "Mig" in name:
            return self._refuse
        if name == "nvmlDeviceGetMemoryInfo":
            OneCard.used += 2**30
            return lambda handle: SimpleNamespace(used=OneCard.used, total=16 * 2**30)
        if name == "nvmlDeviceGetUtilizationRates":
            return lambda handle: SimpleNamespace(gpu=50)
        if name == "nvmlDeviceGetName":
            return lambda handle: "NVIDIA T4"
        return lambda *arguments: 1

    def _refuse(self, *arguments):
        raise self.NVMLError_NotSupported("Not Supported")
