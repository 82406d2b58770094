"""Starts and watches the ranks of one node: their environment, their lives, their signals, their exit codes.

The supervisor imports no torch. Each rank dies with it, it ends survivors when one rank fails, and where ranks
die without a word it completes the run record in their place.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.distributed.cluster import PLAN_FILE, SUPERVISOR_LINE, SUPERVISOR_PID, Cluster
from lockstep.distributed.failures import RankError, complete_record, sentence_of
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR
from lockstep.runs.files import utc_now
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import read_record, update_record
from lockstep.runs.signals import INTERRUPTED_AT_ONCE, asked

log = logging.getLogger(__name__)

POLL_S = 0.05
GRACE_AFTER_FAILURE_S = 8.0  # for the others to notice by themselves and write their stacks
GRACE_AFTER_STOP_S = 100.0  # for a coordinated checkpoint and its upload after SIGTERM
GRACE_AFTER_PEER_STOPPED_S = 25.0  # for the others once one rank has stopped by itself
SILENT_BEYOND_TIMEOUT_S = 10.0  # the ranks themselves notice first who is silent, if any of them still can
STOPPED = (EXIT_INTERRUPTED, -signal.SIGTERM, 128 + signal.SIGTERM)  # exit codes of ranks that SIGTERM ended
PR_SET_PDEATHSIG = 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """In a rank: get this signal when the supervisor is gone, however it went (Linux; elsewhere a no-op)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(EXIT_FAILED)


@dataclass
class Ranks:
    """The processes of this node's ranks, in local order."""

    processes: list[subprocess.Popen]
    exit_codes: dict[int, int] = field(default_factory=dict)
    first_failed: int | None = None

    def poll(self) -> bool:
        """Collect who has ended; True while anyone lives."""
        for local_rank, process in enumerate(self.processes):
            if local_rank not in self.exit_codes and process.poll() is not None:
                self.exit_codes[local_rank] = process.returncode
                if process.returncode not in (EXIT_OK, EXIT_INTERRUPTED) and self.first_failed is None:
                    self.first_failed = local_rank
        return len(self.exit_codes) < len(self.processes)

    def signal(self, number: int) -> None:
        for local_rank, process in enumerate(self.processes):
            if local_rank not in self.exit_codes:
                process.send_signal(number)


