"""How a process ends that is asked to: before a run, in the middle of an import, and by a second Ctrl-C."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[3] / "src"
SCRIPT = """
import os, signal, sys, time
sys.path[:0] = [{src!r}, {folder!r}]
from lockstep.runs import signals
def kill(number, times=1):
    for _ in range(times):
        os.kill(os.getpid(), number)
class Stop(Exception): ...
{body}
print("went on")
"""


def run(body, folder):
    script = SCRIPT.format(src=str(SRC), folder=str(folder), body=body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_before_a_run_a_signal_ends_the_process_without_a_word(name, code, tmp_path):
    done = run(f"signals.end_on_signal()\nkill(signal.{name})", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_what_is_to_be_ignored_stays_ignored(tmp_path):
    done = run("signal.signal(2, signal.SIG_IGN); signals.end_on_signal(); kill(2)", tmp_path)
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_a_signal_that_was_remembered_is_raised_by_who_takes_over(tmp_path):
    body = """
signals.remember_signals(signal.SIGTERM)
kill(signal.SIGTERM)
try:
    signals.raise_on_signal(Stop, signal.SIGTERM)
except Stop as stop:
    print("raised", stop)
"""
    assert run(body, tmp_path).stdout == "raised SIGTERM\nwent on\n"


def test_in_an_import_it_is_raised_behind_the_import(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\n"
        "print('imported, comes again', signal.getitimer(signal.ITIMER_REAL)[1] > 0)\n"
    )
    body = """
signals.raise_on_signal(Stop, signal.SIGINT)
try:
    import slow
    time.sleep(90)
except Stop as stop:
    print("raised", stop)
"""
    began = time.monotonic()
    assert run(body, tmp_path).stdout == "imported, comes again True\nraised SIGINT\nwent on\n"
    assert time.monotonic() - began < 60


def test_who_takes_over_hears_of_it_and_nothing_is_raised_any_more(tmp_path):
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    body = """
signals.RETRY_S = 0.3
signals.raise_on_signal(Stop, signal.SIGINT)
import slow
print(signals.take_over())
time.sleep(0.6)
"""
    assert run(body, tmp_path).stdout == "SIGINT\nwent on\n"


@pytest.mark.parametrize("handlers", ["remember_signals(2)", "raise_on_signal(Stop, 2)"])
def test_a_second_ctrl_c_ends_at_once_after_the_last_words(handlers, tmp_path):
    body = f"""
signals.at_the_end(lambda: print("last words", flush=True))
signals.{handlers}
try:
    kill(signal.SIGINT)
except Stop:
    pass
kill(signal.SIGINT)
"""
    done = run(body, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "last words\n", "")


def test_a_script_takes_signals_before_it_imports_anything(tmp_path):
    for path in SRC.glob("*.py"):
        text = path.read_text()
        if "sys.argv[1:]" in text:
            first = text.index("end_on_signal()")
            assert first < text.index("import logging" if "import logging" in text else "import sys"), path
    assert signal.SIGINT == 2
