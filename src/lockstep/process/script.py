"""Run a script's task: wrong input and a full disk give one sentence and an exit code. Imports no torch."""

import errno
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.process.errors import EXIT_FAILED, EXIT_OK, EXIT_USER_ERROR, Interrupted, UserError, no_room
from lockstep.process.output import set_up

log = logging.getLogger(__name__)

INSTALLED = ("hydra", "omegaconf", "yaml", "torch", "lightning", "numpy", "PIL", "psutil")  # by make install
NOT_ALLOWED = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip


def exit_code_of(task: Callable[[], int | None]) -> int:
    """Run the task; return its exit code, 0 if it returns none."""
    try:
        return task() or EXIT_OK
    except UserError as error:
        log.error(f"{error}")
    except Interrupted as error:
        return 128 + signal.Signals[str(error)]
    except KeyboardInterrupt:  # before the run began
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in INSTALLED:
            raise
        log.error(f"{sys.executable} has no {error.name}: make install, then .venv/bin/python {sys.argv[0]} …")
    except Exception as error:
        if full := no_room(error, Path.cwd()):
            log.error(f"{full}")
            return EXIT_FAILED
        if not (isinstance(error, OSError) and error.errno in NOT_ALLOWED and error.filename):
            raise
        log.error(f"{error.filename} cannot be written or read: {error.strerror}.")
    return EXIT_USER_ERROR


def run_with_options(
    argv: list[str], doc: str, known: Mapping[str, str | None], task: Callable[[dict[str, str]], int | None]
) -> int:
    """Hand the options key=value of a command line to a task, or print the script's help; return the exit code.

    `known` has the default of each option; None marks one that must be given.
    """
    set_up()
    if not argv or "--help" in argv or "-h" in argv:
        print(doc)
        return EXIT_OK

    def run() -> int | None:
        takes, given = f"it takes {', '.join(f'{name}=' for name in known)}.", dict(known)
        for word in argv:
            key, sign, value = word.partition("=")
            if not sign or key not in known:
                raise UserError(f"{word!r} is not understood; {takes}")
            given[key] = str(Path(value).expanduser()) if value.startswith("~") else value
        for key, default in known.items():
            if default is None and not given[key]:
                raise UserError(f"{key}= is missing; {takes}")
        return task({key: value or "" for key, value in given.items()})

    return exit_code_of(run)
