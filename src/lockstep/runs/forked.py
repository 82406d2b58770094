"""Run scripts in processes that are forked from one that has imported torch. Imports no torch.

An import of torch, Lightning and what they bring takes longer than the few steps of such a run.
"""

import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.process import signals
from lockstep.process.environment import replace_variables
from lockstep.process.errors import EXIT_FAILED, EXIT_OK

# Only installed packages are imported, because the server does not know sys.path of this process.
PRELOADED_MODULES = [
    "torch.utils.tensorboard",
    "lightning.pytorch",
    "torchmetrics",
    "torchvision",
    "hydra",
    "omegaconf",
    "matplotlib.figure",
]


def run_forked(script: Path, overrides: list[str], environ: Mapping[str, str], output: Path) -> int:
    """Run a script until it or this process ends; return its exit code, negative for a signal.

    Args:
        environ: all variables of its environment.
        output: the file that gets what it prints.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    child = context.Process(target=run_script, args=(script, overrides, environ, output))
    # While the child starts, a signal is only recorded: an exception would leave the child alone.
    previous = signals.install_stop_handler(signals.record_signal)
    child.start()
    try:
        signals.install_stop_handler(signals.interrupt)
        signals.raise_if_received()
        child.join()
        return int(child.exitcode or 0)
    finally:
        child.terminate()
        child.join()
        signals.restore_handlers(previous)


def run_script(
    script: Path, overrides: list[str], environ: Mapping[str, str], output: Path
) -> None:
    """Run a script in this process as Python does, and end with its exit code."""
    replace_variables(environ)
    # The first method is Python's default. A child of a fork server has the method of the server,
    # and its loaders would start another server.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    with output.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = [str(script), *overrides]
    code: Any = EXIT_OK
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # multiprocessing would wait for the workers of loaders, which ignore SIGTERM.
    os._exit(code or EXIT_OK)
