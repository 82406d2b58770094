"""Faults on two hosts, each done to a run that trains across them: what was seen, and after how many seconds.

Used by tests/test_faults.py and benchmarks/faults.py.
"""

import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import Host, cut, mend, wait_until

TIMEOUT_S = 15
TRAIN = ["data=synthetic", "data.num_images=24000", "data.num_val=8000", "data.image_size=8", "data.eval_batch_size=16",
         "data.global_batch_size=64", "model=small_cnn", "trainer=ddp_sim", "trainer.devices=1", "trainer.num_nodes=2",
         "trainer.max_epochs=500", "trainer.num_threads=1", f"trainer.timeout_s={TIMEOUT_S}", "test=false",
         "callbacks.checkpoints.every_minutes=0", "trainer.log_every_n_steps=100"]  # fmt: skip
METADATA = """
import http.server, pathlib, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def say(self, code, text=""):
        self.send_response(code); self.send_header("Content-Length", str(len(text))); self.end_headers()
        self.wfile.write(text.encode())
    def do_PUT(self): self.say(200, "token")
    def do_GET(self):
        there = pathlib.Path(sys.argv[1]).exists() and self.headers.get("X-aws-ec2-metadata-token") == "token"
        self.say(200, '{"action": "terminate"}') if there else self.say(404)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", 1338), Answer).serve_forever()
"""


