"""The memory that a process on the CPU keeps."""

import os
import platform
import subprocess
import sys

import pytest

from lockstep.process import environment
from ranks import SRC

# Prints the page faults of a step before and after the call.
STEPS = """
import resource

import torch

from lockstep.process.environment import keep_freed_memory


def faults_of_a_step(steps=5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        images = torch.ones(2**24)
        images.mul(2).add(1)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps


faults_of_a_step()
before = faults_of_a_step()
keep_freed_memory()
faults_of_a_step()
print(before, faults_of_a_step())
"""


def faults(**variables):
    """Return the page faults of a step before and after `keep_freed_memory`."""
    environ = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env={**environ, "PYTHONPATH": str(SRC), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(number) for number in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_kept_memory_halves_the_page_faults_of_a_step():
    before, after = faults()
    assert before > 1000 and after <= before / 2


@pytest.mark.parametrize(
    ("variables", "is_chosen"),
    [
        ({}, False),
        ({"LD_PRELOAD": "/opt/libfast.so"}, False),
        ({"MALLOC_ARENA_MAX": "1"}, True),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, True),
        ({"LD_PRELOAD": "/usr/lib/libtcmalloc_minimal.so.4"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=128"}, True),
    ],
)
def test_an_allocator_of_the_users_choice_stays(variables, is_chosen, monkeypatch):
    calls = []
    monkeypatch.setattr(environment, "environment", lambda: variables)
    monkeypatch.setattr(environment.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: FakeLibrary(calls))
    environment.keep_freed_memory()
    assert bool(calls) != is_chosen


def test_another_c_library_is_left_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(environment.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: FakeLibrary(calls))
    environment.keep_freed_memory()
    assert not calls


class FakeLibrary:
    """A C library whose mallopt notes what is set."""

    def __init__(self, calls):
        self.calls = calls

    def mallopt(self, parameter, value):
        self.calls.append((parameter, value))
        return 1
