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
open(f"pid-{rank}", "w").write(str(os.getpid()))
if f"fail={rank}" in words:
    print(f"error: rank {rank} is to blame", flush=True)
    sys.exit(3)
if "deaf" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
time.sleep(60 if "long" in words or any(w.startswith("fail") for w in words) else 0)
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


def start(place, *words, grace=None, environment=None, hosts=("a", "user@b")):
    own = f"import sys; sys.path.insert(0, {str(SRC)!r}); import nodes\n"
    own += f"nodes.GRACE_AFTER_FAILURE_S = nodes.GRACE_AFTER_STOP_S = {grace}\n" if grace else ""
    argv = [*hosts, "--dir", str(place), "--ssh", f"sh {place}/ssh", "--", *words]
    return subprocess.Popen(
        [sys.executable, "-c", own + f"sys.exit(nodes.main({argv!r}))"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(environment or {})},
    )  # fmt: skip


def end(process):
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def wait_until_started(place):
    deadline = time.monotonic() + 20
    while not all((place / f"pid-{rank}").exists() for rank in (0, 1)) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)


def nothing_left(place):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{(place / f'pid-{rank}').read_text()}").exists() for rank in (0, 1)):
            return True
        time.sleep(0.05)
    return False


def test_each_host_gets_its_rank_one_run_id_and_the_masters_address(place):
    code, output = end(start(place, "trainer=ddp"))
    assert code == 0, output
    lines = sorted(line for line in output.splitlines() if "] node" in line)
    first, second = (line.split() for line in lines)
    assert first[:3] == ["[a]", "node", "0"] and second[:3] == ["[user@b]", "node", "1"]
    assert first[3] == second[3] and len(first[3]) > 10
    assert first[4:] == ["a", "29500", "trainer.num_nodes=2", "trainer=ddp"]


@pytest.mark.slow
def test_when_one_fails_the_others_are_ended_and_its_error_stands_last(place):
    began = time.monotonic()
    code, output = end(start(place, "fail=1", grace=2.0))
    assert code == 3 and time.monotonic() - began < 15
    assert output.strip().splitlines()[-1] == "[user@b] error: rank 1 is to blame"
    assert nothing_left(place)


def test_ctrl_c_asks_for_a_checkpoint_and_comes_back_with_75(place):
    process = start(place, "long")
    wait_until_started(place)
    process.send_signal(signal.SIGINT)
    code, output = end(process)
    assert code == 75, output
    assert nothing_left(place)


def test_a_second_ctrl_c_does_not_wait(place):
    process = start(place, "long", "deaf")
    wait_until_started(place)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    began = time.monotonic()
    code, output = end(process)
    assert code == 137 and time.monotonic() - began < 10, output
    assert nothing_left(place)


def test_losing_nodes_py_ends_the_hosts(place):
    process = start(place, "long")
    wait_until_started(place)
    process.kill()
    process.wait()
    process.stdout.close()
    assert nothing_left(place)


@pytest.mark.parametrize(
    ("overrides", "environment", "expected"),
    [
        (["resume=old"], {}, "old"),
        (["resume=auto", "run_id=mine"], {"RUN_ID": "other"}, "mine"),
        (["resume=auto"], {"RUN_ID": "other"}, "other"),
        (["resume=auto"], {}, None),
    ],
)
def test_which_run_id_all_hosts_get(overrides, environment, expected):
    assert nodes.run_id_for(overrides, environment) == expected
