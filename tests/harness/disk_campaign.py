"""A disk that is full, and checkpoints that are cut short or have one bit flipped, here and in S3."""

import contextlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaign import Clock, Row, Task, piece
from kills import DDP, TINY, differences, final_state, reference_of
from lockstep.runs.folder import RunFolder
from lockstep.storage.checkpoint_files import complete, newest_whole
from object_store import object_store
from runs import run_door, start_door
from signals import no_store

EPOCHS = "trainer.max_epochs=4"


def no_mounts() -> str | None:
    return None if os.geteuid() == 0 else "a small tmpfs needs root"


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> Path:
    """Take all that is left of a disk."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65536))
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0")
    return filler


@piece("disk-full", 10, no_mounts)
def disk_full(task: Task) -> list[Row]:
    reference = reference_of([*DDP, *TINY, EPOCHS], task.folder / "reference")
    return [_full_of(task, "checkpoints", reference), _full_of(task, "logs", reference), _no_temp(task, reference)]


def _full_of(task: Task, where: str, reference: Any) -> Row:
    """The disk fills up at a random moment; there is a checkpoint to go on from, a line says why, and it goes on."""
    clock, wrong, said = Clock(), [], set()
    for number in range(task.count):
        name = f"full-{where}-{number}"
        logs = task.folder / name / "logs"
        run = logs / "train/runs" / name
        disk = run / "checkpoints" if where == "checkpoints" else logs
        with small_disk(disk, 24) as mounted:
            started = start_door("train", *DDP, *TINY, "trainer.max_epochs=100000", f"run_id={name}", logs=logs)
            started.wait_for(lambda r=run: any(r.glob("checkpoints/*.ckpt.json")))
            time.sleep(task.chance.uniform(0, 1.5))
            filler = fill(mounted)
            with contextlib.suppress(AssertionError):
                started.process.join(90)
            alive = started.process.is_alive()
            done = started.done(1)
            output = started.text() if where == "checkpoints" else _said(done)
            filler.unlink()
            lines = [line for line in output.splitlines() if "no room on " in line]
            if alive or done.code in (0, 2):
                wrong.append(f"{where}: alive {alive}, exit code {done.code}: {output[-300:]}")
            if not lines:
                wrong.append(f"{where}: no line names the cause: {output[-300:]}")
            said.update(line.strip()[-120:] for line in lines[-1:])
            whole = newest_whole(run / "checkpoints")
            if whole is None:
                wrong.append(f"{where}: no whole checkpoint is left")
                continue
            step = int(whole.name.split("step")[1][:8])
            epochs = max(4, step // 10 + 1)
            again = run_door(
                "train", *DDP, *TINY, f"trainer.max_epochs={epochs}", f"run_id={name}", "resume=auto", logs=logs
            )
            if again.code != 0:
                wrong.append(f"{where}: going on ended with {again.code}: {again.output[-300:]}")
    words = "; ".join(sorted(said)[:2])
    seen = f"a whole checkpoint was left each time, `resume=auto` went on once there was room; said: {words}"
    return Row("disk-full", f"the disk of the {where} filled up in training", task.count, seen, clock.seconds, wrong)


def _said(done: Any) -> str:
    return done.output


def _no_temp(task: Task, reference: Any) -> Row:
    clock, wrong = Clock(), []
    for number in range(task.count):
        with small_disk(task.folder / f"temp-{number}", 1) as mounted:
            fill(mounted)
            done = run_door("train", *DDP, *TINY, EPOCHS, f"run_id=t{number}", logs=task.folder / f"temp-{number}-logs",
                            environment={"TMPDIR": str(mounted)})  # fmt: skip
            if done.code != 0 or differences(final_state(done.folder), reference.state):
                wrong.append(f"exit code {done.code}: {done.output[-300:]}")
    seen = "the run neither needs nor uses it: the same weights"
    return Row("disk-full", "no room in the temporary folder", task.count, seen, clock.seconds, wrong)


def damage(path: Path, chance: Any) -> str:
    """Cut a file short or flip one bit of it; says which."""
    size = path.stat().st_size
    if chance.random() < 0.4:
        with path.open("r+b") as file:
            file.truncate(chance.randrange(size))
        return "cut"
    position = chance.randrange(size)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))
    return "flipped"


@piece("damaged-checkpoints", 20)
def damaged(task: Task) -> list[Row]:
    """The newest checkpoint is passed over with a line, and the run ends with the weights of the one undisturbed."""
    rows = []
    for sharded, what in (
        ([], "`ddp_sim`, one file"),
        (["trainer=fsdp_sim", "trainer.sharded_checkpoint=true"], "shards"),
    ):
        words = [*DDP, *TINY, *sharded]
        clock, wrong, kinds = Clock(), [], []
        folder = task.folder / ("shards" if sharded else "file")
        reference = reference_of([*words, EPOCHS], folder)
        for number in itertools.takewhile(lambda _: not task.over(), range(task.count)):
            name, logs = f"damaged-{number}", folder / f"damaged-{number}"
            first = run_door("train", *words, EPOCHS, f"run_id={name}", logs=logs, before=_stop_midway)
            if first.code != 75:
                wrong.append(f"{name}: exit code {first.code}")
                continue
            newest = next(complete(first.folder.checkpoints))[0]
            inner = [p for p in sorted(newest.rglob("*")) if p.is_file()] if newest.is_dir() else [newest]
            kinds.append(damage(task.chance.choice(inner), task.chance))
            again = run_door("train", *words, EPOCHS, f"run_id={name}", "resume=auto", logs=logs)
            if again.code != 0 or again.output.count(f"Passed over {newest.name}") != 1:
                wrong.append(f"{name}: exit code {again.code}: {again.output[-400:]}")
            elif differences(final_state(again.folder), reference.state):
                wrong.append(f"{name}: other weights than undisturbed")
        seen = (
            f"{kinds.count('cut')} cut, {kinds.count('flipped')} with one bit flipped: each passed over in one line, "
            "the final weights equal to the last bit"
        )
        done = f"the newest checkpoint damaged, {what}"
        rows.append(Row("damaged-checkpoints", done, len(kinds), seen, clock.seconds, wrong))
    return [*rows, *([] if no_store() else [damaged_in_s3(task)])]


def _stop_midway() -> None:
    from faults import signal_at_step

    signal_at_step(27)


def damaged_in_s3(task: Task) -> Row:
    """A fresh machine has only the bucket, where the newest object was changed."""
    clock, wrong, count = Clock(), [], max(1, task.count // 4)
    with object_store(task.folder / "store") as store:
        for number in range(count):
            bucket, name = store.new_bucket(), f"far-{number}"
            words = [*DDP, *TINY, EPOCHS, f"s3.uri=s3://{bucket}/p", f"s3.endpoint_url={store.endpoint_url}",
                     f"run_id={name}", "s3.last_interval_s=0.1"]  # fmt: skip
            options: dict[str, Any] = {"environment": store.environment()}
            first = run_door("train", *words, logs=task.folder / name, before=_stop_midway, **options)
            pointer = json.loads(store.client().get_object(Bucket=bucket, Key=f"p/{name}/last.json")["Body"].read())
            local = task.folder / "object"
            found = store.client().get_object(Bucket=bucket, Key=pointer["key"])
            local.write_bytes(found["Body"].read())
            damage(local, task.chance)
            store.client().put_object(
                Bucket=bucket, Key=pointer["key"], Body=local.read_bytes(), Metadata=found["Metadata"]
            )
            again = run_door("train", *words, "resume=auto", logs=task.folder / f"{name}-fresh", **options)
            if first.code != 75 or again.code != 0 or "Passed over s3://" not in again.output:
                wrong.append(f"{name}: exit codes {first.code}, {again.code}: {again.output[-400:]}")
            elif RunFolder(again.folder.path).run_id != name:
                wrong.append(f"{name}: another run")
    seen = "passed over in one line; the run went on from an older one, on a machine that had nothing but the bucket"
    return Row("damaged-checkpoints", "the newest checkpoint in S3 damaged", count, seen, clock.seconds, wrong)
