"""nodes.py with a shell in place of ssh and a tiny script in place of the trainer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nodes

SRC = Path(nodes.__file__).parent
TRAIN = """
import os, signal, sys, time
rank, words = os.environ["NODE_RANK"], sys.argv[1:]
print("node", rank, os.environ.get("RUN_ID"), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], *words, flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in words else lambda *_: sys.exit(75))
open(f"pid-{rank}", "w").write(str(os.getpid()))
if f"fail={rank}" in words:
    print(f"error: rank {rank} is to blame", flush=True)
    sys.exit(3)
time.sleep(60 if "long" in words else 0)
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text(TRAIN)
    (tmp_path / "ssh").write_text('exec sh -c "$2"\n')
    return tmp_path


def start(place, *words, grace_after_failure_s=2.0):
    """Start nodes.py; with "long" among the words, once both nodes run."""
    own = f"import sys; sys.path.insert(0, {str(SRC)!r}); import nodes\nnodes.GRACE_AFTER_FAILURE_S = {grace_after_failure_s}\n"
    argv = ["a", "user@b", "--dir", str(place), "--ssh", f"sh {place}/ssh", "--", *words]
    process = subprocess.Popen(
        [sys.executable, "-c", own + f"sys.exit(nodes.main({argv!r}))"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while (
        "long" in words
        and time.monotonic() < deadline
        and not all(pid.exists() for pid in pids(place))
    ):
        time.sleep(0.02)
    return process


def pids(place):
    return [place / f"pid-{rank}" for rank in (0, 1)]


def end(process, place):
    """Return the exit code and the output; nothing is left on either host."""
    output, _ = process.communicate(timeout=30)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid.read_text()}").exists() for pid in pids(place)):
        assert time.monotonic() < deadline, output
        time.sleep(0.05)
    return process.returncode, output


def test_each_host_gets_its_rank_and_one_run_id(place):
    code, output = end(start(place, "trainer=ddp"), place)
    first, second = (
        line.split() for line in sorted(line for line in output.splitlines() if "] node" in line)
    )
    assert (
        code == 0 and first[:3] == ["[a]", "node", "0"] and second[:3] == ["[user@b]", "node", "1"]
    ), output
    assert first[3] == second[3] and len(first[3]) > 10
    assert first[4:] == ["a", "29500", "trainer.num_nodes=2", "trainer=ddp"]


@pytest.mark.slow
def test_the_error_of_the_failed_node_stands_last(place):
    code, output = end(start(place, "fail=1", "long"), place)
    assert code == 3 and output.strip().splitlines()[-1] == "[user@b] error: rank 1 is to blame"


@pytest.mark.parametrize(
    ("words", "times", "wanted"), [(["long"], 1, 75), (["long", "deaf"], 2, 137)]
)
def test_a_second_ctrl_c_does_not_wait_for_a_checkpoint(place, words, times, wanted):
    process, began = start(place, *words), time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    code, output = end(process, place)
    assert code == wanted and time.monotonic() - began < 12, output


def test_ctrl_c_after_a_failure_stops_the_other_hosts(place):
    process = start(place, "fail=0", "long", grace_after_failure_s=60.0)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, output = end(process, place)
    assert code == 3, output


def test_losing_nodes_py_ends_the_hosts(place):
    process = start(place, "long")
    os.kill(process.pid, signal.SIGKILL)
    assert end(process, place)[0] == -signal.SIGKILL


def test_a_command_that_is_missing_is_refused(capfd):
    assert nodes.main(["a", "--ssh", "no-such-ssh", "--", "trainer=ddp"]) == 2
    assert "error: no-such-ssh cannot be started" in "".join(capfd.readouterr())
