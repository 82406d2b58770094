"""Ctrl-C at any moment of a run: exit code 130 or 75, no traceback, and resume= goes on from
there.
"""

import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from faults import BEFORE_A_GROUP, signal_at_step, stop_before_group
from lockstep.records.folder import RunFolder
from lockstep.records.record import read_record
from ranks import SRC
from runs import run_script

WORDS = ["experiment=quickstart", "trainer.max_epochs=1000", "trainer.num_threads=1", "run_id=r"]


def start(logs, *words, **options):
    paths = [
        f"paths.{name}_dir={logs}{place}"
        for name, place in (("log", ""), ("data", "/data"), ("logbook", "/book"))
    ]
    return psutil.Popen([sys.executable, str(SRC / "train.py"), *WORDS, *words, *paths],
                        stdout=subprocess.DEVNULL, preexec_fn=default_signals, **options)  # fmt: skip


def default_signals():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & makes it ignored


def interrupt(after_s, logs, *words, number=signal.SIGINT):
    """Tell a run to stop after so many seconds; return its exit code, stderr and folder."""
    process = start(logs, *words, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    process.send_signal(number)
    _, errors = process.communicate(timeout=110)
    return process.returncode, errors, RunFolder(logs / "train/runs/r")


def check(code, errors, folder):
    """Check that the exit code says whether anything was saved."""
    if not folder.path.exists() and ("KeyboardInterrupt" in errors or code == -signal.SIGINT):
        return  # Python's own handler, before the run began
    assert code in (75, 130) and errors == "", (code, errors)
    assert any(folder.checkpoints.glob("last*.json")) == (code == 75)
    if folder.record_path.exists():
        assert read_record(folder.record_path).status == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after_s", "words"),
    [(0.2, []), (6.0, []), (2.0, ["trainer=ddp_sim"]), (9.0, ["trainer=ddp_sim"])],
)
def test_ctrl_c_at_any_moment_and_the_run_goes_on(after_s, words, tmp_path):
    code, errors, folder = interrupt(after_s, tmp_path, *words)
    check(code, errors, folder)
    if code == 75 and not words:
        steps = read_record(folder.record_path).steps
        done = run_script("train", "resume=r", f"trainer.max_steps={steps + 3}", logs=tmp_path)
        assert done.code == 0 and done.record["steps"] == steps + 3, done.output


def test_sigterm_before_the_run_begins(tmp_path):
    code, errors, folder = interrupt(0.25, tmp_path, number=signal.SIGTERM)
    assert (code, errors, folder.path.exists()) == (-signal.SIGTERM, "", False)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_validation_waits_for_no_loader_worker(number, tmp_path):
    """The training's loader is still open then, and nobody closes it."""
    process = start(tmp_path, "data.path=loader", "data.num_workers=1", "data.eval_batch_size=1")
    until = time.monotonic() + 100
    while len(process.children()) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(number)
    workers = process.children()
    assert process.wait(30) == 75
    _, alive = psutil.wait_procs(workers, 10)
    assert not alive


def twice(step):
    signal_at_step(step, number=signal.SIGINT)
    signal_at_step(step, number=signal.SIGINT)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path):
    done = run_script("train", *WORDS, logs=tmp_path, before=partial(twice, 5))
    assert done.code == 130 and "Traceback" not in done.output, done.output
    assert done.record["status"] == "interrupted" and not list(
        done.folder.checkpoints.glob("*.json")
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", BEFORE_A_GROUP)
@pytest.mark.parametrize("whole", [True, False])
def test_a_stop_between_two_process_groups_ends_all_ranks(place, whole, tmp_path):
    """Without an agreement rank 0 waits in torch until the agent kills it after 30 or 100 s."""
    trainer = ["trainer=ddp_sim"]
    if place == "mesh":
        trainer = ["trainer=fsdp_sim", "trainer.strategy.shard_within_node=true"]
    flag = tmp_path / "stopped"
    fault = partial(stop_before_group, place, flag, whole=whole)
    done = run_script("train", *WORDS, *trainer, logs=tmp_path, before=fault)
    assert done.code == 75 and "Traceback" not in done.output, done.output
    assert done.record["status"] == "interrupted"
    assert time.time() - flag.stat().st_mtime < 20, done.output
