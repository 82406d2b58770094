"""The rest of a copy of a bucket, fetched by a process of its own beside the training: copy_beside(copy, 100.0)."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from lockstep.runs.errors import UserError
from lockstep.runs.output import set_up
from lockstep.storage.local_copy import GIB, Copy, hold, log
from lockstep.storage.s3_options import S3Options

CALL = "import sys; sys.path.insert(0, sys.argv[1]); from lockstep.storage.copy_beside import main; main()"
SRC = str(Path(__file__).resolve().parents[2])
SMALL = 2**28  # bytes, which are here sooner than a process and the clients of loader workers have started
_started: list[subprocess.Popen] = []


def copy_beside(copy: Copy, limit_gib: float | None) -> bool:
    """Start it where something is missing and no other process of this node fetches; it ends with this one.

    Args:
        limit_gib: of the copy; None: most of what the disk has free. What has no room stays in the bucket.
    Returns:
        Whether everything is here already; what is small is waited for.
    """
    missing, whole = copy.missing_bytes(), copy.whole_bytes()
    if not missing:
        return True
    if missing <= SMALL and (limit_gib is None or whole <= limit_gib * GIB):
        copy.complete(limit_gib)
        return True
    with copy.lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process fetches
            return False
        _start(copy, limit_gib, lock.fileno())
    return False


def _start(copy: Copy, limit_gib: float | None, lock: int) -> None:
    """
    Args:
        lock: held by the process for as long as it lives.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CALL, SRC],
        stdin=subprocess.PIPE,
        pass_fds=[lock],
        start_new_session=True,  # Ctrl-C is for the run, with which this process ends
    )
    assert process.stdin is not None
    asked = [copy.uri, asdict(copy.options), copy.key, str(copy.folder), copy.files.name, limit_gib]
    process.stdin.write(f"{json.dumps(asked)}\n".encode())
    process.stdin.flush()
    _started.append(process)  # its standard input stays open until this process ends


def main() -> None:
    uri, options, key, folder, files, limit_gib = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    set_up()
    os.nice(10)
    copy = Copy(uri, S3Options(**options), key, Path(folder))
    if copy.reopen().name != files:  # the bucket has changed, and another run has listed it anew
        return
    hold(copy.files)
    try:
        with copy.explained():
            copy.take_what_fits(limit_gib)
    except (UserError, OSError) as error:
        log.warning(f"{error} What is not here is read from the bucket.")


def _end_with_the_parent() -> None:
    sys.stdin.read()
    os._exit(0)
