"""Freed memory is used again without page faults, until memory is scarce or where the user has chosen otherwise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch.plan import RunPlan
from lockstep.training import heap, rank

SRC = Path(__file__).parents[3] / "src"
PROGRAM = f"""
import json, resource, sys, time
sys.path.insert(0, {str(SRC)!r})
import torch
from pathlib import Path
from lockstep.training import heap

free = [1.0]
told = heap.keep_freed_memory(json.loads(sys.argv[1]), lambda: free[0])


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


series = [faults() for _ in range(40)]
holes = [torch.ones(2**18) for _ in range(600)]
full = resident_mib()
free[0] = 0.1
until = time.monotonic() + 20
while told and heap.kept and time.monotonic() < until:
    time.sleep(0.05)
del holes[::2]
while told and full - resident_mib() < 290 and time.monotonic() < until:
    time.sleep(0.05)
print(json.dumps([told, series[-3:], full, resident_mib(), faults()]))
"""


@pytest.mark.parametrize(
    ("environment", "told"),
    [({"GLIBC_TUNABLES": "glibc.rtld.nns=5"}, True), ({"MALLOC_MMAP_MAX_": "65536"}, False),
     pytest.param({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, False, marks=pytest.mark.soak)],
)  # fmt: skip
def test_freed_memory_comes_back_without_faults(environment, told):
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(environment)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer, last_faults, full, at_the_end, faults_at_the_end = json.loads(done.stdout)
    pages = 64 * 256  # of 4 KiB
    assert answer == told
    assert faults_at_the_end > pages / 2, "glibc's default: every tensor of this size is mapped anew"
    if told:
        assert max(last_faults) < 100
        assert full - at_the_end > 290, (
            "300 tensors of 1 MiB between 300 that live go back, though freed after memory became scarce"
        )
    else:
        assert min(last_faults) > pages / 2


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "cache"),
    [("0::/job/step", "sys/fs/cgroup/job", "memory.max", "memory.current", "file"),
     ("4:cpu,memory:/job/step", "sys/fs/cgroup/memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes",
      "total_cache")],
)  # fmt: skip
def test_free_memory_is_that_of_the_narrowest_group(tmp_path, monkeypatch, line, folder, limit, used, cache):
    files = {
        "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n",
        "proc/self/cgroup": f"9:pids:/job\n{line}\n1:name=systemd:/\n",
        f"{folder}/step/{limit}": "max\n",
        f"{folder}/step/{used}": "5\n",
        f"{folder}/{limit}": "200\n",
        f"{folder}/{used}": "160\n",
        f"{folder}/memory.stat": f"anon 150\n{cache} 10\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(heap, "Path", lambda *parts: tmp_path.joinpath(*[str(part).lstrip("/") for part in parts]))
    assert heap.free_memory_share() == 0.25, "150 of the 200 that the job has; 10 are the kernel's to drop"
    (tmp_path / folder / limit).write_text("1000000\n")
    assert heap.free_memory_share() == 0.6


def test_here_too():
    assert 0 < heap.free_memory_share() <= 1


@pytest.mark.parametrize(("accelerator", "told"), [("cpu", 1), ("gpu", 0)])
def test_a_rank_that_trains_on_a_cpu_keeps_it(monkeypatch, accelerator, told):
    calls = []
    monkeypatch.setattr(rank, "keep_freed_memory", calls.append)
    monkeypatch.setattr(rank.torch, "set_float32_matmul_precision", lambda _: None)
    threads = rank.torch.get_num_threads()
    config = {"trainer": {"num_threads": threads}, "seed": 0}
    rank.prepare_process(RunPlan(config, {}, (), None, accelerator, None, None))
    assert len(calls) == told
