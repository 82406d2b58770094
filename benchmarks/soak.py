"""Kill runs at random moments, and check that they end as an undisturbed run does.

    python benchmarks/soak.py                                   every piece; make soak
    python benchmarks/soak.py kills --count 60 --seed 2         make soak PIECE=kills COUNT=60
    SEED=2

Pieces, each with a count of signals:

- kills: SIGKILL of a rank or its parent, under ddp_sim and fsdp_sim in turn.
- sigterm: SIGTERM of the parent, under the same strategies.
- uploads: kills while checkpoints go to an S3 server; then a second machine starts a new run of the
  same id, which must be refused and change nothing in the bucket.
- jobscript: one job script as SLURM starts it again and again, up to twenty times a run, with an S3
  server, a module of the user's own and options with a plus; SIGKILL or SIGTERM at random.
- lines: SIGKILL at a random line of the code that writes metrics.csv, run.json and best.json.

A run must end with the weights of an undisturbed one, and leave no process behind. The last two
pieces also compare metrics.csv and run.json, and what lies in the bucket. Exit code 1 if anything
differs.
"""

import argparse
import csv
import hashlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests/harness")]

import runs  # noqa: E402
from faults import kill_at_line  # noqa: E402
from kills import DDP, FSDP, TINY, differences, final_state, run_with_signals  # noqa: E402
from lockstep.records.folder import RunFolder  # noqa: E402
from object_store import object_store  # noqa: E402
from runs import FinishedScript, run_script  # noqa: E402

SIGNALS_PER_RUN = 5
STARTS_OF_A_JOB = 20
RUN_TIMEOUT_S = 900.0
STRATEGIES = (DDP, FSDP)
# A user types this who has a module and a data module of the usual kind.
JOB = (
    "data=digits",
    "model=small_cnn",
    "task._target_=plain_task.Configured",
    "+task.width=24",
    "task.monitor=val_loss",
    "task.mode=min",
    "optimizer=adamw",
    "+optimizer.amsgrad=true",
    "data._target_=plain_task.NoisyNumbers",
    "+data.num_workers=0",
    "+data.rows=960",
    "trainer=cpu",
    "trainer.max_epochs=6",
    "trainer.num_threads=1",
    "trainer.log_every_n_steps=10",
    "callbacks.checkpoints.every_minutes=0",
    "~callbacks.hardware",
)
# Columns of metrics.csv whose values do not depend on where a start began.
EXACT_COLUMNS = ("epoch", "lr", "val_loss", "test_loss")
# Fields of run.json that do not depend on times, starts or places.
EXACT_FIELDS = (
    "status",
    "phase",
    "exit_code",
    "error",
    "model",
    "data",
    "world_size",
    "seed",
    "monitor",
    "epochs",
    "steps",
    "num_parameters",
    "num_trained_parameters",
)


@dataclass
class Campaign:
    """The settings of one piece, and its results so far.

    Attributes:
        count: the number of signals to send.
        faults: a sentence for each thing that was wrong.
    """

    count: int
    rng: random.Random
    folder: Path
    sent: int = 0
    runs: int = 0
    faults: list[str] = field(default_factory=list)

    def note(self, faults: Sequence[str]) -> None:
        """Count a run that has ended, and say how far the piece is."""
        self.faults += [f"run {self.runs}: {fault}" for fault in faults]
        self.runs += 1
        progress = f"{self.sent} of {self.count} signals, {self.runs} runs"
        print(f"{progress}, {len(self.faults)} wrong", flush=True)


