"""Run a script (train, eval, …) as its own process, forked from a server that has torch and Lightning
imported.

    done = run_script("train", "data=synthetic", logs=tmp_path)     # done.code, done.output,
    done.folder

The process is as separate as one from the command line, but starts in 0.1 s instead of 5. The ranks
that torch's agent starts are forked from it too. Everything is written below `logs`.
"""

import importlib
import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.process import signals
from lockstep.records.folder import RunFolder
from ranks import SRC, new_process

TIMEOUT_S = 240.0  # also on a slow machine beside other tests
PATHS = [str(SRC), str(Path(__file__).parent)]


class ForkedRank:
    """Stands in for subprocess.Popen where torch's agent starts a rank, and where a sweep starts a
    job.
    """

    def __init__(
        self, args: Any, env: dict[str, str], stdout: Any = None, stderr: Any = None, **_: Any
    ) -> None:
        self.args, self.returncode = list(args), None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                    if signal.getsignal(number) != signal.SIG_IGN:
                        signal.signal(number, signal.SIG_DFL)
                signals.received.clear()
                os.environ.clear()
                os.environ.update(env)
                for number, file in ((1, stdout), (2, stderr)):
                    if file is not None:
                        os.dup2(file.fileno(), number)
                sys.argv = self.args[1:]
                if "hydra" in sys.modules:  # a sweep's own, inherited by the fork
                    from hydra.core.global_hydra import GlobalHydra

                    GlobalHydra.instance().clear()
                code = _run_main(Path(self.args[1]).stem, self.args[2:])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_job(command: list[str], **_: Any) -> int:
    """Stands in for sweep.run_child."""
    from lockstep.sweeps.stopping import running_jobs

    job = ForkedRank(command, dict(os.environ))
    running_jobs.add(job)
    try:
        return job.wait()
    finally:
        running_jobs.discard(job)


def _run_main(script: str, argv: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from lockstep.sweeps import jobs as sweep

    sweep.run_child = run_job
    subprocess_handler.Popen = ForkedRank
    return importlib.import_module(script).main(argv)


def _run_in_process(
    script: str, argv: list[str], environment: dict[str, str], output: str, before: Any
) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(os.dup(fd), "wb"), line_buffering=True) for fd in (1, 2)
    )
    sys.path[:0] = PATHS
    # The fork server's children would start workers of loaders in another way than a command does.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    os.environ.update(environment)
    warnings.simplefilter("error")
    # pytest-xdist's workers have a core each (tests/conftest.py).
    warnings.filterwarnings("ignore", "This DataLoader will create")
    sys.argv = [str(SRC / f"{script}.py"), *argv]
    code = 1
    try:
        if before is not None:
            before()
        code = _run_main(script, argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class FinishedScript:
    """How a script ended."""

    code: int
    output: str
    logs: Path
    path: Path | None

    @property
    def folder(self) -> RunFolder:
        """The run that this script has written."""
        assert self.path, self.output
        return RunFolder(self.path)

    @property
    def record(self) -> dict[str, Any]:
        return json.loads(self.folder.record_path.read_text())


class RunningScript:
    """A script that is running."""

    def __init__(
        self, script: str, argv: list[str], logs: Path, environment: dict[str, str], before: Any
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs, self.output = logs, logs / f"output-{script}-{time.monotonic_ns()}.txt"
        self.process: multiprocessing.Process = new_process(
            target=_run_in_process, args=(script, argv, environment, str(self.output), before)
        )
        self.process.start()

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, condition: Any, timeout_s: float | None = None) -> None:
        """Until condition() holds; fails with the output where the script ends or the time runs out
        first.
        """
        deadline = time.monotonic() + (timeout_s or TIMEOUT_S / 2)
        while not condition():
            assert self.process.is_alive() and time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def done(self, timeout_s: float | None = None) -> FinishedScript:
        timeout_s = timeout_s or TIMEOUT_S
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"did not end within {timeout_s} s:\n{self.text()}")
        records = sorted(self.logs.glob("*/*runs/**/run.json"), key=lambda p: p.stat().st_mtime)
        return FinishedScript(
            self.process.exitcode, self.text(), self.logs, records[-1].parent if records else None
        )


SMALL_DEFAULTS = {
    "data": "digits",
    "model": "small_cnn",
}  # where a test says neither: the defaults need GPUs


def with_small_defaults(script: str, argv: tuple[str, ...]) -> list[str]:
    """The words of a training with SMALL_DEFAULTS for what they leave open.

    An experiment, a run and a project of tests/projects leave nothing open.
    """
    named = {word.partition("=")[0] for word in argv}
    is_project = any(word.startswith("task._target_=projects.") for word in argv)
    if script not in ("train", "find_batch_size") or named & {"experiment", "resume"} or is_project:
        return list(argv)
    return [
        *(f"{group}={option}" for group, option in SMALL_DEFAULTS.items() if group not in named),
        *argv,
    ]


def start_script(
    script: str,
    *argv: str,
    logs: Path,
    environment: dict[str, str] | None = None,
    before: Callable | None = None,
) -> RunningScript:
    """Start a script with its paths below `logs`.

    Args:
        before: called in the script's process first; a fault from faults.py, as functools.partial.
    """
    paths = [
        f"paths.log_dir={logs}",
        f"paths.data_dir={logs / 'data'}",
        f"paths.logbook_dir={logs / 'logbook'}",
    ]
    if script in ("predict", "export"):
        paths = [f"log_dir={logs}"]
    return RunningScript(
        script, [*with_small_defaults(script, argv), *paths], logs, environment or {}, before
    )


def run_script(script: str, *argv: str, logs: Path, **options: Any) -> FinishedScript:
    return start_script(script, *argv, logs=logs, **options).done()


def succeed(script: str, *argv: str, logs: Path, **options: Any) -> FinishedScript:
    """Run a script that ends with exit code 0."""
    done = run_script(script, *argv, logs=logs, **options)
    assert done.code == 0, done.output
    return done
