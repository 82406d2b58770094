"""Start one run on several hosts over ssh, its output merged here; all stop when one fails or on Ctrl-C.

    python src/nodes.py host0 host1 -- trainer=ddp data=cifar10

Each host needs the repository at the same path as here (or --dir) with `make install` done, and a key that lets
ssh in without a question. host0 is the master.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from compose import REPOSITORY
from errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from run_files import new_run_id

GRACE_AFTER_FAILURE_S = 20.0
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=6"]


def command_for(rank: int, hosts: list[str], overrides: list[str], options: Any, run_id: str) -> list[str]:
    """The ssh command of one host: stays alive as long as its standard input, so that losing us ends it."""
    folder = options.dir[rank] if len(options.dir) > 1 else options.dir[0]
    address = options.master_addr or hosts[0].split("@")[-1]
    settings = {
        "MASTER_ADDR": address, "MASTER_PORT": str(options.master_port), "NODE_RANK": str(rank), "RUN_ID": run_id,
        **dict(word.split("=", 1) for word in options.env),
    }  # fmt: skip
    train = ["env", *(f"{k}={v}" for k, v in settings.items()), ".venv/bin/python", f"src/{options.door}.py",
             f"trainer.num_nodes={len(hosts)}", *overrides]  # fmt: skip
    # The remote shell hands a closed input (our end is gone) on as SIGTERM to the trainer.
    script = (
        f"cd {shlex.quote(folder)} && {{ {shlex.join(train)} & pid=$!; "
        "( while read -r line; do [ \"$line\" = stop ] && kill -TERM $pid; done; kill -TERM $pid ) 2>/dev/null <&3 & "
        "wait $pid; code=$?; [ $code -gt 128 ] && { wait $pid; code=$?; }; exit $code; } 3<&0"
    )
    return [*options.ssh, hosts[rank], script]


class Host:
    """One host's process, its lines printed with the host's name before them."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.reader = threading.Thread(target=self._print, daemon=True)
        self.reader.start()

    def _print(self) -> None:
        for line in self.process.stdout:
            print(f"[{self.name}] {line.decode(errors='replace')}", end="", flush=True)

    def stop(self) -> None:
        """Ask for a checkpoint and an end."""
        try:
            self.process.stdin.write(b"stop\n")
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            print(f"[{self.name}] cannot be told to stop: the connection is gone.")


def watch(hosts: list[Host]) -> int:
    """Wait for all; returns the run's exit code: the first failure's, else 75 where one was interrupted."""
    stopping_since: float | None = None
    asked = []

    def ask(*_: Any) -> None:
        asked.append(time.monotonic())

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    first_bad: int | None = None
    while any(host.process.poll() is None for host in hosts):
        codes = [host.process.poll() for host in hosts]
        bad = [code for code in codes if code not in (None, EXIT_OK, EXIT_INTERRUPTED)]
        first_bad = first_bad if first_bad is not None else (bad[0] if bad else None)
        if asked and stopping_since is None:
            stopping_since = time.monotonic()
            for host in hosts:
                host.stop()
        if first_bad is not None and stopping_since is None:
            stopping_since = time.monotonic()
        limit = 120.0 if asked else GRACE_AFTER_FAILURE_S
        if (stopping_since is not None and time.monotonic() - stopping_since > limit) or len(asked) > 1:
            for host in hosts:
                host.process.kill()
        time.sleep(0.1)
    for host in hosts:
        host.reader.join(5)
    codes = [host.process.returncode for host in hosts]
    failed = first_bad or next((code for code in codes if code not in (EXIT_OK, EXIT_INTERRUPTED)), None)
    if failed is not None:
        return failed if failed > 0 else EXIT_FAILED
    return EXIT_INTERRUPTED if EXIT_INTERRUPTED in codes else EXIT_OK


def main(argv: list[str]) -> int:
    if "--" not in argv:
        argv, overrides = argv, []
    else:
        at = argv.index("--")
        argv, overrides = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="+", help="as ssh knows them; the first is the master")
    parser.add_argument("--dir", nargs="+", default=[str(REPOSITORY)], help="the repository there; one, or one per host")
    parser.add_argument("--master-addr", help="host0's address as the others reach it (default: its name)")
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument("--env", nargs="*", default=[], help="NAME=value, set on every host")
    parser.add_argument("--door", default="train", choices=["train", "eval", "find_batch_size", "doctor"])
    parser.add_argument("--ssh", type=shlex.split, default=SSH, help="the ssh command with its options")
    options = parser.parse_args(argv)
    run_id = next((w.split("=", 1)[1] for w in overrides if w.startswith(("run_id=", "resume="))), None)
    run_id = new_run_id() if run_id in (None, "auto") else run_id
    hosts = [
        Host(name, command_for(rank, options.hosts, overrides, options, run_id))
        for rank, name in enumerate(options.hosts)
    ]
    return watch(hosts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
