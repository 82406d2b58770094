"""EC2's metadata service, played with its oddities, while a run of two ranks trains and uploads."""

import http.server
import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from campaign import Clock, Row, Task, piece, spread
from kills import DDP, TINY
from lockstep.runs.record import read_json
from object_store import ObjectStore, object_store
from runs import run_door, start_door
from signals import no_store

LIMIT_S = 90.0
LONG = [*DDP, *TINY, "trainer.max_epochs=100000", "callbacks=[default,spot]", "callbacks.spot.interval_s=0.5"]


@dataclass
class Service:
    """
    Args:
        odd: how it answers before the notice: none, expiry (a token counts for two requests), 401, 404, 500, hangs,
            garbage, slow.
        notice: set once the instance is to be taken.
    """

    odd: str
    notice: threading.Event = field(default_factory=threading.Event)
    odd_until: float = 0.0
    uses: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> "Service":
        service = self

        class Answer(http.server.BaseHTTPRequestHandler):
            def say(self, code: int, text: str = "") -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def is_odd(self) -> bool:
                if time.monotonic() > service.odd_until or service.odd in ("none", "expiry"):
                    return False
                if service.odd == "garbage":
                    self.wfile.write(b"\xff\x00 no HTTP at all\r\n\r\n")
                    self.close_connection = True
                elif service.odd in ("hangs", "slow"):
                    time.sleep(30 if service.odd == "hangs" else 1.5)
                    return service.odd == "hangs"
                else:
                    self.say(int(service.odd))
                return True

            def do_PUT(self) -> None:
                if not self.is_odd():
                    token = f"token-{len(service.uses)}"
                    service.uses[token] = 0
                    self.say(200, token)

            def do_GET(self) -> None:
                if self.is_odd():
                    return
                token = self.headers.get("X-aws-ec2-metadata-token", "")
                service.uses[token] = service.uses.get(token, 99) + 1
                if service.uses[token] > (2 if service.odd == "expiry" else 10**9):
                    return self.say(401)
                if service.notice.is_set():
                    return self.say(200, '{"action": "terminate", "time": "2026-01-01T00:00:00Z"}')
                self.say(404)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # a client that no longer waits

        self.server = Server(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


def clock_off() -> None:
    """Rank 0's wall clock is ten minutes fast."""
    real = time.time
    time.time = lambda: real() + (600 if os.environ.get("RANK") == "0" else 0)


def best_in(store: ObjectStore, bucket: str, run_id: str) -> dict[str, dict[str, Any]]:
    """What the pointers of a run name, each checked against the object's bytes."""
    import hashlib

    client, found = store.client(), {}
    for kind in ("best", "last"):
        key = f"p/{run_id}/{kind}.json"
        if client.list_objects_v2(Bucket=bucket, Prefix=key).get("KeyCount"):
            pointer = json.loads(client.get_object(Bucket=bucket, Key=key)["Body"].read())
            data = client.get_object(Bucket=bucket, Key=pointer["key"])["Body"].read()
            assert hashlib.sha256(data).hexdigest() == pointer["sha256"], f"{key} names damaged bytes"
            found[kind] = pointer
    return found


ODDITIES = ("none", "expiry", "401", "404", "500", "hangs", "garbage", "slow", "clock ten minutes off")


@piece("spot", 2, no_store)
def spot(task: Task) -> list[Row]:
    """`count` times with each oddity: odd for some seconds, then the notice; saved and uploaded in time."""
    clock, wrong, took = Clock(), [], []
    with object_store(task.folder / "store") as store:
        for odd in ODDITIES:
            for number in range(task.count):
                name, bucket = f"{odd.replace(' ', '-')}-{number}", store.new_bucket()
                with Service("none" if " " in odd else odd) as service:
                    service.odd_until = time.monotonic() + 12
                    s3 = [f"s3.uri=s3://{bucket}/p", f"s3.endpoint_url={store.endpoint_url}", f"run_id={name}"]
                    started = start_door(
                        "train", *LONG, *s3, f"callbacks.spot.address={service.address}", logs=task.folder / name,
                        environment=store.environment(), before=clock_off if " " in odd else None,
                    )  # fmt: skip
                    started.wait_for(lambda n=name: any((task.folder / n).rglob("*.ckpt.json")))
                    while odd not in ("none", "expiry") and time.monotonic() < service.odd_until:
                        time.sleep(0.05)
                    time.sleep(task.chance.uniform(0.5, 3))
                    service.notice.set()
                    began = time.monotonic()
                    done = started.done(LIMIT_S + 30)
                took.append(round(time.monotonic() - began, 1))
                record = done.record
                pointers = best_in(store, bucket, name)
                step = max((p["step"] for p in pointers.values()), default=-1)
                if done.code != 75 or record["status"] != "interrupted" or took[-1] > LIMIT_S:
                    wrong.append(f"{odd}: exit code {done.code} after {took[-1]} s: {done.output[-400:]}")
                elif step != record["steps"]:
                    wrong.append(f"{odd}: stopped at step {record['steps']}, the bucket has {step}")
            task.say(f"{odd}: {len(wrong)} wrong so far")
    seen = (
        f"{task.count} times each: {', '.join(ODDITIES)}; saved at the step where it stopped, that step in the bucket, "
        f"all gone {spread(took)} s after the notice"
    )
    done_words = "a notice from a metadata service that was odd for 12 s before"
    rows = [Row("spot", done_words, len(took), seen, clock.seconds, wrong)]
    return [*rows, without_notice(task)]


def without_notice(task: Task) -> Row:
    """The machine goes without a word, or two seconds after the notice: at most one save interval is lost."""
    clock, wrong, lost, every = Clock(), [], [], 10
    words = [word for word in LONG if not word.startswith(("callbacks", "trainer.max_epochs"))]
    for late in (False, True) * task.count:
        name = f"unannounced-{len(lost)}"
        with Service("none") as service:
            logs = task.folder / name
            spot = ["callbacks=[default,spot]", f"callbacks.spot.address={service.address}"] if late else []
            endless = [*words, *spot, "trainer.max_epochs=100000", f"run_id={name}"]
            started = start_door("train", *endless, logs=logs)
            started.wait_for(lambda where=logs: any(where.rglob("*.ckpt.json")))
            time.sleep(task.chance.uniform(1, 4))
            if late:
                service.notice.set()
                time.sleep(0.1)
            for process in [psutil.Process(started.process.pid), *psutil.Process(started.process.pid).children()]:
                process.send_signal(signal.SIGKILL)
            started.process.join()
            service.notice.clear()  # it goes on on another machine
            record = next(logs.glob("train/runs/*/run.json"))
            reached = _steps_logged(record.parent)
            more = [f"run_id={name}", "resume=auto", f"trainer.max_epochs={reached // 10 + 2}"]
            again = run_door("train", *words, *spot, *more, logs=logs)
            resumed = read_json(record)["restarts"][-1]["resumed_step"]
            lost.append(max(0, reached - resumed))
            if again.code != 0 or lost[-1] > every:
                wrong.append(f"{name}: exit code {again.code}, {lost[-1]} steps lost: {again.output[-300:]}")
    seen = f"went on by resume=auto; {spread([float(n) for n in lost])} steps lost of the {every} between two saves"
    return Row("spot", "the machine gone without a notice, or 0.1 s after it", len(lost), seen, clock.seconds, wrong)


def _steps_logged(folder: Path) -> int:
    import csv

    with (folder / "metrics.csv").open(newline="") as file:
        return max((int(row["step"]) for row in csv.DictReader(file) if (row["step"] or "").isdigit()), default=0)
