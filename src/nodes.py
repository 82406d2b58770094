"""Start one run on several hosts over ssh, its output merged here; all stop when one fails or on Ctrl-C.

    python src/nodes.py host0 host1 -- trainer=ddp data=cifar10

Each host needs the repository at the same path as here (or --dir) with `make install` done, and a key that lets
ssh in without a question. host0 is the master.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import argparse
import logging
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from lockstep.distributed.cluster import environment
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from lockstep.runs.folder import new_run_id
from lockstep.runs.output import printable, set_up
from lockstep.runs.provenance import REPOSITORY

log = logging.getLogger(__name__)

GRACE_AFTER_FAILURE_S = 30.0  # within which the other nodes notice by themselves, and say what they know
GRACE_AFTER_STOP_S = 120.0  # for the coordinated checkpoint and its upload
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=6"]


def run_id_for(overrides: list[str], environment: dict[str, str]) -> str | None:
    """RUN_ID for all hosts; None where resume=auto has nothing to go by, which train.py says in a sentence."""
    stated = {word.split("=", 1)[0]: word.split("=", 1)[1] for word in overrides if "=" in word}
    if stated.get("run_id") not in (None, "null"):
        return stated["run_id"]
    if stated.get("resume") not in (None, "null", "auto"):
        return stated["resume"]
    return environment.get("RUN_ID") or (None if stated.get("resume") == "auto" else new_run_id())


def command_for(rank: int, hosts: list[str], overrides: list[str], options: Any, run_id: str | None) -> list[str]:
    """The ssh command of one host.

    Its standard input controls it: the line `stop` asks the trainer to save and end, `kill` or a lost connection ends
    it at once.
    """
    folder = options.dir[rank] if len(options.dir) > 1 else options.dir[0]
    address = options.master_addr or hosts[0].split("@")[-1]
    settings = {
        "MASTER_ADDR": address, "MASTER_PORT": str(options.master_port), "NODE_RANK": str(rank),
        **({"RUN_ID": run_id} if run_id else {}), **dict(word.split("=", 1) for word in options.env),
    }  # fmt: skip
    train = ["env", *(f"{k}={v}" for k, v in settings.items()), ".venv/bin/python", f"src/{options.script}.py",
             f"trainer.num_nodes={len(hosts)}", *overrides]  # fmt: skip
    # The leash's own output is closed: sshd waits for everyone who holds the session's.
    script = (
        f"cd {shlex.quote(folder)} || exit 1; {shlex.join(train)} </dev/null & pid=$!; "
        'leash() { while read -r word; do case "$word" in stop) kill -TERM $pid;; kill) kill -KILL $pid;; esac; done; '
        "kill -TERM $pid; }; leash <&3 >/dev/null 2>&1 & leash=$!; "
        "wait $pid; code=$?; kill $leash 2>/dev/null; exit $code"
    )
    return [*options.ssh, hosts[rank], f"{{ {script}; }} 3<&0"]


class Host:
    """One host's process, its lines printed with the host's name before them."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.error: str | None = None
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.reader = threading.Thread(target=self._print, daemon=True)
        self.reader.start()

    def _print(self) -> None:
        for raw in self.process.stdout:
            line = raw.decode(errors="replace")
            self.error = line.rstrip() if line.startswith("error: ") else self.error
            print(f"[{self.name}] {printable(line)}", end="", flush=True)

    @property
    def code(self) -> int | None:
        """None while it runs; a process that a signal ended counts as failed."""
        code = self.process.poll()
        return EXIT_FAILED if code is not None and code < 0 else code

    def tell(self, word: str) -> None:
        """A line of its standard input."""
        try:
            self.process.stdin.write(f"{word}\n".encode())
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            if self.code is None:
                log.info(f"[{self.name}] cannot be told anything: the connection is gone.")


class Watching:
    """All hosts until they have ended; the first that fails, and the user, end the others."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts, self.asked = hosts, 0
        self.failed: Host | None = None

    def ask(self, *_: Any) -> None:
        self.asked += 1

    def run(self) -> int:
        """The first failure's exit code, else 75 where one was interrupted."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)
        stop_by, told, killed_at = None, 0, None
        while any(host.code is None for host in self.hosts):
            bad = [host for host in self.hosts if host.code not in (None, EXIT_OK, EXIT_INTERRUPTED)]
            self.failed = self.failed or next(iter(bad), None)
            now = time.monotonic()
            if stop_by is None and (self.asked or self.failed):
                stop_by = now + (GRACE_AFTER_STOP_S if self.asked else GRACE_AFTER_FAILURE_S)
            if self.asked and told == 0:
                told = self._tell("stop")
            if killed_at is None and stop_by is not None and (now > stop_by or self.asked > 1):
                killed_at, _ = now, self._tell("kill")
            if killed_at is not None and now > killed_at + 5:
                for host in self.hosts:
                    host.process.kill()
            time.sleep(0.1)
        for host in self.hosts:
            host.reader.join(5)
        return self._code()

    def _tell(self, word: str) -> int:
        for host in self.hosts:
            if host.code is None:
                host.tell(word)
        return 1

    def _code(self) -> int:
        codes = [host.code for host in self.hosts]
        bad = [host for host in self.hosts if host.code not in (EXIT_OK, EXIT_INTERRUPTED)]
        first = self.failed or next(iter(bad), None)
        if first is None:
            return EXIT_INTERRUPTED if EXIT_INTERRUPTED in codes else EXIT_OK
        if first.error:
            log.info(f"[{first.name}] {first.error}")  # last on the screen, whoever spoke after it
        return first.code or EXIT_FAILED


def main(argv: list[str]) -> int:
    set_up()
    at = argv.index("--") if "--" in argv else len(argv)
    argv, overrides = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="+", help="as ssh knows them; the first is the master")
    parser.add_argument("--dir", nargs="+", default=[str(REPOSITORY)], help="the repository there: one, or one a host")
    parser.add_argument("--master-addr", help="host0's address as the others reach it (default: its name)")
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument("--env", nargs="*", default=[], help="NAME=value, set on every host")
    scripts = ["train", "eval", "find_batch_size", "doctor"]
    parser.add_argument("--script", "--door", default="train", choices=scripts, help="--door: as it was called before")
    parser.add_argument("--ssh", type=shlex.split, default=SSH, help="the ssh command with its options")
    options = parser.parse_args(argv)
    if len(options.dir) not in (1, len(options.hosts)):
        parser.error(f"--dir has {len(options.dir)} folders for {len(options.hosts)} hosts: give one, or one for each")
    run_id = run_id_for(overrides, environment())
    names = options.hosts
    commands = [command_for(rank, names, overrides, options, run_id) for rank in range(len(names))]
    return Watching([Host(name, command) for name, command in zip(names, commands)]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
