"""S3 under fire: kills during uploads, an old process against a new one, a store away, refusing, losing or full."""

import functools
import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaign import Clock, Row, Task, piece
from faulty_proxy import FaultyProxy
from kill_hooks import Plan
from kills import planted
from lockstep.runs.record import read_json
from object_store import ObjectStore, object_store
from runs import run_door, start_door
from signals import no_store
from spot import best_in

# 20 MB a checkpoint: several parts
LARGE = [
    "data=synthetic", "data.num_images=640", "data.num_val=128", "data.image_size=32", "data.global_batch_size=64",
    "model=small_cnn", "trainer=cpu", "trainer.num_threads=1", "test=false", "callbacks.checkpoints.every_minutes=0",
    "trainer.log_every_n_steps=4", "s3.last_interval_s=0.5", "s3.files_interval_s=1", "~callbacks.hardware",
]  # fmt: skip


def unfinished(store: ObjectStore, bucket: str) -> int:
    return len(store.client().list_multipart_uploads(Bucket=bucket).get("Uploads", []))


def orphans(store: ObjectStore, bucket: str, run_id: str) -> list[str]:
    """Checkpoints that no pointer and no predecessor of a pointer names."""
    named = set()
    for pointer in best_in(store, bucket, run_id).values():
        named |= {pointer["key"], (pointer.get("previous") or {}).get("key")}
    listed = store.client().list_objects_v2(Bucket=bucket, Prefix=f"p/{run_id}/checkpoints/").get("Contents", [])
    return [entry["Key"] for entry in listed if entry["Key"] not in named]


@piece("upload-kills", 50, no_store)
def upload_kills(task: Task) -> list[Row]:
    clock, wrong, pointers, found_parts = Clock(), [], 0, 0
    with object_store(task.folder / "store") as store:
        killed = run_number = 0
        while killed < task.count and not task.over():
            name, bucket = f"run{run_number}", store.new_bucket()
            run_number += 1
            words = [*LARGE, f"s3.uri=s3://{bucket}/p", f"s3.endpoint_url={store.endpoint_url}", f"run_id={name}"]
            options: dict[str, Any] = {"logs": task.folder / name, "environment": store.environment()}
            for start in range(1, 7):
                marks = task.folder / f"{name}-marks"
                event = task.chance.randrange(600)
                plan = Plan(str(marks), start, "upload", event, 0, "self") if start < 6 else Plan(str(marks), start)
                done = run_door("train", *words, "resume=auto", "trainer.max_epochs=6", before=planted(plan), **options)
                if done.code == -signal.SIGKILL:
                    killed += 1
                    found_parts += unfinished(store, bucket)
                    pointers += len(best_in(store, bucket, name))  # raises where one names damaged bytes
                elif done.code != 0:
                    wrong.append(f"{name}, start {start}: exit code {done.code}: {done.output[-400:]}")
                    break
                else:
                    break
            end = best_in(store, bucket, name)
            best = read_json(done.folder.record)["best_checkpoint"]
            if end.get("best", {}).get("sha256") != best["sha256"]:
                wrong.append(f"{name}: best.json names another checkpoint than the record")
            if unfinished(store, bucket) or orphans(store, bucket, name):
                wrong.append(f"{name}: left {unfinished(store, bucket)} uploads, {orphans(store, bucket, name)}")
            if run_number % 3 == 0:
                task.say(f"{killed} kills, {len(wrong)} wrong")
    seen = (
        f"after every kill what best.json and last.json named was whole by its sha256 ({pointers} objects read back); "
        f"{found_parts} broken-off multipart uploads and all orphans gone after the next start; "
        f"{run_number} runs ended with their best in the bucket"
    )
    return [
        Row("upload-kills", "kill -9 during an upload of 20 MB, then `resume=auto`", killed, seen, clock.seconds, wrong)
    ]


