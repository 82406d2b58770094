"""Where the main thread is (Python's `_current_frames`): in somebody's code, or in a library's, where ranks wait."""

import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from typing import NamedTuple

import lightning
import torch

INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
TORCH, LIGHTNING, LOCKSTEP = torch.__path__[0], lightning.__path__[0], str(Path(__file__).parents[1])
WAIT = (f"{TORCH}/", f"{LIGHTNING}/", f"{LOCKSTEP}/")
COMPUTE = (f"{TORCH}/utils/data/", f"{LOCKSTEP}/data/")  # images are read and decoded


class Place(NamedTuple):
    """Of a thread.

    `text`: own.py:12 in function, the innermost line that no library holds. `waits`: perhaps for other ranks.
    """

    text: str
    waits: bool


def place() -> Place:
    """Of the main thread at this moment."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    stack = [(inner.f_code.co_filename, line, inner.f_code.co_name) for inner, line in traceback.walk_stack(frame)]
    own = [entry for entry in stack if not entry[0].startswith((*INSTALLED, *WAIT))]
    file, line, name = (own or stack)[0]
    innermost = stack[0][0]
    return Place(
        f"{Path(file).name}:{line} in {name}", innermost.startswith(WAIT) and not innermost.startswith(COMPUTE)
    )
