"""Start one run on several hosts over ssh and print their output.

All stop if one fails, or on Ctrl-C.

    python src/nodes.py host0 host1 -- trainer=ddp data=cifar10

Each host needs the repository at the same path as here (or --dir), after `make install`, and ssh
access by key. host0 is the master.
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

from lockstep.process.environment import environment
from lockstep.process.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from lockstep.process.output import escape_unprintable
from lockstep.process.project import REPOSITORY
from lockstep.process.script import script
from lockstep.records.folder import new_run_id

log = logging.getLogger(__name__)

# The other nodes notice a failure by themselves and name the cause.
GRACE_AFTER_FAILURE_S = 30.0
# A stop takes the coordinated checkpoint and its upload.
GRACE_AFTER_STOP_S = 120.0
# After a `kill` that is not obeyed the connection hangs.
GRACE_AFTER_KILL_S = 5.0
POLL_INTERVAL_S = 0.1
GOOD_EXIT_CODES = (EXIT_OK, EXIT_INTERRUPTED)
SSH = [
    "ssh",
    "-o",
    "BatchMode=yes",
    "-o",
    "ServerAliveInterval=10",
    "-o",
    "ServerAliveCountMax=6",
]
# Run the arguments of the shell. Standard input controls the trainer: `stop` asks it to save and
# end, `kill` and a lost connection end it. The reader's own output is closed, because sshd waits
# for every process that has the session's open.
REMOTE_SCRIPT = """{
    "$@" </dev/null &
    pid=$!
    control() {
        while read -r word; do
            case "$word" in
                stop) kill -TERM $pid ;;
                kill) kill -KILL $pid ;;
            esac
        done
        kill -TERM $pid
    }
    control <&3 >/dev/null 2>&1 &
    control=$!
    wait $pid
    code=$?
    kill $control 2>/dev/null
    exit $code
} 3<&0"""


def choose_run_id(overrides: list[str], environ: dict[str, str]) -> str | None:
    """Return RUN_ID for all hosts; None if resume=auto has no run id, which train.py reports."""
    values = dict(word.split("=", 1) for word in overrides if "=" in word)
    candidates = (values.get("run_id"), values.get("resume"), environ.get("RUN_ID"))
    run_id = next((name for name in candidates if name not in (None, "null", "auto")), None)
    if run_id:
        return run_id
    if values.get("resume") == "auto":
        return None
    return new_run_id()


class Host:
    """One host's process, its lines printed with the host's name before them."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        # The last line of its output that begins with "error: ".
        self.error = ""
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                f"{command[0]} cannot be started ({error.strerror}): install ssh, or give --ssh "
                "another command."
            ) from None
        self.reader = threading.Thread(target=self._print_lines, daemon=True)
        self.reader.start()

    def _print_lines(self) -> None:
        for raw in self.process.stdout or ():
            line = raw.decode(errors="replace")
            if line.startswith("error: "):
                self.error = line.rstrip()
            print(f"[{self.name}] {escape_unprintable(line)}", end="", flush=True)

    def send(self, word: str) -> None:
        """Send a word to REMOTE_SCRIPT; nothing if the connection is gone."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{word}\n".encode())
            self.process.stdin.flush()

    def has_failed(self) -> bool:
        """Return whether the process has ended with an exit code of neither success nor a stop."""
        return (
            self.process.returncode is not None and self.process.returncode not in GOOD_EXIT_CODES
        )


def watch(hosts: list[Host]) -> int:
    """Wait until all hosts have ended.

    Returns:
        The exit code of the first failed one, else 75 if one was interrupted.
    """
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: signals.append(number))

    first_failed = _wait(hosts, signals)
    for host in hosts:
        host.reader.join(5)
    return _report_end(hosts, first_failed)


def _wait(hosts: list[Host], signals: list[int]) -> Host | None:
    """Wait until all hosts have ended; stop them after a signal or a failure.

    Args:
        signals: those that have come; a second one shortens the grace.

    Returns:
        The host that failed first, if one has failed while others ran.
    """
    first_failed = None
    is_stopping = False
    kill_at = math.inf
    while True:
        running = [host for host in hosts if host.process.poll() is None]
        if not running:
            return first_failed

        first_failed = first_failed or _find_failed_host(hosts)
        now = time.monotonic()
        if signals and not is_stopping:
            is_stopping = True
            _send_to_all(running, "stop")
            kill_at = min(kill_at, now + GRACE_AFTER_STOP_S)
        elif first_failed and kill_at == math.inf:
            kill_at = now + GRACE_AFTER_FAILURE_S
        if len(signals) > 1:
            kill_at = min(kill_at, now)
        if now >= kill_at:
            _kill(running, is_late=now > kill_at + GRACE_AFTER_KILL_S)
        time.sleep(POLL_INTERVAL_S)


def _find_failed_host(hosts: list[Host]) -> Host | None:
    return next((host for host in hosts if host.has_failed()), None)


def _kill(hosts: list[Host], is_late: bool) -> None:
    """End the trainers, and if that was asked for some time ago the connections too."""
    _send_to_all(hosts, "kill")
    if is_late:
        for host in hosts:
            host.process.kill()


def _send_to_all(hosts: list[Host], word: str) -> None:
    for host in hosts:
        host.send(word)


def _report_end(hosts: list[Host], first_failed: Host | None) -> int:
    """Repeat the error of the host that failed first, and return the exit code of the run."""
    failed = first_failed or _find_failed_host(hosts)
    if failed is None:
        return max(host.process.returncode for host in hosts)

    # The last line on the screen says why the run has ended.
    if failed.error:
        log.info(f"[{failed.name}] {failed.error}")
    return max(failed.process.returncode, 0) or EXIT_FAILED


@script
def main(argv: list[str]) -> int:
    """Start the run on all hosts, and return its exit code when all have ended."""
    separator = argv.index("--") if "--" in argv else len(argv)
    options = _build_parser().parse_args(argv[:separator])
    overrides = argv[separator + 1 :]

    run_id = choose_run_id(overrides, environment())
    hosts = []
    for rank, name in enumerate(options.hosts):
        remote = _build_remote_command(options, rank, run_id, overrides)
        hosts.append(Host(name, [*options.ssh, name, remote]))
    return watch(hosts)


def _build_parser() -> argparse.ArgumentParser:
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
    return parser


def _build_remote_command(options: Any, rank: int, run_id: str | None, overrides: list[str]) -> str:
    """Return the shell command that trains on the host of a node rank."""
    master = options.master_addr or options.hosts[0].split("@")[-1]
    variables = [
        f"MASTER_ADDR={master}",
        f"MASTER_PORT={options.master_port}",
        f"NODE_RANK={rank}",
    ]
    if run_id:
        variables.append(f"RUN_ID={run_id}")

    num_nodes = f"trainer.num_nodes={len(options.hosts)}"
    train = ["env", *variables, ".venv/bin/python", "src/train.py", num_nodes, *overrides]
    folder = options.dir[min(rank, len(options.dir) - 1)]
    return f"cd {shlex.quote(folder)} || exit 1\nset -- {shlex.join(train)}\n{REMOTE_SCRIPT}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
