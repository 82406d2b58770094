"""What a failed start has written → what failed, and the innermost line of the user's code. Imports no torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.runs.provenance import REPOSITORY

SRC = REPOSITORY / "src"
TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n((?:[ \t]+.*\n)+)(\S.*(?:\n(?!Traceback|error: )\S.*)?)")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
NULL_GPU = re.compile(r"nullgpu: .*")
OF_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>")
SCRIPTS = ("train.py", "rehearse.py")


@dataclass(frozen=True)
class Fault:
    """
    Args:
        message: the exception, in its own words.
        where: file:line in the user's code; None where nothing of it was running.
        rank: the first that failed.
    """

    message: str
    where: str | None
    rank: int = 0

    def sentence(self) -> str:
        return f"{self.where or 'no line of yours'} · rank {self.rank} · {self.message}"


def fault_in(texts: dict[int, str]) -> Fault | None:
    """The fault that names a line of the user's, else any; None where there is no traceback.

    Args:
        texts: what each rank has written.
    """
    found = []
    for rank, text in sorted(texts.items()):
        said = [line for line in NULL_GPU.findall(text) if "differ" in line or "collective" in line]
        for frames, message in TRACEBACK.findall(text):
            words = " ".join([message.strip(), *dict.fromkeys(said)])
            found.append(Fault(_short(words), users_line(FRAME.findall(frames)), rank))
    with_line = [fault for fault in found if fault.where]
    return next(iter(with_line or found), None)


def users_line(frames: list[tuple[str, str, str]]) -> str | None:
    """The innermost frame that is neither a library's nor the machinery's."""
    for path, line, _ in reversed(frames):
        if is_users(path):
            return f"{shown(path)}:{line}"
    return None


def is_users(path: str) -> bool:
    """A file of the user's: not of a library, not of lockstep/, no script."""
    if any(part in path for part in OF_LIBRARIES) or "/nullgpu/" in path:
        return False
    own = Path(path)
    return not (own.is_relative_to(SRC / "lockstep") or (own.parent == SRC and own.name in SCRIPTS))


def shown(path: str) -> str:
    """Relative to the repository where it lies in it."""
    own = Path(path)
    return str(own.relative_to(REPOSITORY)) if own.is_relative_to(REPOSITORY) else path


def _short(text: str, most: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} …"