@piece("pointer-races", 200, no_store)
def pointer_races(task: Task) -> list[Row]:
    """An old start of a run that moves best.json while a new one takes over."""
    from lockstep.storage.run_bucket import Superseded

    clock, wrong, before, refused = Clock(), [], dict(os.environ), 0
    races = 0
    with object_store(task.folder / "store") as store:
        os.environ.update(store.environment())
        try:
            address = f"s3://{store.new_bucket()}/p"
            for number in itertools.takewhile(lambda _: not task.over(), range(task.count)):
                races = number + 1
                run_id, outcomes = f"race{number}", {}
                begin = functools.partial(_begin, address, store.endpoint_url, run_id)
                old = begin()
                _entry(old, 10)
                pauses = [task.chance.uniform(0, 0.05) for _ in range(2)]

                def go(name: str, run_of: Callable[[], Any], pause: float, outcomes: dict[str, Any] = outcomes) -> None:
                    time.sleep(pause)
                    run = run_of()
                    for step in (20, 30, 40):
                        try:
                            outcomes[name] = _entry(run, step)
                        except Superseded:
                            outcomes[name] = "superseded"
                            return

                threads = [
                    threading.Thread(target=go, args=("old", lambda old=old: old, pauses[0])),
                    threading.Thread(target=go, args=("new", begin, pauses[1])),
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                pointer = old.read_pointer("best")[0]
                refused += outcomes.get("old") == "superseded"
                if pointer is None or pointer.generation != old.generation + 1 or pointer.step != 40:
                    wrong.append(f"race {number}: {pointer}, {outcomes}")
                elif (
                    store.client().head_object(Bucket=address.split("/")[2], Key=pointer.key)["ContentLength"]
                    != pointer.bytes
                ):
                    wrong.append(f"race {number}: the named object has other bytes")
        finally:
            os.environ.clear()
            os.environ.update(before)
    seen = f"the pointer is the newer start's, at its last step, of a whole object; the old was refused {refused} times"
    what = "an old start of a run and a new one move best.json at once"
    return [Row("pointer-races", what, races, seen, clock.seconds, wrong)]


def _begin(address: str, endpoint_url: str, run_id: str) -> Any:
    from lockstep.storage.bucket import open_store
    from lockstep.storage.run_bucket import RunBucket

    run = RunBucket(open_store({"uri": address, "endpoint_url": endpoint_url}), run_id)
    run.prepare()
    return run


def _entry(run: Any, step: int) -> Any:
    key = run.checkpoint_key("best", step, f"{step:08x}" + "ab" * 32)
    stored = run.store.put(key, f"{run.generation} {step}".encode())
    return run.move("best", stored, step=step, epoch=step // 10, metric={"val/acc": step / 100}).step


def log_steps(path: str) -> None:
    """Writes the wall clock after every optimizer step."""
    from lockstep.callbacks.training_log import TrainingLog

    original = TrainingLog.on_train_batch_end
    file = open(path, "w", buffering=1)  # noqa: SIM115 as long as the process

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        file.write(f"{time.time()}\n")
        return original(self, *arguments, **options)

    TrainingLog.on_train_batch_end = wrapped


def step_seconds(path: Path, begin: float, end: float) -> list[float]:
    stamps = [float(line) for line in path.read_text().split()]
    return [b - a for a, b in zip(stamps, stamps[1:]) if begin <= a < end]


def folder_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.exists() else 0


@piece("store-faults", 60, no_store)
def store_faults(task: Task) -> list[Row]:
    """The store is away ten times `count` seconds, answers 503 or loses and delays for `count`; then it is well."""
    rows = []
    for mode, words, seconds in (
        ("away", "gone", 10 * task.count),
        ("503", "answering 503", task.count),
        ("lossy", "breaking off 30 % of its connections, slow", task.count),
    ):
        clock, wrong = Clock(), []
        with object_store(task.folder / f"store-{mode}") as store, FaultyProxy(store.ports[0], task.seed) as proxy:
            bucket, logs, stamps = store.new_bucket(), task.folder / mode, task.folder / f"{mode}.txt"
            started = start_door(
                "train", *LARGE, f"s3.uri=s3://{bucket}/p", f"s3.endpoint_url={proxy.endpoint_url}", "run_id=r",
                "trainer.max_epochs=100000", logs=logs, environment=store.environment(),
                before=functools.partial(log_steps, str(stamps)),
            )  # fmt: skip
            started.wait_for(lambda b=bucket, s=store: best_in(s, b, "r").get("best"))
            well_from = time.time()
            time.sleep(max(10.0, task.count / 3))
            ill_from = time.time()
            proxy.be(mode)
            outbox = logs / "train/runs/r/upload"
            largest = 0
            while time.time() < ill_from + seconds:
                largest = max(largest, folder_bytes(outbox))
                time.sleep(0.2)
            well_again = time.time()
            proxy.be("pass")
            time.sleep(5)
            os.kill(started.process.pid, signal.SIGTERM)
            done = started.done(200)
            well, ill = (step_seconds(stamps, a, b) for a, b in ((well_from, ill_from), (ill_from, well_again)))
            slower = statistics.median(ill) / statistics.median(well) - 1
            best, named = done.record["best_checkpoint"], best_in(store, bucket, "r").get("best", {})
            arrived = named.get("sha256") == best["sha256"]
            said = (done.record.get("upload") or {}).get("error")
            if done.code != 75 or not (arrived or said):
                wrong.append(
                    f"exit code {done.code}, best arrived {arrived}, record says {said!r}: {done.output[-300:]}"
                )
            if slower > 0.05:
                wrong.append(f"median step {slower:+.1%}")
            if largest > 8 * best["bytes"]:
                wrong.append(f"the outbox held {largest / 1e6:.0f} MB of checkpoints of {best['bytes'] / 1e6:.0f} MB")
            seen = (
                f"median step {slower:+.1%} ({len(ill)} steps); "
                f"{'the best arrived afterwards' if arrived else 'the record says that the best is not there'}; "
                f"the outbox held at most {largest / best['bytes']:.1f} checkpoints"
            )
            rows.append(Row("store-faults", f"S3 {words} for {seconds} s", 1, seen, clock.seconds, wrong))
            task.say(f"{mode}: {seen} {wrong}")
    return [*rows, full(task)]


def full(task: Task) -> Row:
    """No room in the store: exit code 3, and a sentence in the record."""
    clock, wrong = Clock(), []
    with object_store(task.folder / "store-full", max_volumes=1) as store:
        bucket, other = store.new_bucket(), store.new_bucket()
        store.client().put_object(Bucket=other, Key="takes-the-only-volume", Body=b"x" * 100_000)
        words = [*LARGE, "trainer.max_epochs=2", f"s3.uri=s3://{bucket}/p", f"s3.endpoint_url={store.endpoint_url}",
                 "s3.required=false", "s3.flush_timeout_s=5", "run_id=r"]  # fmt: skip
        done = run_door("train", *words, logs=task.folder / "full", environment=store.environment())
        error = (done.record.get("upload") or {}).get("error")
        if done.code != 3 or not error:
            wrong.append(f"exit code {done.code}, record says {error!r}: {done.output[-300:]}")
    seen = f"exit code {done.code}; the record says: {error}"
    return Row("store-faults", "S3 full", 1, seen, clock.seconds, wrong)
