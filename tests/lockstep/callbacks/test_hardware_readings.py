"""NVML through a stand-in that answers as the library does: whole cards, MIG, gaps, no driver, a driver that dies."""

import inspect
import os
import re
import sys
from types import SimpleNamespace

import psutil
import pytest

import example_runs
from lockstep.callbacks import hardware_readings as machine_readings
from lockstep.callbacks.hardware_readings import CpuReader, GpuReader, throttle_words

GIB = 2**30


class NVMLError(Exception):
    def __init__(self, value=999, message="an error"):
        super().__init__(message)
        self.value = value


class NotSupported(NVMLError):
    pass


class NotFound(NVMLError):
    pass


class FakeNvml:
    """Two cards unless told otherwise. `refuse` maps a function's name to the error that it raises."""

    NVMLError, NVMLError_NotSupported, NVMLError_NotFound = NVMLError, NotSupported, NotFound
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    ecc_errors = 0
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNINITIALIZED = 15, 1

    def __init__(self, cards=2, mig=0):
        self.cards, self.mig, self.refuse, self.calls = cards, mig, {}, []

    def __getattribute__(self, name):
        answer = object.__getattribute__(self, name)
        if not name.startswith("nvml"):
            return answer
        self.calls.append(name)

        def refusing(*arguments):
            error = self.refuse.get(name) or self.refuse.get((name, arguments[0] if arguments else None))
            if error is not None:
                raise error
            return answer(*arguments)

        return refusing

    def nvmlInit(self): ...
    def nvmlShutdown(self): ...
    def nvmlDeviceGetCount(self):
        return self.cards

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"card{index}"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-aaaa{handle[-1]}-bbbb".encode()

    def nvmlDeviceGetHandleByUUID(self, uuid):
        known = {f"GPU-aaaa{i}-bbbb": f"card{i}" for i in range(self.cards)}
        known |= {f"MIG-{i}": f"mig{i}" for i in range(self.mig)}
        if uuid not in known:
            raise NotFound(6, "Not Found")
        return known[uuid]

    def nvmlDeviceGetMigMode(self, handle):
        if not self.mig:
            raise NotSupported(3, "Not Supported")
        if handle.startswith("mig"):
            raise NVMLError(2, "Invalid Argument")
        return (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index >= self.mig:
            raise NotFound(6, "Not Found")
        return f"mig{index}"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        if not handle.startswith("mig"):
            raise NVMLError(2, "Invalid Argument")
        return "card0"

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA T4" if handle.startswith("card") else "NVIDIA A100 MIG 3g.20gb"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(3 + int(handle[-1])) * GIB, total=15 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle.startswith("mig"):
            raise NotSupported(3, "Not Supported")
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle):
        assert handle.startswith("card")
        return 68_500

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 71

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1590, 2: 5000}[kind]

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, since):
        assert (handle, kind, since) == ("card0", 1, 0) or self.cards > 1
        return self.ecc_errors

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x24


def reader(nvml, visible=None):
    told = []
    return GpuReader(nvml, visible, told.append), told


def test_a_whole_card():
    gpus, told = reader(FakeNvml(cards=1))
    assert gpus.facts() == [{"name": "NVIDIA T4", "memory_gib": 15.0}]
    assert gpus.read() == {
        "gpu0/utilisation_percent": 97.0, "gpu0/memory_gib": 3.0, "gpu0/power_w": 68.5, "gpu0/temperature_c": 71.0,
        "gpu0/sm_clock_mhz": 1590.0, "gpu0/memory_clock_mhz": 5000.0, "gpu0/throttle": "power-cap|sw-thermal",
        "gpu0/ecc_errors": 0.0,
    }  # fmt: skip
    assert told == []


def test_memory_errors_are_said_once_and_cards_without_ecc_say_nothing():
    nvml = FakeNvml(cards=1)
    nvml.ecc_errors = 2
    gpus, told = reader(nvml)
    assert [gpus.read()["gpu0/ecc_errors"] for _ in range(2)] == [2.0, 2.0]
    assert told == ["gpu0 has memory errors that ECC could not correct: have it reset or replaced"]
    nvml.refuse["nvmlDeviceGetTotalEccErrors"] = NotSupported(3, "Not Supported")
    gpus, told = reader(nvml)
    assert gpus.read()["gpu0/ecc_errors"] is None and told == []


