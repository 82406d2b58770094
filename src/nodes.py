"""Start one run on several hosts over ssh and print their output; all stop if one fails, or on Ctrl-C.

    python src/nodes.py host0 host1 -- trainer=ddp data=cifar10

Each host needs the repository at the same path as here (or --dir), after `make install`, and ssh access by key. host0
is the master.
"""

import argparse
import contextlib
import logging
import math
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from lockstep.runs.environment import environment
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from lockstep.runs.folder import new_run_id
from lockstep.runs.output import printable, set_up
from lockstep.runs.provenance import REPOSITORY

log = logging.getLogger(__name__)

GRACE_AFTER_FAILURE_S = 30.0  # the other nodes notice by themselves and name the cause
GRACE_AFTER_STOP_S = 120.0  # for the coordinated checkpoint and its upload
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=6"]
# Standard input controls the trainer: `stop` asks it to save and end, `kill` and a lost connection end it. The reader's
# own output is closed, because sshd waits for every process that has the session's open.
REMOTE = (
    "{{ cd {folder} || exit 1; {train} </dev/null & pid=$!; "
    'control() {{ while read -r word; do case "$word" in stop) kill -TERM $pid;; kill) kill -KILL $pid;; esac; done; '
    "kill -TERM $pid; }}; control <&3 >/dev/null 2>&1 & control=$!; "
    "wait $pid; code=$?; kill $control 2>/dev/null; exit $code; }} 3<&0"
)


def run_id_for(overrides: list[str], environ: dict[str, str]) -> str | None:
    """Return RUN_ID for all hosts; None if resume=auto has no run id, which train.py reports."""
    values = dict(override.split("=", 1) for override in overrides if "=" in override)
    for value in (values.get("run_id"), values.get("resume"), environ.get("RUN_ID")):
        if value not in (None, "null", "auto"):
            return value
    if values.get("resume") == "auto":
        return None
    return new_run_id()


class Host:
    """One host's process, its lines printed with the host's name before them."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.error = ""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._print, daemon=True)
        self.reader.start()

    def _print(self) -> None:
        for raw in self.process.stdout or ():
            line = raw.decode(errors="replace")
            if line.startswith("error: "):
                self.error = line.rstrip()
            print(f"[{self.name}] {printable(line)}", end="", flush=True)

    def tell(self, word: str) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # the connection is gone
            self.process.stdin.write(f"{word}\n".encode())
            self.process.stdin.flush()


def watch(hosts: list[Host]) -> int:
    """Wait until all hosts have ended.

    Returns:
        The exit code of the first one that failed, else 75 if one was interrupted.
    """
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: asked.append(number))
    failed: list[Host] = []
    end = _End()
    while running := [host for host in hosts if host.process.poll() is None]:
        failed = failed or _failed(hosts)
        end.come_closer(running, len(asked), has_failed=bool(failed))
        time.sleep(0.1)

    for host in hosts:
        host.reader.join(5)
    failed = failed or _failed(hosts)
    if not failed:
        return max(host.process.returncode for host in hosts)
    first = failed[0]
    if first.error:
        # Repeat it as the last line on the screen.
        log.info(f"[{first.name}] {first.error}")
    return max(first.process.returncode, 0) or EXIT_FAILED


class _End:
    """The end of the hosts that still run: they are asked to stop, and killed after a grace."""

    def __init__(self) -> None:
        self.kill_at = math.inf

    def come_closer(self, running: list[Host], signals: int, *, has_failed: bool) -> None:
        """Do what is due.

        Args:
            signals: how many have come; the second one kills at once.
            has_failed: another host has.
        """
        now = time.monotonic()
        if math.isinf(self.kill_at) and signals:
            self.kill_at = now + GRACE_AFTER_STOP_S
            _tell_all(running, "stop")
        if math.isinf(self.kill_at) and has_failed:
            self.kill_at = now + GRACE_AFTER_FAILURE_S
        if signals > 1:
            self.kill_at = min(self.kill_at, now)
        if now >= self.kill_at:
            _kill(running, since_s=now - self.kill_at)


def _failed(hosts: list[Host]) -> list[Host]:
    fine = (None, EXIT_OK, EXIT_INTERRUPTED)
    return [host for host in hosts if host.process.returncode not in fine]


def _tell_all(hosts: list[Host], word: str) -> None:
    for host in hosts:
        host.tell(word)


def _kill(hosts: list[Host], since_s: float) -> None:
    """Kill the trainers; a few seconds later end the connections, which may hang."""
    _tell_all(hosts, "kill")
    if since_s > 5:
        for host in hosts:
            host.process.kill()


def main(argv: list[str]) -> int:
    set_up()
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hosts", nargs="+", help="as ssh knows them; the first is the master")
    parser.add_argument(
        "--dir",
        nargs="+",
        default=[str(REPOSITORY)],
        help="the repository there: one, or one a host",
    )
    parser.add_argument(
        "--master-addr", help="host0's address as the others reach it (default: its name)"
    )
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument(
        "--ssh", type=shlex.split, default=SSH, help="the ssh command with its options"
    )
    options: Any = parser.parse_args(argv[:at])
    overrides = argv[at + 1 :]
    run_id = run_id_for(overrides, environment())
    hosts = []
    for rank, name in enumerate(options.hosts):
        variables = [
            f"MASTER_ADDR={options.master_addr or options.hosts[0].split('@')[-1]}",
            f"MASTER_PORT={options.master_port}",
            f"NODE_RANK={rank}",
        ]
        if run_id:
            variables.append(f"RUN_ID={run_id}")
        train = ["env", *variables, ".venv/bin/python", "src/train.py"]
        train += [f"trainer.num_nodes={len(options.hosts)}", *overrides]
        folder = options.dir[min(rank, len(options.dir) - 1)]
        remote = REMOTE.format(folder=shlex.quote(folder), train=shlex.join(train))
        hosts.append(Host(name, [*options.ssh, name, remote]))
    return watch(hosts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