class Heartbeats:
    """What the ranks' watching threads say to their supervisor: a rank that is stopped, or hangs in C, says nothing.

    Each rank inherits the end of a line of its own, which no other process can reach.
    """

    def __init__(self) -> None:
        self.lines: dict[int, socket.socket] = {}  # by global rank
        self.silent_s: dict[int, float] = {}  # of each rank that has ever been heard
        self.phases: dict[int, str] = {}

    def line_for(self, rank: int) -> socket.socket:
        """The end that the rank is to inherit; the caller closes its own copy."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        self.lines[rank] = ours
        return theirs

    def listen(self, passed_s: float) -> None:
        """Call often; time in which this process itself was stopped does not count."""
        for rank in self.silent_s:
            self.silent_s[rank] += min(passed_s, 1.0)
        for rank, line in self.lines.items():
            with contextlib.suppress(OSError):
                while phase := line.recv(64):
                    self.silent_s[rank], self.phases[rank] = 0.0, phase.decode(errors="replace")

    def close(self) -> None:
        for line in self.lines.values():
            line.close()


class Supervisor:
    """One node's ranks from start to end.

    Args:
        command: how a rank is started, e.g. [python, src/train.py].
        timeout_s: a rank whose heartbeat stops for somewhat longer is ended.
        start: starts one process with (command, environment, stdout, descriptors that it inherits); tests give
            their own.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: RunFolder,
        command: list[str],
        environment: dict[str, str],
        start: Callable[..., Any] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.cluster, self.folder, self.command = cluster, folder, command
        self.environment = environment
        self.start = start or self._popen
        self.ended_at_once = False
        self.stop_asked_at: float | None = None
        self.ranks, self.heartbeats = Ranks([]), Heartbeats()
        self.silent_after_s = timeout_s + SILENT_BEYOND_TIMEOUT_S
        self.hung: RankError | None = None

    def run(self) -> int:
        """Start every rank, wait for all; returns the node's exit code. Nothing of it lives afterwards."""
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup means it
        }
        for path in self.folder.path.glob("error-rank*.json"):  # an earlier start's, perhaps of more ranks
            path.unlink(missing_ok=True)  # another node may share the folder
        if asked:  # since the run began
            self._on_signal(asked.pop(), None)
        try:
            port = self.cluster.master_port or free_port()
            for local_rank in range(self.cluster.devices):
                if self.stop_asked_at is None:
                    self.ranks.processes.append(self._start_rank(local_rank, port))
            if self.stop_asked_at is not None:
                self.ranks.signal(signal.SIGTERM)
            self._watch()
        finally:
            self.ranks.signal(signal.SIGKILL)
            for process in self.ranks.processes:
                process.wait()
            self.heartbeats.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        self.ranks.poll()
        return self._conclude()

    def _start_rank(self, local_rank: int, port: int) -> Any:
        rank = self.cluster.node_rank * self.cluster.devices + local_rank
        output = None if local_rank == 0 else self.folder.path / f"rank{rank}.log"
        with self.heartbeats.line_for(rank) as line:
            environment = {
                **self.environment,
                **self.cluster.rank_environment(local_rank, port),
                PLAN_FILE: str(self.folder.plan(self.cluster.node_rank)),
                SUPERVISOR_PID: str(os.getpid()),
                SUPERVISOR_LINE: str(line.fileno()),
            }
            return self.start(self.command, environment, output, (line.fileno(),))

    @staticmethod
    def _popen(
        command: list[str], environment: dict[str, str], output: Path | None, inherits: tuple[int, ...]
    ) -> subprocess.Popen:
        own: dict[str, Any] = {"stdin": subprocess.DEVNULL, "process_group": 0, "pass_fds": inherits}
        if output is None:
            return subprocess.Popen(command, env=environment, **own)
        with output.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, **own)

    def _watch(self) -> None:
        """Until all ranks have ended, or their time is up."""
        deadline, before = None, time.monotonic()
        while self.ranks.poll():
            now = time.monotonic()
            self.heartbeats.listen(now - before)
            before = now
            self._end_the_hung()
            if self.stop_asked_at is None and EXIT_INTERRUPTED in self.ranks.exit_codes.values():
                self.stop_asked_at = now - GRACE_AFTER_STOP_S + GRACE_AFTER_PEER_STOPPED_S
                self.ranks.signal(signal.SIGTERM)
            if self.ranks.first_failed is not None and deadline is None:
                deadline = now + GRACE_AFTER_FAILURE_S
            stopped_at = self.stop_asked_at
            if stopped_at is not None and now > stopped_at + GRACE_AFTER_STOP_S:
                return
            if deadline is not None and now > deadline - GRACE_AFTER_FAILURE_S / 2 and not self._stacks_asked():
                self.ranks.signal(signal.SIGUSR2)
            if deadline is not None and now > deadline:
                return
            time.sleep(POLL_S)

    def _end_the_hung(self) -> None:
        for rank, silent_s in self.heartbeats.silent_s.items():
            local_rank = rank - self.cluster.node_rank * self.cluster.devices
            lives = 0 <= local_rank < len(self.ranks.processes) and local_rank not in self.ranks.exit_codes
            if lives and silent_s > self.silent_after_s and self.hung is None:
                message = f"no heartbeat for {silent_s:.0f} s: stopped, or hanging outside Python; killed"
                self.hung = self._silent_death(rank, message)
                self.ranks.processes[local_rank].send_signal(signal.SIGKILL)

    _asked = False

    def _stacks_asked(self) -> bool:
        asked, self._asked = self._asked, True
        return asked

    def _on_signal(self, number: int, _frame: Any) -> None:
        """The first asks every rank to save and stop; a second Ctrl-C ends them at once."""
        self.ended_at_once = self.ended_at_once or (number == signal.SIGINT and signal.SIGINT in asked)
        asked.append(number)
        if self.stop_asked_at is None:
            self.stop_asked_at = time.monotonic()
        self.ranks.signal(signal.SIGKILL if self.ended_at_once else signal.SIGTERM)

    def _conclude(self) -> int:
        """The exit code of the node, the record completed, the first error last on the screen."""
        codes = self._codes()
        if not codes or self.ended_at_once:
            self._record_interruption()
            return INTERRUPTED_AT_ONCE if self.ended_at_once else EXIT_INTERRUPTED
        error = None if all(code == EXIT_OK for code in codes.values()) else self._first_error()
        if error is None:
            return EXIT_OK
        if EXIT_INTERRUPTED in codes.values() and self.ranks.first_failed is None:
            self._record_interruption()
            return EXIT_INTERRUPTED
        user_error = error.get("kind") == "UserError"
        code = EXIT_USER_ERROR if user_error else max((c for c in codes.values() if c > 0), default=EXIT_FAILED)
        code = EXIT_FAILED if code == EXIT_INTERRUPTED else code
        if self.cluster.node_rank == 0:
            complete_record(self.folder, error, code)
        log.error(sentence_of(error))
        return code

    def _codes(self) -> dict[int, int]:
        """Exit codes; a rank that our SIGTERM ended before it could handle it was interrupted, it did not fail."""
        codes = dict(self.ranks.exit_codes)
        if self.stop_asked_at is not None and all(code in STOPPED for code in codes.values()):
            self.ranks.first_failed = None
            codes = dict.fromkeys(codes, EXIT_INTERRUPTED)
        return codes

    def _record_interruption(self) -> None:
        """Ranks that were stopped before they could write it themselves."""
        path = self.folder.record
        if self.cluster.node_rank == 0 and path.exists() and read_record(path).status == "running":
            with update_record(path) as record:
                record.status, record.exit_code, record.finished_at = "interrupted", EXIT_INTERRUPTED, utc_now()

    def _first_error(self) -> RankError:
        """What the rank that failed first wrote, or how it died where it wrote nothing."""
        if self.hung is not None:
            return self.hung
        written = []
        for path in self.folder.path.glob("error-rank*.json"):
            try:
                written.append(json.loads(path.read_text()))
            except (OSError, json.JSONDecodeError):
                log.warning(f"{path} cannot be read; going by the exit codes.")
        local = self.ranks.first_failed
        if local is not None and self.ranks.exit_codes[local] < 0:
            rank = self.cluster.node_rank * self.cluster.devices + local
            died = min((e["time"] for e in written), default=None)
            cause = signal.Signals(-self.ranks.exit_codes[local]).name
            if died is None or self.ranks.exit_codes[local] == -signal.SIGKILL:
                return self._silent_death(rank, f"killed by {cause}")
        if written:
            return min(written, key=lambda e: e["time"])
        rank = self.cluster.node_rank * self.cluster.devices + (local or 0)
        if self.stop_asked_at is not None and local is None:
            return self._silent_death(rank, f"did not stop within {GRACE_AFTER_STOP_S:.0f} s of the signal, killed")
        return self._silent_death(rank, f"ended with exit code {self.ranks.exit_codes.get(local or 0)}")

    def _silent_death(self, rank: int, message: str) -> RankError:
        phase = (read_record(self.folder.record).phase if self.folder.record.exists() else None) or "start"
        return {
            "rank": rank, "host": socket.gethostname(), "phase": phase, "message": message, "kind": "killed",
            "time": time.time(),
        }  # fmt: skip
