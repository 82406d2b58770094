"""Sessions of a batch search with stand-in children: who ends whom, what goes on, what a signal leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lockstep.batch_size import sessions
from lockstep.batch_size.sessions import find_largest
from lockstep.distributed.cluster import Cluster
from lockstep.runs.errors import UserError
from memory_runs import planned

SRC = Path(__file__).resolve().parents[3] / "src"
CHILD = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
folder = Path(sys.argv[2])
from lockstep.batch_size.search import Probe, next_batch
from lockstep.batch_size.sessions import SessionFiles, from_json, read_state, write_state
files = SessionFiles(Path(os.environ["LOCKSTEP_PLAN"]).parent)
rank, bound = int(os.environ["RANK"]), 500
(folder / f"pid-{os.getpid()}").write_text(os.environ["MASTER_PORT"])
state = read_state(files) | {"bound": bound, "limit_gib": 2.0}
probes = [from_json(p) for p in state["probes"]]
BEFORE
while (batch := next_batch(probes, bound=bound)) is not None:
    state["attempt"] = batch
    if rank == 0:
        write_state(files, state)
    while read_state(files)["attempt"] != batch: time.sleep(0.01)
    BODY
    probes.append(Probe(batch, shares))
    state["probes"].append({"batch": batch, "shares": shares})
    if rank == 0:
        write_state(files, state)
    time.sleep(0.05)
"""
RANK_ONE_RUNS_OUT = """
    if batch > 85 and rank == 0: time.sleep(600)  # waits for rank one, as in a collective
    if batch > 85: time.sleep(0.2); os._exit(77)
    shares = [{"held": 0.1, "step": 0.1 + batch / 100}] * 2
"""


@pytest.fixture
def search(tmp_path):
    def start(body, devices=2, before="", accelerator="cpu"):
        script = tmp_path / "child.py"
        script.write_text(CHILD.replace("    BODY\n", body).replace("BEFORE\n", before + "\n"))
        plan = planned(["trainer=cpu", "trainer.accumulate_grad_batches=3"], tmp_path, devices)
        plan = replace(plan, accelerator=accelerator)
        command = [sys.executable, str(script), str(SRC), str(tmp_path)]
        return find_largest(plan, dict(os.environ), command)

    return start


KILLED = """
    if batch > 85: os.kill(os.getpid(), 9)
    shares = [{"held": 0.1, "step": 0.1 + batch / 100}] * 2
"""


def test_a_killed_rank_is_out_of_memory_on_a_cpu_and_of_another_memory_on_a_gpu(search):
    assert search(KILLED, devices=1).per_device <= 85
    with pytest.raises(UserError, match="killed .SIGKILL., as a system does whose own memory, not that of its GPUs"):
        search(KILLED, devices=1, accelerator="gpu")


def pids(folder):
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def test_one_ranks_out_of_memory_is_everybodys_and_the_next_session_goes_on(search, tmp_path):
    started = time.monotonic()
    largest = search(RANK_ONE_RUNS_OUT)
    assert time.monotonic() - started < 20
    assert 0.95 * 85 <= largest.per_device <= 85 and largest.global_batch_size == largest.per_device * 2 * 3
    fields = largest.record()
    assert (fields["out_of_memory"], fields["bounded_by"]) == (1, "memory") and fields["probes"] <= 6
    assert fields["peak_memory_gib"] == pytest.approx(2.0 * (0.1 + largest.per_device / 100), abs=1e-3)
    assert len(pids(tmp_path)) == 4, "two sessions of two children"
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))
    ports = {path.read_text() for path in tmp_path.glob("pid-*")}
    assert len(ports) == 2


def test_each_probe_is_said_when_it_has_ended(search, caplog):
    caplog.set_level("INFO", "lockstep.batch_size.sessions")
    largest = search(RANK_ONE_RUNS_OUT)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "8 images per device: 0.36 of 2 GiB"
    assert len(lines) == largest.record()["probes"] and f"{largest.per_device} images per device: " in lines[-1]
    assert sum(line.endswith(" images per device: out of memory") for line in lines) == 1


def test_one_session_where_nothing_runs_out(search, tmp_path):
    largest = search('\n    shares = [{"held": 0.1, "step": 0.1 + batch / 600}]\n', devices=1)
    assert largest.per_device == 500 and largest.record()["bounded_by"] == "data set"
    assert len(pids(tmp_path)) == 1


def test_a_process_that_the_kernel_kills_ran_out_of_memory(search):
    body = """
    if batch > 20: os.kill(os.getpid(), 9)
    shares = [{"held": 0.2, "step": 0.2 + batch / 100}]
"""
    largest = search(body, devices=1)
    assert 8 <= largest.per_device <= 20 and largest.record()["out_of_memory"] >= 1


