"""torch's agent with ranks that are tiny scripts: they import no torch, so each test takes a
fraction of a second.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.ranks import agent
from lockstep.ranks.agent import start_ranks
from lockstep.ranks.find import Cluster, read_cluster
from lockstep.ranks.placement import RequestedDevices
from ranks import SRC

RANK = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
folder = sys.argv[1]
open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
def fail(message, kind="ValueError", code=1, at=None):
    failure = dict(rank=rank, host="h", phase="training", message=message, kind=kind)
    own = dict(message=f"RankFailed: {json.dumps(failure)}",
               extraInfo=dict(py_callstack="the traceback", timestamp=str(int(at or time.time()))))
    json.dump(dict(message=own), open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
    sys.exit(code)
"""
CLUSTER = Cluster("none", 1, 2, 0, None, "127.0.0.1", None)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "GRACE_AFTER_STOP_S", 2)

    def start(body: str, *, once_ready: signal.Signals | None = None):
        (tmp_path / "rank.py").write_text(RANK + body)
        if once_ready:
            threading.Thread(target=send, args=(tmp_path, once_ready)).start()
        arguments = ["-S", str(tmp_path / "rank.py"), str(tmp_path)]
        ended = start_ranks(CLUSTER, "r", tmp_path, arguments, 30.0)
        assert not any(
            Path(f"/proc/{path.read_text()}").exists() for path in tmp_path.glob("pid-*")
        )
        return ended

    return start


def send(folder, number):
    """Signal this process when both ranks have written their ready files."""
    while not all((folder / f"ready-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.02)
    os.kill(os.getpid(), number)


def test_ranks_get_torchruns_variables(run, tmp_path):
    code, failure, _ = run('json.dump(dict(os.environ), open(f"{folder}/env-{rank}", "w"))')
    assert (code, failure) == (0, None)
    first, second = (json.loads((tmp_path / f"env-{rank}").read_text()) for rank in (0, 1))
    assert (
        first["MASTER_PORT"] == second["MASTER_PORT"]
        and second["WORLD_SIZE"] == "2" == second["LOCAL_WORLD_SIZE"]
    )
    assert (second["LOCAL_RANK"], second["RUN_ID"]) == ("1", "r")
    own = second["LOCKSTEP_AGENT"].split(maxsplit=6)
    assert (own[0], own[-1]) == (str(os.getpid()), str(tmp_path))
    cluster = read_cluster(second, RequestedDevices())
    assert (cluster.launcher, cluster.rank, cluster.world_size, cluster.has_agent) == (
        "none",
        1,
        2,
        True,
    )
    assert cluster.has_agent_store and cluster.master_port == int(first["MASTER_PORT"])


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)", 1, "killed by SIGKILL"),
        ('fail("no such folder", "UserError", 2)', 2, "no such folder"),
        ("sys.exit(7)", 1, "ended with exit code 7"),
        ("sys.exit(75)", 75, None),
    ],
)
def test_exit_codes_are_kept_and_the_others_end(run, body, code, message):
    began = time.monotonic()
    ended = run(body)
    assert ended[0] == code and (ended[1] or {"message": None})["message"] == message
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("number", "on_stop", "ended"),
    [
        (signal.SIGTERM, "lambda *_: sys.exit(75)", (75, None)),
        (signal.SIGINT, "lambda *_: sys.exit(75)", (75, None)),
        (
            signal.SIGTERM,
            "signal.SIG_IGN if rank else lambda *_: sys.exit(75)",
            (1, "did not stop within 2 s of the "),
        ),
        (
            signal.SIGHUP,
            'lambda *_: fail("no room", "DiskFullError") if rank else sys.exit(75)',
            (1, "no room"),
        ),
    ],
)
def test_a_rank_that_fails_after_a_signal_has_failed(run, number, on_stop, ended):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    body = f'signal.signal(signal.SIGTERM, {on_stop}); open(f"{{folder}}/ready-{{rank}}", "w"); time.sleep(60)'
    code, failure, _ = run(body, once_ready=number)
    assert code == ended[0] and (
        failure["message"].startswith(ended[1]) if failure else ended[1] is None
    )


def test_a_second_ctrl_c_kills_the_rest(monkeypatch):
    killed = []

    class Child:
        def __init__(self, number):
            self.number = number

        def kill(self):
            if self.number == 1:
                raise psutil.NoSuchProcess(self.number)
            killed.append(self.number)

    children = [Child(number) for number in range(3)]
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: children)
    monkeypatch.setattr(agent.signals, "record_signal", lambda number: None)
    monkeypatch.setattr(agent.signals, "received", [signal.SIGINT])
    stop = agent._StopHandler()
    stop.stopped_at = time.monotonic()
    stop(signal.SIGINT, None)
    assert killed == [0, 2]


def test_the_rank_that_failed_first_is_named(run):
    code, failure, callstack = run(
        'first = os.environ["TORCHELASTIC_ERROR_FILE"].replace("/0/error", "/1/error")\n'
        "while rank == 0 and not os.path.exists(first): time.sleep(0.01)\n"
        'fail("connection reset", at=time.time() + 20) if rank == 0 else fail("the culprit", at=time.time() - 10)'
    )
    assert (code, failure["rank"], failure["message"], callstack) == (
        1,
        1,
        "the culprit",
        "the traceback",
    )


def test_a_rank_killed_after_its_grace_is_not_the_cause(tmp_path):
    """One is stopped while the other waits for it inside of a collective, where no signal is
    handled.
    """
    stopped, stuck = (
        ProcessFailure(local, 1, code, str(tmp_path / "none")) for local, code in ((0, 75), (1, -9))
    )
    stuck.timestamp = stopped.timestamp + 30
    assert agent._find_first_failure({1: stuck, 0: stopped}, CLUSTER) == (75, None, "")


def test_ranks_die_with_a_killed_agent():
    rank = "import os, time; from lockstep.process.environment import die_with_parent; die_with_parent(os.getppid())\n"
    rank += "print(os.getpid(), flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ
    ) as agent:
        pid = int(agent.stdout.readline())
        agent.kill()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
