"""Pieces of the campaign that are ordinary tests: their files, run by pytest, one row for each."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from campaign import Row, Task, piece

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = {
    "attacks": ("tests/test_attacks.py", "attack corpus", "no canary fired, nothing outside, each error names the key"),
    "secrets": ("tests/test_secrets.py", "13 secret canaries", "none in files, events, pages, objects, processes"),
    "listening": ("tests/test_listening.py", "what listens", "loopback only"),
    "install": ("tests/test_install.py", "`make install` with a package of another hash", "refused, with uv and pip"),
    "slurm": (
        "tests/test_slurm.py", "SLURM: node DOWN, a killed task, time limit, scancel, requeue",
        "the same run goes on, in one record",
    ),
}  # fmt: skip


def run_file(task: Task, name: str) -> list[Row]:
    """One row for a test file; a skipped test is said, not counted."""
    file, what, seen = FILES[name]
    report = task.folder / "report.xml"
    options = ["-q", "-m", "slow or not slow", "--junitxml", str(report), "-p", "no:cacheprovider"]
    subprocess.run([sys.executable, "-m", "pytest", file, *options], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    skipped = [case.get("name", "") for case in cases if case.find("skipped") is not None]
    wrong = [str(c.get("name")) for c in cases if c.find("failure") is not None or c.find("error") is not None]
    words = seen + (f"; {len(skipped)} skipped here" if skipped else "")
    return [Row(name, f"{what} ({file})", len(cases) - len(skipped), words, float(suite.get("time", 0)), wrong)]


def register(name: str) -> None:
    piece(name, 1)(lambda task: run_file(task, name))


for each in FILES:
    register(each)
