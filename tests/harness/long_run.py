"""A run of eight hours in small: twenty thousand steps, with S3, statistics and logbook on, must stay as it began."""

import functools
import statistics
import time

import psutil

from campaign import Clock, Row, Task, piece
from object_store import object_store
from runs import start_door
from signals import no_store
from store_campaign import log_steps

TENTHS = 10
WORDS = ["data=synthetic", "data.num_images=5600", "data.num_val=64", "data.image_size=8", "data.global_batch_size=8",
         "model=small_cnn", "trainer=cpu", "trainer.num_threads=1", "callbacks.checkpoints.every_minutes=0.05",
         "trainer.log_every_n_steps=50", "s3.last_interval_s=5", "s3.files_interval_s=5", "test=false",
         "callbacks=[default,spot]", "callbacks.spot.address=http://127.0.0.1:9"]  # fmt: skip


@piece("long-run", 20000, no_store)
def long_run(task: Task) -> list[Row]:
    clock, wrong, samples = Clock(), [], []
    with object_store(task.folder / "store") as store:
        stamps, bucket = task.folder / "steps.txt", store.new_bucket()
        started = start_door(
            "train", *WORDS, f"trainer.max_steps={task.count}", "trainer.max_epochs=100000", "run_id=long",
            f"s3.uri=s3://{bucket}/p", f"s3.endpoint_url={store.endpoint_url}", logs=task.folder / "logs",
            environment=store.environment(), before=functools.partial(log_steps, str(stamps)),
        )  # fmt: skip
        process = psutil.Process(started.process.pid)
        while started.process.is_alive():
            try:
                facts = process.memory_info().rss, process.num_fds(), process.num_threads(), time.time()
            except psutil.NoSuchProcess:
                break
            samples.append(facts)
            time.sleep(0.25)
        done = started.done(60)
        times = [float(line) for line in stamps.read_text().split()]
    if done.code != 0 or len(times) != task.count:
        wrong.append(f"exit code {done.code} after {len(times)} steps: {done.output[-400:]}")
        return [Row("long-run", "steps of a tiny net", 1, "it did not reach its end", clock.seconds, wrong)]
    first, last = times[len(times) // TENTHS], times[-len(times) // TENTHS]
    early = [s for s in samples if times[0] + 1 < s[3] < first]
    late = [s for s in samples if last < s[3] < times[-1]]
    rows: dict[str, tuple[float, float, float]] = {}
    for index, name, slack in ((0, "memory in MB", 0.10), (1, "file handles", 0.0), (2, "threads", 0.0)):
        a, b = (statistics.median(s[index] for s in part) for part in (early, late))
        rows[name] = (a / 1e6, b / 1e6, slack) if index == 0 else (a, b, slack)
    steps = [b - a for a, b in zip(times, times[1:])]
    tenth = len(steps) // TENTHS
    rows["median step in ms"] = (statistics.median(steps[:tenth]) * 1e3, statistics.median(steps[-tenth:]) * 1e3, 0.15)
    for name, (a, b, slack) in rows.items():
        if b > a * (1 + slack) + (1 if name in ("file handles", "threads") else 0):
            wrong.append(f"{name} grew from {a:.2f} to {b:.2f}")
    seen = "first tenth → last tenth: " + ", ".join(f"{name} {a:.4g} → {b:.4g}" for name, (a, b, _) in rows.items())
    done_words = f"{len(times)} steps of a tiny net with S3, statistics, spot polling and logbook on"
    return [Row("long-run", done_words, 1, seen, clock.seconds, wrong)]
