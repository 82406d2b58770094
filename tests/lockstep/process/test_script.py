"""What a script prints, what ends it, and the signals that ask a run to stop, each in a process of
its own.
"""

import errno
import io
import logging
import signal
import subprocess
import sys

import pytest

from lockstep.process.errors import Interrupted, UserError
from lockstep.process.output import Console, configure_logging, print_result
from lockstep.process.script import exit_code_of
from ranks import SRC

log = logging.getLogger("lockstep.storage.fetch")


def failing(error):
    def task():
        raise error

    return task


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("give a file."), 2, "error: give a file.\n"),
        (
            OSError(errno.EACCES, "not so", "/mnt/x"),
            2,
            "error: /mnt/x cannot be written or read: not so.\n",
        ),
        (
            OSError(errno.EROFS, "not so", "/mnt/x"),
            2,
            "error: /mnt/x cannot be written or read: not so.\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(error, code, said, capsys):
    assert exit_code_of(failing(error)) == code and capsys.readouterr().err == said


def test_a_task_has_its_exit_code():
    assert exit_code_of(lambda: None) == 0 and exit_code_of(lambda: 3) == 3
    for error in (ZeroDivisionError(), OSError(errno.EACCES, "Permission denied")):
        with pytest.raises(type(error)):
            exit_code_of(failing(error))


def test_a_name_cannot_steer_the_terminal(capsys):
    text = "\x1b[2J\x1b]0;t\x07 100 %\rdone\x08 \u202egnp.exe \x9b31m two\nlines\tand a tab · ü →"
    shown = "\\x1b[2J\\x1b]0;t\\x07 100 %\\rdone\\x08 \\u202egnp.exe \\x9b31m two\nlines\tand a tab · ü →"
    log.warning(f"left out {text}")
    print_result(text)
    said = capsys.readouterr()
    assert said.err == f"warning: left out {shown}\n" and said.out == f"{shown}\n"


def test_what_the_stream_cannot_write_does_not_silence_it(monkeypatch):
    """An ASCII terminal, and a file name that is no UTF-8: print() and the log go on."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", newline="")
    monkeypatch.setattr(sys, "stdout", stream)
    configure_logging()
    log.info("café \udce9 →")
    print("afterwards")
    stream.flush()
    assert stream.buffer.getvalue() == b"caf\\xe9 \\udce9 \\u2192\nafterwards\n"


def test_a_wrong_log_call_ends_nothing(capsys):
    # pytest's own handler raises.
    alone = logging.Logger("alone")
    alone.addHandler(Console())
    alone.warning("loss %d", "high")
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError:
        alone.exception("a bad image")
    said = capsys.readouterr().err
    assert "error: a bad image\nTraceback" in said and "ZeroDivisionError: by zero" in said


def test_a_result_that_finds_no_room_is_no_success():
    code = (
        "import sys\nfrom lockstep.process.output import print_result\n"
        "from lockstep.process.script import exit_code_of\n"
        "sys.exit(exit_code_of(lambda: print_result('table')))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and "no room" in done.stderr


def test_a_reader_that_has_enough_ends_nothing():
    code = "from lockstep.process.output import print_result\nfor _ in range(2000): print_result('x' * 1000)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"x" * 1000 + b"\n"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(30) == 0


SIGNALS = {
    "the first interrupts and the next is remembered": (
        "signals.install_stop_handler(signals.interrupt)\nfor name in ('SIGTERM', 'SIGINT', 'SIGUSR1', 'SIGHUP'):\n"
        "    signals.received.clear()\n    try:\n        kill(signal.Signals[name])\n    except Interrupted as error:\n"
        "        print(error)\n    kill(signal.SIGTERM)\n    print(len(signals.received))",
        (0, "SIGTERM 2 SIGINT 2 SIGUSR1 2 SIGHUP 2"),
    ),
    "a second Ctrl-C ends the process at once": (
        "signals.install_stop_handler(signals.record_signal); signals.set_force_exit_action(lambda: print('last', flush=True)); kill(2)\n"
        "print('first', flush=True); kill(2); print('never')",
        (130, "first last"),
    ),
    "what nohup ignores stays ignored": (
        "signal.signal(1, signal.SIG_IGN); signals.install_stop_handler(signals.interrupt); kill(1); print(signals.received)",
        (0, "[]"),
    ),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_signals(name):
    body, wanted = SIGNALS[name]
    text = f"import os, signal, sys; sys.path.insert(0, {str(SRC)!r})\nfrom lockstep.process import signals\n"
    text += "from lockstep.process.errors import Interrupted\nsignal.signal(2, signal.default_int_handler)\n"
    text += "def kill(number): os.kill(os.getpid(), number)\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", text + body], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, " ".join(done.stdout.split())) == wanted, done.stderr


def test_a_rank_that_another_one_stopped_ends_as_by_sigterm():
    def stop():
        raise Interrupted("another rank was asked to stop")

    assert exit_code_of(stop) == 128 + signal.SIGTERM


WINDOWS = """
import ctypes.util, multiprocessing, runpy, subprocess, sys, tempfile, urllib.request
sys.modules |= dict.fromkeys(("fcntl", "resource"))
sys.platform = "win32"
sys.argv = [sys.argv[1], "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", ["train.py", "doctor.py", "lockstep/commands/entry_point.py"])
def test_windows_is_refused_in_one_sentence(script):
    command = [sys.executable, "-c", WINDOWS, str(SRC / script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: Lockstep needs Linux: on Windows install and start it in WSL.\n"
