"""How a door ends its process: what Python promises at exit is done, taking apart torch object by object is not."""

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End with this exit code, like sys.exit.

    With Lightning imported the interpreter takes seconds, and a hundred megabytes, to free what the kernel frees at
    once. Threads that are no daemons are waited for, functions given to atexit run, output is flushed: as ever.
    """
    if "torch" not in sys.modules:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # ends idle executors, which a join would wait for for ever
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it is gone
            stream.flush()
    os._exit(code)
