"""Signals that ask a run to stop, each in a process of its own."""

import subprocess
import sys

import pytest

from ranks import SRC


def run(body):
    text = f"import os, signal, sys; sys.path.insert(0, {str(SRC)!r})\nfrom lockstep.runs import signals\n"
    text += "from lockstep.runs.errors import Interrupted\nsignal.signal(2, signal.default_int_handler)\n"
    text += "def kill(number): os.kill(os.getpid(), number)\n"
    return subprocess.run([sys.executable, "-S", "-c", text + body], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_the_first_signal_interrupts_and_the_next_is_remembered(name):
    done = run(
        f"signals.on_stop(signals.interrupt)\ntry:\n    kill(signal.{name})\nexcept Interrupted as error:\n"
        f"    print(error)\nkill(signal.SIGTERM)\nprint(signals.asked == [signal.{name}, signal.SIGTERM])"
    )
    assert done.stdout.split() == [name, "True"], done.stderr


def test_a_second_ctrl_c_ends_the_process_at_once():
    done = run("signals.on_stop(signals.note); signals.before_the_end(lambda: print('last', flush=True)); kill(2)\n"
               "print('first', flush=True); kill(2); print('never')")  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (130, ["first", "last"])


def test_what_nohup_ignores_stays_ignored():
    done = run("signal.signal(signal.SIGHUP, signal.SIG_IGN); signals.on_stop(signals.interrupt)\n"
               "kill(signal.SIGHUP); print(signals.asked)")  # fmt: skip
    assert done.stdout.strip() == "[]"