def test_nothing_fits(search):
    with pytest.raises(UserError, match="Not even one image for each device fits into 2 GiB with model=vit_base"):
        search("\n    os._exit(77)\n", devices=1)


def test_a_childs_user_error_is_the_searchs(search):
    with pytest.raises(UserError, match="no such folder"):
        search('\n    files.error.write_text("no such folder"); os._exit(2)\n', devices=1)


def test_a_childs_failure_ends_the_search_with_its_words(search, tmp_path):
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        search("\n    1 / 0 if rank == 1 else time.sleep(600)\n")
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize(("noticed", "failed"), [(0.0, 0.5), (0.3, 0.3)])
def test_a_rank_that_only_noticed_the_failure_does_not_make_it_out_of_memory(search, noticed, failed):
    body = f"""
    if rank == 0: time.sleep({noticed}); os._exit(78)
    time.sleep({failed}); raise ZeroDivisionError("on rank one")
"""
    with pytest.raises(RuntimeError, match="exit code 1:(.|\\n)*on rank one"):
        search(body)


def test_a_session_that_ends_before_its_first_probe_says_nothing_about_memory(search):
    body = """
    if batch > 20: os._exit(77)
    shares = [{"held": 0.2, "step": 0.2 + batch / 100}]
"""
    with pytest.raises(RuntimeError, match="exit code -9"):
        search(body, devices=1, before="if any(not p.fits for p in probes): os.kill(os.getpid(), 9)")


ONE_NODE, SECOND_OF_TWO = (Cluster("none", nodes, 2, 0, None, "127.0.0.1", None) for nodes in (1, 2))


@pytest.mark.parametrize(
    ("codes", "cluster", "attempt", "memory"),
    [
        ([77, 78], ONE_NODE, 8, True),
        ([-9, 78], ONE_NODE, 8, True),
        ([78, 78], ONE_NODE, 8, False),
        ([78, 1], ONE_NODE, 8, False),
        ([78, 78], SECOND_OF_TWO, 8, True),
        ([78, 79], SECOND_OF_TWO, 8, False),
        ([79, 1], SECOND_OF_TWO, 8, False),
        ([78, 78], SECOND_OF_TWO, None, False),
        ([77, 78], ONE_NODE, None, False),
    ],
)
def test_what_counts_as_out_of_memory(codes, cluster, attempt, memory, tmp_path):
    files = sessions.SessionFiles(tmp_path)
    files.log.write_text("the log")
    codes = sorted(codes, key=sessions.tells_most)
    plan = SimpleNamespace(cluster=cluster, accelerator="cpu")
    if memory:
        return sessions._check(codes, {"attempt": attempt}, files, plan)
    with pytest.raises(RuntimeError, match="the log"):
        sessions._check(codes, {"attempt": attempt}, files, plan)


def test_sigterm_in_the_middle_leaves_no_process_and_no_file(tmp_path):
    driver = tmp_path / "driver.py"
    child = tmp_path / "child.py"
    child.write_text(CHILD.replace("    BODY\n", "\n    time.sleep(600)\n").replace("BEFORE\n", "\n"))
    session_folders = tmp_path / "temporary"
    session_folders.mkdir()
    driver.write_text(
        f"import sys, os, tempfile; sys.path.insert(0, {str(SRC)!r}); tempfile.tempdir = {str(session_folders)!r}\n"
        f"from pathlib import Path; sys.path.insert(0, {str(Path(__file__).parents[2] / 'harness')!r})\n"
        "from lockstep.batch_size.sessions import find_largest\nfrom memory_runs import planned\n"
        f"find_largest(planned(['trainer=ddp_sim'], Path({str(tmp_path)!r})), dict(os.environ), "
        f"[sys.executable, {str(child)!r}, {str(SRC)!r}, {str(tmp_path)!r}])\n"
    )
    process = subprocess.Popen([sys.executable, str(driver)])
    deadline = time.monotonic() + 30
    while len(pids(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids(tmp_path)) == 2 and list(session_folders.iterdir())
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))
    assert list(session_folders.iterdir()) == []


def test_signal_handlers_are_given_back(search):
    before = signal.getsignal(signal.SIGTERM)
    search('\n    shares = [{"step": batch / 600}]\n', devices=1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_record_is_plain_json(search):
    fields = search('\n    shares = [{"held": 0.1, "step": 0.1 + batch / 500}]\n', devices=1).record()
    assert json.loads(json.dumps(fields)) == fields
    assert fields["prediction_error"] == pytest.approx(0, abs=1e-5) and sessions.EXIT_OUT_OF_MEMORY == 77
