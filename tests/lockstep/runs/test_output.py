"""What a run prints."""

import io
import logging
import subprocess
import sys

import pytest

from lockstep.runs.output import printable, say, set_up

log = logging.getLogger("lockstep.storage.fetch")


@pytest.mark.parametrize(
    "text, shown",
    [
        ("\x1b[2J\x1b]0;title\x07gone", "\\x1b[2J\\x1b]0;title\\x07gone"),
        ("100 %\rdone\x08", "100 %\\rdone\\x08"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x9b31m", "\\x9b31m"),
        ("two\nlines\tand a tab · ü →", "two\nlines\tand a tab · ü →"),
    ],
    ids=["escape", "return", "right to left", "8-bit escape", "plain"],
)
def test_a_name_cannot_steer_the_terminal(text, shown, capsys):
    assert printable(text) == shown
    log.warning(f"left out {text}")
    say(text)
    said = capsys.readouterr()
    assert said.err == f"warning: left out {shown}\n" and said.out == f"{shown}\n"


@pytest.mark.parametrize(
    "encoding, shown", [("ascii", "caf\\xe9 \\udce9 \\u2192"), ("utf-8", "café \\udce9 →")], ids=["ascii", "utf-8"]
)
def test_what_the_stream_cannot_write_does_not_silence_it(encoding, shown, monkeypatch):
    """An ASCII terminal, and a file name that is no UTF-8: print() and the log go on."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", newline="")
    monkeypatch.setattr(sys, "stdout", stream)
    set_up()
    log.info("café \udce9 →")
    print("café \udce9 →")
    log.info("afterwards")
    stream.flush()
    assert stream.buffer.getvalue().decode(encoding) == f"{shown}\n{shown}\nafterwards\n"


def test_a_reader_that_has_enough_ends_nothing():
    code = "from lockstep.runs.output import say\nfor _ in range(2000): say('x' * 1000)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"x" * 1000 + b"\n"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(30) == 0
