"""Run a script: wrong input and a full disk give one sentence and an exit code.

Imports no torch.
"""

import errno
import functools
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.process.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USER_ERROR,
    CommandEnded,
    Interrupted,
    UserError,
    as_disk_full_error,
)
from lockstep.process.output import configure_logging

log = logging.getLogger(__name__)

# What `make install` installs: a script that misses one of them was started with another Python.
REQUIRED_PACKAGES = ("hydra", "omegaconf", "yaml", "torch", "lightning", "numpy", "PIL", "psutil")
FILE_ACCESS_ERRNOS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)


def script(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """Decorate a script's main function: its errors become one sentence and an exit code."""

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        configure_logging()
        return exit_code_of(lambda: main(argv))

    return run


def exit_code_of(task: Callable[[], int | None]) -> int:
    """Run the task; return its exit code, which is 0 if the task returns None."""
    try:
        return task() or EXIT_OK
    except CommandEnded as end:
        return end.exit_code
    except UserError as error:
        log.error(f"{error}")
        return EXIT_USER_ERROR
    except Interrupted as error:
        # A rank that stops because another one was asked to has no signal of its own.
        return 128 + signal.Signals.__members__.get(str(error), signal.SIGTERM)
    except KeyboardInterrupt:
        # Ctrl-C came before the run began.
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in REQUIRED_PACKAGES:
            raise
        log.error(
            f"{sys.executable} has no {error.name}: "
            f"make install, then .venv/bin/python {sys.argv[0]} …"
        )
        return EXIT_USER_ERROR
    except Exception as error:
        return _report_system_error(error)


def _report_system_error(error: Exception) -> int:
    """Log a full disk or a file that may not be touched, and return the exit code.

    Any other error is raised again.
    """
    disk_full_error = as_disk_full_error(error, Path.cwd())
    if disk_full_error:
        log.error(f"{disk_full_error}")
        return EXIT_FAILED
    if isinstance(error, OSError) and error.errno in FILE_ACCESS_ERRNOS and error.filename:
        log.error(f"{error.filename} cannot be written or read: {error.strerror}.")
        return EXIT_USER_ERROR
    raise error


def run_with_options(
    argv: list[str],
    description: str,
    defaults: Mapping[str, str | None],
    task: Callable[[dict[str, str]], int | None],
) -> int:
    """Hand the options key=value of a command line to a task, or print the script's help.

    Args:
        defaults: the default of each option; None marks one that must be given.
    """
    configure_logging()
    if not argv or "--help" in argv or "-h" in argv:
        print(description)
        return EXIT_OK
    return exit_code_of(lambda: task(_parse_options(argv, defaults)))


def is_true(options: Mapping[str, str], name: str) -> bool:
    """Return an option of run_with_options that is true or false; raise UserError otherwise."""
    value = options[name].lower()
    if value not in ("true", "false"):
        raise UserError(f"{name}={options[name]} must be true or false.")
    return value == "true"


def _parse_options(argv: list[str], defaults: Mapping[str, str | None]) -> dict[str, str]:
    """Return the value of each option; ~ is expanded."""
    usage = f"it takes {', '.join(f'{name}=' for name in defaults)}."
    options = dict(defaults)
    for argument in argv:
        key, sign, value = argument.partition("=")
        if not sign or key not in defaults:
            raise UserError(f"{argument!r} is not understood; {usage}")
        options[key] = str(Path(value).expanduser()) if value.startswith("~") else value

    for key, default in defaults.items():
        if default is None and not options[key]:
            raise UserError(f"{key}= is missing; {usage}")
    return {key: value or "" for key, value in options.items()}
