"""The supervisor with ranks that are tiny scripts: no torch, so each test takes a fraction of a second."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep.distributed import supervisor as module
from lockstep.distributed.cluster import Cluster
from lockstep.distributed.supervisor import Supervisor
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import RunRecord, read_record, write_record

RANK = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
folder = os.path.dirname(os.environ["LOCKSTEP_PLAN"])
open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GRACE_AFTER_FAILURE_S", 1.0)
    monkeypatch.setattr(module, "GRACE_AFTER_STOP_S", 2.0)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    write_record(folder.record, RunRecord(status="running", phase="training"))

    def build(body: str, devices: int = 2) -> Supervisor:
        script = tmp_path / "rank.py"
        script.write_text(RANK + body)
        cluster = Cluster("none", 1, devices, 0, None, "127.0.0.1", None)
        return Supervisor(cluster, folder, [sys.executable, "-S", str(script)], dict(os.environ))

    return build, folder


def gone(folder: RunFolder, ranks: int = 2) -> bool:
    return not any(Path(f"/proc/{(folder.path / f'pid-{r}').read_text()}").exists() for r in range(ranks))


def test_ranks_get_torchruns_environment_and_all_zero_is_success(start):
    build, folder = start
    code = build('json.dump(dict(os.environ), open(f"{folder}/env-{rank}", "w"))').run()
    assert code == 0
    env = [json.loads((folder.path / f"env-{rank}").read_text()) for rank in (0, 1)]
    assert [e["RANK"] for e in env] == ["0", "1"]
    assert env[0]["MASTER_PORT"] == env[1]["MASTER_PORT"] and env[1]["WORLD_SIZE"] == "2"
    assert gone(folder)


def test_a_killed_rank_ends_the_others_and_completes_the_record(start, capsys):
    build, folder = start
    began = time.monotonic()
    code = build("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)").run()
    assert code == 1 and time.monotonic() - began < 6
    record = read_record(folder.record)
    assert record.status == "failed" and record.exit_code == 1
    assert record.error.rank == 1 and "SIGKILL" in record.error.message
    assert record.error.phase == "training"
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: rank 1 on ")
    assert gone(folder)


def test_the_rank_that_failed_first_is_named_not_the_one_that_noticed(start, capsys):
    build, folder = start
    build("""
def fail(message, at):
    facts = dict(rank=rank, host="h", phase="training", message=message, kind="ValueError", time=at)
    json.dump(facts, open(f"{folder}/error-rank{rank}.json", "w"))
    sys.exit(1)
fail("connection reset by peer", 20.0) if rank == 0 else (time.sleep(0.3), fail("the culprit", 10.0))
""").run()
    assert read_record(folder.record).error.message == "the culprit"
    assert "the culprit" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_user_error_is_one_sentence_and_exit_code_2(start, capsys):
    build, folder = start
    code = build("""
facts = dict(rank=rank, host="h", phase="start", message="no such folder", kind="UserError", time=1.0)
json.dump(facts, open(f"{folder}/error-rank{rank}.json", "w"))
sys.exit(2)
""").run()
    assert code == 2
    assert capsys.readouterr().err.strip() == "error: no such folder"


def sigterm_once_ready(folder):
    """To this process, when both ranks have written their ready files."""

    def terminate():
        while not all((folder.path / f"ready-{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()


def test_sigterm_is_handed_on_and_75_comes_back(start):
    build, folder = start
    supervisor = build("""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(f"{folder}/ready-{rank}", "w")
time.sleep(60)
""")
    sigterm_once_ready(folder)
    assert supervisor.run() == 75
    assert gone(folder)


def test_under_nohup_a_lost_terminal_ends_nothing(start):
    build, folder = start
    supervisor = build("""
open(f"{folder}/ready-{rank}", "w")
time.sleep(1)
""")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hangup = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGHUP))
        hangup.start()
        assert supervisor.run() == 0
        hangup.join()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_rank_that_ignores_the_stop_is_killed_in_the_end(start):
    build, folder = start
    supervisor = build("""
signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else lambda *_: sys.exit(75))
open(f"{folder}/ready-{rank}", "w")
time.sleep(60)
""")
    sigterm_once_ready(folder)
    began = time.monotonic()
    assert supervisor.run() == 1 and time.monotonic() - began < 8
    assert read_record(folder.record).status == "failed"
    assert gone(folder)


def test_ranks_die_with_a_killed_supervisor(start, tmp_path):
    build, folder = start
    src = Path(module.__file__).parents[2]
    script = tmp_path / "rank.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(src)!r})\n"
        + RANK
        + "from lockstep.distributed.supervisor import die_with_parent\n"
        + 'die_with_parent(int(os.environ["LOCKSTEP_SUPERVISOR"]))\n'
        + 'open(f"{folder}/ready-{rank}", "w"); time.sleep(60)'
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"""
import sys, os; sys.path.insert(0, {str(src)!r})
from pathlib import Path
from lockstep.distributed.supervisor import Supervisor
from lockstep.distributed.cluster import Cluster
from lockstep.runs.folder import RunFolder
Supervisor(Cluster("none", 1, 2, 0, None, "127.0.0.1", None), RunFolder(Path({str(folder.path)!r})),
           [sys.executable, {str(script)!r}], dict(os.environ)).run()
"""])  # fmt: skip
    while not all((folder.path / f"ready-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while not gone(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(folder)


def test_a_signal_before_the_ranks_can_handle_it_is_an_interruption(start):
    build, folder = start
    supervisor = build('open(f"{folder}/ready-{rank}", "w"); time.sleep(60)')
    sigterm_once_ready(folder)
    assert supervisor.run() == 75
    assert read_record(folder.record).status == "interrupted"
    assert gone(folder)


def test_errors_of_an_earlier_start_with_more_ranks_are_forgotten(start):
    build, folder = start
    old = {"rank": 3, "host": "h", "phase": "training", "message": "long ago", "kind": "ValueError", "time": 1.0}
    folder.rank_error(3).write_text(json.dumps(old))
    build("sys.exit(1) if rank == 0 else time.sleep(60)").run()
    assert read_record(folder.record).error.rank == 0
