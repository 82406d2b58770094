"""How a script ends: what it refuses, and a full disk, are one sentence and an exit code. Imports no torch."""

import errno
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, EXIT_USER_ERROR, UserError
from lockstep.runs.full_disk import no_room

log = logging.getLogger(__name__)

INSTALLED = ("hydra", "omegaconf", "yaml", "torch", "lightning", "numpy", "PIL", "psutil")  # by make install
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


def exit_code_of(task: Callable[[], int | None], *refusals: type[Exception]) -> int:
    """Do the task; its exit code, 0 where it has none.

    Args:
        refusals: errors beside UserError that the user can mend.
    """
    refused: tuple[type[Exception], ...] = (UserError, *refusals)
    try:
        return task() or EXIT_OK
    except refused as error:
        log.error(f"{error}")
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in INSTALLED:
            raise
        log.error(f"{sys.executable} has no {error.name}: make install, then .venv/bin/python {sys.argv[0]} …")
        return EXIT_USER_ERROR
    except Exception as error:
        if full := no_room(error, Path.cwd()):
            log.error(f"{full}")
            return EXIT_FAILED
        if isinstance(error, OSError) and error.errno in NOT_ALLOWED and error.filename is not None:
            log.error(f"{error.filename} cannot be written or read: {error.strerror}.")
            return EXIT_USER_ERROR
        raise