@pytest.mark.parametrize(
    ("visible", "memory"),
    [
        (None, [3.0, 4.0, 5.0]),
        ("2,0", [5.0, 3.0]),
        ("GPU-aaaa1-bbbb", [4.0]),
        ("GPU-aaaa2", [5.0]),
        ("1,9,0", [4.0]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices_as_cuda_reads_them(visible, memory):
    gpus, told = reader(FakeNvml(cards=3), visible)
    readings = gpus.read()
    assert [readings[f"gpu{i}/memory_gib"] for i in range(len(gpus.gpus))] == memory
    assert len(told) == (visible == "1,9,0")


@pytest.mark.parametrize("visible", [None, "MIG-0,MIG-1"])
def test_mig_instances_have_their_own_memory_and_the_cards_power(visible):
    gpus, told = reader(FakeNvml(cards=1, mig=2), visible)
    first, second = gpus.read(), gpus.read()
    assert [fact["name"] for fact in gpus.facts()] == ["NVIDIA A100 MIG 3g.20gb"] * 2
    assert (first["gpu0/memory_gib"], first["gpu1/memory_gib"], first["gpu1/power_w"]) == (3.0, 4.0, 68.5)
    assert first["gpu0/utilisation_percent"] is None and second == first
    assert told == [f"gpu{i}: MIG instances do not report utilisation_percent" for i in (0, 1)]


def test_mig_mode_without_an_instance():
    nvml = FakeNvml(cards=1, mig=1)
    nvml.refuse["nvmlDeviceGetMigDeviceHandleByIndex"] = NotFound(6, "Not Found")
    gpus, told = reader(nvml)
    assert gpus.read() == {} and told == ["a GPU is in MIG mode without an instance: CUDA cannot use it"]


@pytest.mark.parametrize(
    "visible", [None, "0,1,2,3,4,5,6,7", "GPU-aaaa0,GPU-aaaa1,GPU-aaaa3,GPU-aaaa2,GPU-aaaa4,4,5,6,7"]
)
def test_a_gpu_that_is_lost_at_the_start_hides_no_other(visible):
    nvml = FakeNvml(cards=8)
    nvml.refuse[("nvmlDeviceGetHandleByIndex", 2)] = NVMLError(15, "GPU is lost")
    gpus, told = reader(nvml, visible)
    readings = gpus.read()
    memory = [readings[f"gpu{i}/memory_gib"] for i in range(len(gpus.gpus))]
    if visible and visible.startswith("GPU"):
        assert memory == [3.0, 4.0, 6.0] and len(told) == 2 and "CUDA_VISIBLE_DEVICES names 'GPU-aaaa2'" in told[1]
    else:
        assert memory == [3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0] and len(told) == 1
    assert told[0] == "GPU 2 does not answer (GPU is lost): no readings of it"


def test_a_gpu_that_is_lost_while_uuids_are_compared_hides_no_other():
    nvml = FakeNvml(cards=3)
    nvml.refuse[("nvmlDeviceGetUUID", "card0")] = NVMLError(15, "GPU is lost")
    gpus, told = reader(nvml, "GPU-aaaa1,GPU-aaaa2")
    assert [gpus.read()[f"gpu{i}/memory_gib"] for i in (0, 1)] == [4.0, 5.0]
    assert told == ["GPU 0 does not answer (GPU is lost): no readings of it"]


def test_a_gpu_that_is_lost_while_it_is_asked_for_its_instances_hides_no_other():
    nvml = FakeNvml(cards=1, mig=2)
    nvml.cards = 2
    nvml.refuse[("nvmlDeviceGetMaxMigDeviceCount", "card0")] = NVMLError(15, "GPU is lost")
    gpus, told = reader(nvml)
    assert len(gpus.gpus) == 2 and told == ["a GPU does not answer (GPU is lost): no readings of it"]


@pytest.mark.parametrize(("visible", "instances"), [("0", 1), ("GPU-aaaa0-bbbb", 1), ("MIG-1", 1), (None, 2)])
def test_of_a_card_that_is_named_cuda_takes_the_first_instance(visible, instances):
    gpus, told = reader(FakeNvml(cards=1, mig=2), visible)
    assert len(gpus.gpus) == instances and told == []
    assert gpus.read()["gpu0/memory_gib"] == (4.0 if visible == "MIG-1" else 3.0)


def test_a_driver_without_the_library_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(machine_readings, "DRIVER", tmp_path / "version")
    assert machine_readings.nvml_library() is None and capsys.readouterr().out == ""
    (tmp_path / "version").touch()
    assert machine_readings.nvml_library() is None
    assert capsys.readouterr().out == "hardware: no GPU readings: the package nvidia-ml-py is not installed\n"


def test_a_missing_value_is_named_once_and_not_asked_again():
    nvml = FakeNvml(cards=1)
    nvml.refuse["nvmlDeviceGetPowerUsage"] = NotSupported(3, "Not Supported")
    gpus, told = reader(nvml)
    assert [gpus.read()["gpu0/power_w"] for _ in range(3)] == [None] * 3
    assert told == ["gpu0: no power_w"] and nvml.calls.count("nvmlDeviceGetPowerUsage") == 1


def test_a_passing_error_leaves_one_value_out():
    nvml = FakeNvml(cards=1)
    gpus, told = reader(nvml)
    nvml.refuse["nvmlDeviceGetTemperature"] = NVMLError(10, "Timeout")
    assert gpus.read()["gpu0/temperature_c"] is None
    nvml.refuse.clear()
    assert gpus.read()["gpu0/temperature_c"] == 71.0 and len(told) == 1


def test_no_driver_and_no_library():
    nvml = FakeNvml()
    nvml.refuse["nvmlInit"] = NVMLError(9, "Driver Not Loaded")
    gpus, told = reader(nvml)
    assert gpus.read() == {} and gpus.facts() == [] and told == ["no GPU readings: Driver Not Loaded"]
    gpus, told = reader(None)
    assert gpus.read() == {} and told == []


def test_a_driver_that_dies_mid_run_is_named_once_for_each_gpu():
    nvml = FakeNvml(cards=2)
    gpus, told = reader(nvml)
    assert gpus.read()["gpu1/memory_gib"] == 4.0
    for name in [name for name in dir(FakeNvml) if name.startswith("nvmlDevice")]:
        nvml.refuse[(name, "card1")] = NVMLError(15, "GPU is lost")
    for _ in range(3):
        nvml.calls.clear()
        readings = gpus.read()
        assert readings["gpu0/memory_gib"] == 3.0
        assert [value for name, value in readings.items() if name.startswith("gpu1/")] == [None] * 8
    assert len(nvml.calls) == 8, "a lost GPU is not asked again: it can hang the driver"
    assert told == ["gpu1 no longer answers (GPU is lost); its readings end here"]
    gpus.close()


def test_cpu_readings_of_a_real_process_and_of_one_that_is_gone(capsys):
    cpus = CpuReader({0: os.getpid(), 1: 2**22 + 1}, psutil)
    readings = cpus.read()
    assert len([name for name in readings if name.startswith("cpu") and name != "cpu/percent"]) == os.cpu_count()
    own = psutil.Process().memory_info().rss / GIB
    assert readings["rank0/memory_gib"] == pytest.approx(own, rel=0.2) and "rank1/memory_gib" not in readings
    assert 0 <= readings["cpu/percent"] <= 100 and readings["machine/load_1min"] >= 0
    assert "rank 1 has no process" in capsys.readouterr().out


def test_throttle_reasons_leave_out_idle_and_set_clocks():
    assert throttle_words(0x1 | 0x2 | 0x40 | 0x8) == "hw-slowdown|hw-thermal"
    assert throttle_words(0x3) == ""


def test_pages_draw_the_names_that_are_written():
    """The example runs, whose GPU panels the pages' tests see, have columns that a GPU's readings have."""
    columns = set(re.findall(r"gpu\d/\w+", inspect.getsource(example_runs.write_hardware)))
    assert len(columns) == 4 and columns <= GpuReader(FakeNvml()).read().keys()