@dataclass(frozen=True)
class Store:
    """An S3 server with an empty bucket.

    Attributes:
        options: the overrides by which a run uploads to it.
    """

    client: Any
    bucket: str
    environment: dict[str, str]
    options: list[str]

    def objects(self) -> dict[str, str]:
        """Return the ETag of each object by its key."""
        listed = self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return {item["Key"]: item["ETag"] for item in listed}

    def read(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()


@contextmanager
def open_store(folder: Path) -> Iterator[Store]:
    """Run an S3 server whose files are in a folder."""
    with object_store(folder) as server:
        bucket = server.new_bucket()
        options = [f"s3.endpoint_url={server.endpoint_url}", f"s3.uri=s3://{bucket}/p"]
        yield Store(server.client(), bucket, server.environment(), options)


# --- what must hold of a run that has ended


def weight_faults(reference: Any, done: FinishedScript) -> list[str]:
    """Compare the last checkpoint with that of an undisturbed run."""
    if done.code:
        return [f"exit code {done.code}: {done.output[-600:]}"]
    return differences(reference, final_state(done.folder))


def pointer_faults(store: Store) -> list[str]:
    """Check that each best.json in the bucket names an object with the sha256 that it states."""
    faults = []
    for key in store.objects():
        if not key.endswith("/best.json"):
            continue
        pointer = json.loads(store.read(key))
        target = pointer["key"]
        if not target:
            continue
        if not target.startswith("p/"):
            target = f"{Path(key).parent}/{target}"
        if hashlib.sha256(store.read(target)).hexdigest() != pointer["sha256"]:
            faults.append(f"{key} names {target}, whose sha256 is another")
    return faults


def second_machine_faults(store: Store, command: list[str], folder: Path) -> list[str]:
    """Start a new run of an id that the bucket has; it must be refused and change nothing there."""
    before = store.objects()
    done = run_script("train", *command, logs=folder, environment=store.environment)
    faults = []
    if done.code != 2:
        faults.append(f"a second machine ended with exit code {done.code}: {done.output[-600:]}")
    if store.objects() != before:
        faults.append("a second machine changed the bucket")
    return faults


def read_rows(folder: RunFolder) -> list[dict[str, str]]:
    with folder.metrics.open(newline="") as file:
        return list(csv.DictReader(file))


def metrics_faults(reference: RunFolder, folder: RunFolder) -> list[str]:
    """Compare the steps of metrics.csv, and the values that do not depend on the starts."""
    expected = {row["step"]: row for row in read_rows(reference)}
    rows = read_rows(folder)
    steps = [row["step"] for row in rows]
    if steps != list(expected):
        missing = [step for step in expected if step not in steps]
        return [f"metrics.csv lacks the steps {missing}, or has others; it has {steps}"]

    faults = []
    for row in rows:
        for column in EXACT_COLUMNS:
            value = expected[row["step"]].get(column)
            if value != row.get(column):
                faults.append(
                    f"metrics.csv, step {row['step']}: {column} {row.get(column)!r}, not {value!r}"
                )
    return faults


def record_faults(reference: RunFolder, folder: RunFolder) -> list[str]:
    """Compare run.json, but for times, starts and the training loss of the last rows."""
    expected = _comparable_fields(reference)
    record = _comparable_fields(folder)
    return [f"run.json: {name}" for name in differences(expected, record)]


def _comparable_fields(folder: RunFolder) -> dict[str, Any]:
    record = json.loads(folder.record_path.read_text())
    values = {name: record.get(name) for name in EXACT_FIELDS}
    metrics = record["metrics"]
    values["metrics"] = {name: metrics[name] for name in metrics if not name.startswith("train/")}
    best = record["best_checkpoint"]
    values["best_checkpoint"] = {name: best[name] for name in ("epoch", "step", "metric")}
    return values


def bucket_faults(store: Store, folder: RunFolder) -> list[str]:
    """Check that the bucket has the page and the record of this run, and of no other run."""
    faults = pointer_faults(store)
    keys = list(store.objects())
    for path in (folder.page, folder.record_path, folder.metrics):
        copies = [key for key in keys if Path(key).name == path.name]
        if copies != [f"p/{folder.run_id}/{path.name}"]:
            faults.append(f"the bucket has {len(copies)} copies of {path.name}: {copies}")
        elif store.read(copies[0]) != path.read_bytes():
            faults.append(f"the bucket has another {path.name} than the disk")
    return faults


# --- pieces


def run_undisturbed(command: Sequence[str], folder: Path) -> tuple[FinishedScript, float]:
    """Run a command without a signal; return how it ended and the seconds that it took."""
    began = time.monotonic()
    done = run_script("train", *command, "run_id=reference", logs=folder)
    assert done.code == 0, done.output
    return done, time.monotonic() - began


def soak_strategies(number: signal.Signals, campaign: Campaign) -> None:
    """Disturb runs of two ranks under ddp_sim and fsdp_sim in turn."""
    _soak_strategies(number, campaign, None)


def soak_uploads(campaign: Campaign) -> None:
    """Disturb runs that upload, then start a second run of the same id."""
    with open_store(campaign.folder / "store") as store:
        _soak_strategies(signal.SIGKILL, campaign, store)


def _soak_strategies(number: signal.Signals, campaign: Campaign, store: Store | None) -> None:
    folder = campaign.folder
    references = []
    for index, strategy in enumerate(STRATEGIES):
        done, seconds = run_undisturbed([*strategy, *TINY], folder / f"reference-{index}")
        references.append((final_state(done.folder), seconds))

    while campaign.sent < campaign.count:
        index = campaign.runs % len(STRATEGIES)
        state, seconds = references[index]
        name = f"r{campaign.runs}"
        command = [*STRATEGIES[index], *TINY, f"run_id={name}"]
        if store is not None:
            command += store.options
        done, hits = run_with_signals(
            command,
            folder / name,
            campaign.rng,
            [number],
            times=min(SIGNALS_PER_RUN, campaign.count - campaign.sent),
            within_s=1.2 * seconds,
            environment=store.environment if store else None,
        )
        campaign.sent += hits
        faults = weight_faults(state, done)
        if store is not None:
            faults += pointer_faults(store)
            faults += second_machine_faults(store, command, folder / f"{name}-elsewhere")
        campaign.note(faults)


def soak_job_script(campaign: Campaign) -> None:
    """Start one job script until its run has finished; signals come at random moments."""
    # The first start waits for the imports of a server, which later starts share.
    run_script("train", "--help", logs=campaign.folder / "help")
    reference, seconds = run_undisturbed(JOB, campaign.folder / "reference")
    state = final_state(reference.folder)
    # A run takes about twenty starts if each start trains a third of it at most.
    within_s = seconds - 0.7 * reference.record["fit_seconds"]
    while campaign.sent < campaign.count:
        folder = campaign.folder / f"job-{campaign.runs}"
        with open_store(folder / "store") as store:
            done, hits = run_with_signals(
                [*JOB, "run_id=job", *store.options],
                folder,
                campaign.rng,
                [signal.SIGKILL, signal.SIGTERM],
                times=min(STARTS_OF_A_JOB, campaign.count - campaign.sent),
                within_s=within_s,
                environment=store.environment,
            )
            campaign.sent += hits
            campaign.note(_faults_of_job(state, reference, done, store))


def soak_lines(campaign: Campaign) -> None:
    """Kill a run at a random line of the code that writes its files, once at each start."""
    count_file = campaign.folder / "lines"
    reference = run_script(
        "train",
        *JOB,
        "run_id=reference",
        logs=campaign.folder / "reference",
        before=partial(kill_at_line, None, count_file),
    )
    assert reference.code == 0, reference.output
    state = final_state(reference.folder)
    number_of_lines = int(count_file.read_text())
    while campaign.sent < campaign.count:
        folder = campaign.folder / f"lines-{campaign.runs}"
        with open_store(folder / "store") as store:
            command = [*JOB, "run_id=job", "resume=auto", *store.options]
            for _ in range(min(SIGNALS_PER_RUN, campaign.count - campaign.sent)):
                line = campaign.rng.randrange(number_of_lines)
                fault = partial(kill_at_line, line, count_file)
                done = run_script(
                    "train", *command, logs=folder, environment=store.environment, before=fault
                )
                if done.code != -signal.SIGKILL:
                    break
                campaign.sent += 1
            done = run_script("train", *command, logs=folder, environment=store.environment)
            campaign.note(_faults_of_job(state, reference, done, store))


def _faults_of_job(
    state: Any, reference: FinishedScript, done: FinishedScript, store: Store
) -> list[str]:
    faults = weight_faults(state, done)
    if done.code:
        return faults
    faults += metrics_faults(reference.folder, done.folder)
    faults += record_faults(reference.folder, done.folder)
    return [*faults, *bucket_faults(store, done.folder)]


PIECES: dict[str, Callable[[Campaign], None]] = {
    "kills": partial(soak_strategies, signal.SIGKILL),
    "sigterm": partial(soak_strategies, signal.SIGTERM),
    "uploads": soak_uploads,
    "jobscript": soak_job_script,
    "lines": soak_lines,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pieces", nargs="*", metavar="PIECE", choices=[*PIECES, []])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60, help="signals of each piece")
    options = parser.parse_args(argv)
    # The machine may be busy with other work, which is no fault of the run.
    runs.TIMEOUT_S = RUN_TIMEOUT_S
    wrong = 0
    for piece in options.pieces or PIECES:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            campaign = Campaign(options.count, random.Random(options.seed), Path(folder))
            PIECES[piece](campaign)
            seconds = time.monotonic() - began
            title = f"{piece}: {campaign.sent} signals, {seconds:.0f} s"
            print(f"{title}, {len(campaign.faults)} wrong", *campaign.faults, sep="\n")
            wrong += len(campaign.faults)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