@dataclass
class Seen:
    """How a run ended after its fault."""

    fault: str
    done: str
    seconds: float  # from the fault until no process of the run was left on any host
    limit_s: float
    codes: list[int | None]
    last_lines: list[str]
    record: dict[str, Any] | None
    left_behind: list[int]
    checkpoints: list[str]

    def row(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        found["status"] = (self.record or {}).get("status")
        found["error"] = (self.record or {}).get("error")
        del found["record"]
        return found


class Run:
    """One run across both hosts, started with one command on each."""

    def __init__(self, hosts: tuple[Host, Host], name: str) -> None:
        self.hosts, self.name = hosts, name
        self.started: list[Any] = []

    def start(self, *words: str, ranks: tuple[int, ...] = (0, 1), ports: tuple[int, int] = (29500, 29500)) -> "Run":
        for rank in ranks:
            host = self.hosts[rank]
            command = [".venv/bin/python", "src/train.py", *TRAIN, f"run_id={self.name}", *words]
            self.started.append(
                host.start(command, self.name, MASTER_ADDR=self.hosts[0].address, MASTER_PORT=str(ports[rank]),
                           NODE_RANK=str(rank))
            )  # fmt: skip
        return self

    @property
    def path(self) -> Path:
        return self.hosts[0].project / "logs/train/runs" / self.name

    def record(self) -> dict[str, Any] | None:
        return json.loads((self.path / "run.json").read_text()) if (self.path / "run.json").exists() else None

    def wait_for_training(self) -> "Run":
        wait_until(lambda: any(self.path.glob("checkpoints/*.json")) or self._ended(), 120, "training")
        assert not self._ended(), self.said()
        return self

    def wait_for_validation(self) -> None:
        wait_until(lambda: (self.record() or {}).get("phase") == "validation", 60, "validation", every_s=0.005)

    def _ended(self) -> bool:
        return any(process.poll() is not None for process in self.started)

    def _alive(self) -> bool:
        """A process on its way into its host is found by no host yet."""
        return any(process.poll() is None for process in self.started)

    def _found(self) -> list[int]:
        return [pid for host in self.hosts for pid in host.pids_of(self.name)]

    def said(self) -> str:
        return "\n".join(f"--- {host.name}\n{host.output(self.name)}" for host in self.hosts)

    def pid(self, node: int, rank: bool) -> int:
        """Of the rank (a supervisor's child) or the supervisor of a node."""
        supervisor = self.started[node].pid
        if not rank:
            return supervisor
        [child] = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return int(child)

    def see(self, fault: str, done: str, act: Callable[[], Any], limit_s: float) -> Seen:
        """Do it and wait until nothing of the run is left."""
        began = time.monotonic()
        act()
        while (self._alive() or self._found()) and time.monotonic() < began + limit_s + 30:
            time.sleep(0.05)
        seconds = round(time.monotonic() - began, 1)
        left = self._found()
        for host in self.hosts:
            host.die_of(self.name)
        lines = [re.sub(r"\s+", " ", (host.output(self.name).strip().splitlines() or [""])[-1]) for host in self.hosts]
        return Seen(
            fault, done, seconds, limit_s, [process.wait(10) for process in self.started], lines, self.record(), left,
            sorted(path.name for path in self.path.glob("checkpoints/*.json")),
        )  # fmt: skip


def worker_killed(hosts) -> Seen:
    run = Run(hosts, "worker-killed").start().wait_for_training()
    return run.see("worker killed", "kill -9 of rank 1", lambda: os.kill(run.pid(1, True), signal.SIGKILL), 30)


def rank_zero_killed(hosts) -> Seen:
    run = Run(hosts, "rank-0-killed").start().wait_for_training()
    return run.see("rank 0 killed", "kill -9 of rank 0", lambda: os.kill(run.pid(0, True), signal.SIGKILL), 30)


def supervisor_killed(hosts) -> Seen:
    run = Run(hosts, "supervisor-killed").start().wait_for_training()
    act = lambda: os.kill(run.pid(1, False), signal.SIGKILL)  # noqa: E731
    return run.see("supervisor killed", "kill -9 of node 1's supervisor", act, 30)


def stopped(hosts) -> Seen:
    run = Run(hosts, "stopped").start().wait_for_training()
    act = lambda: os.kill(run.pid(1, True), signal.SIGSTOP)  # noqa: E731
    return run.see("process stopped", "SIGSTOP to rank 1", act, TIMEOUT_S + 30)


def rank_zero_stopped(hosts) -> Seen:
    run = Run(hosts, "rank-0-stopped").start().wait_for_training()
    act = lambda: os.kill(run.pid(0, True), signal.SIGSTOP)  # noqa: E731
    return run.see("rank 0 stopped", "SIGSTOP to rank 0", act, TIMEOUT_S + 30)


def cable_cut(hosts) -> Seen:
    run = Run(hosts, "cable-cut").start().wait_for_training()
    try:
        return run.see("cable cut for good", "node 1's interface down", lambda: cut(hosts[1]), TIMEOUT_S + 30)
    finally:
        mend(hosts[1])


def node_never_arrives(hosts) -> Seen:
    run = Run(hosts, "node-missing")
    return run.see("a node never arrives", "only node 0 started", lambda: run.start(ranks=(0,)), TIMEOUT_S + 30)


def wrong_port(hosts) -> Seen:
    run = Run(hosts, "wrong-port")
    act = lambda: run.start(ports=(29500, 29511))  # noqa: E731
    return run.see("wrong port", "MASTER_PORT=29511 on node 1", act, TIMEOUT_S + 30)


def different_code(hosts) -> Seen:
    run = Run(hosts, "different-code")
    changed = hosts[1].project / "src/lockstep/runs/errors.py"
    text = changed.read_text()
    changed.write_text(text + "# changed\n")
    try:
        return run.see("different code", "a line more in node 1's src", run.start, 30)
    finally:
        changed.write_text(text)


def sigterm_in_training(hosts) -> Seen:
    run = Run(hosts, "sigterm-training").start().wait_for_training()
    act = lambda: os.kill(run.pid(1, True), signal.SIGTERM)  # noqa: E731
    return run.see("SIGTERM in a training step", "SIGTERM to rank 1", act, 30)


def sigterm_in_validation(hosts) -> Seen:
    run = Run(hosts, "sigterm-validation").start().wait_for_training()
    run.wait_for_validation()
    act = lambda: os.kill(run.pid(1, True), signal.SIGTERM)  # noqa: E731
    return run.see("SIGTERM in validation", "SIGTERM to rank 1", act, 30)


def spot_notice(hosts) -> Seen:
    flag = hosts[1].home / "notice"
    service = hosts[1].start([".venv/bin/python", "-c", METADATA, str(flag)], "metadata")
    spot = ["callbacks=[default,spot]", "callbacks.spot.address=http://127.0.0.1:1338", "callbacks.spot.interval_s=1"]
    run = Run(hosts, "spot").start(*spot).wait_for_training()
    try:
        return run.see("spot notice on one node", "a notice from node 1's metadata service", flag.touch, 90)
    finally:
        service.kill()
        service.wait()


# What must be seen: exit codes, the record's status, whose error, and a word of it.
FAULTS: dict[Callable[[Any], Seen], dict[str, Any]] = {
    worker_killed: {"status": "failed", "rank": 1, "words": ("rank 1 on host1", "rank 1 on host1")},
    rank_zero_killed: {"status": "failed", "rank": 0, "words": ("rank 0 on host0", "rank 0 on")},
    supervisor_killed: {"status": "failed", "rank": 1, "words": ("rank 1 on host1", "")},
    stopped: {"status": "failed", "rank": 1, "words": ("rank 1 on host1", "rank 1 on host1")},
    rank_zero_stopped: {"status": "failed", "rank": 0, "words": ("rank 0 on host0", "rank 0 on")},
    cable_cut: {"status": "failed", "rank": 1, "words": ("rank 1 on host1", "rank 0 on")},
    node_never_arrives: {"status": None, "words": ("node rank 1 did not arrive",)},
    wrong_port: {"status": None, "words": ("node rank 1 did not arrive", "MASTER_PORT")},
    different_code: {"status": None, "words": ("node 1 (host1) runs with other code",) * 2},
    sigterm_in_training: {"status": "interrupted", "words": ("Interrupted", "")},
    sigterm_in_validation: {"status": "interrupted", "words": ("Interrupted", "")},
    spot_notice: {"status": "interrupted", "words": ("Interrupted", "")},
}


def faults_of(seen: Seen, wanted: dict[str, Any]) -> list[str]:
    """Everything that is not as it must be."""
    record = seen.record or {}
    expected = {"failed": {1, 137, -9}, "interrupted": {75}, None: {2}}[wanted["status"]]
    checks = {
        f"took longer than {seen.limit_s} s": seen.seconds <= seen.limit_s,
        f"left processes {seen.left_behind}": not seen.left_behind,
        f"exit codes {seen.codes}": all(code in expected for code in seen.codes),
        f"status {record.get('status')}": record.get("status") == wanted["status"],
        f"error {record.get('error')}": (record.get("error") or {}).get("rank") == wanted.get("rank"),
        "lost its checkpoints": wanted["status"] is None or bool(seen.checkpoints),
    }
    for line, words in zip(seen.last_lines, wanted["words"]):
        checks[f"last line {line!r} without {words!r}"] = words in line
    return [fault for fault, fine in checks.items() if not fine]
