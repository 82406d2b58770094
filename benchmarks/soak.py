"""Kill runs at random moments and check that they end with the weights of a run that nobody disturbed.

    python benchmarks/soak.py                                   every piece; make soak
    python benchmarks/soak.py kills --count 60 --seed 2         make soak PIECE=kills COUNT=60 SEED=2

Pieces: kills (kill -9 of a rank or its parent), sigterm (to the parent), uploads (kill -9 while checkpoints go to an S3
server; then a second machine starts a new run of the same id). Each runs ddp_sim and fsdp_sim in turn. Exit code 1 if a
run ends with other weights, leaves a process behind, or leaves a best.json that does not name a whole object; or if the
second machine is not refused, or changes the bucket.
"""

import argparse
import hashlib
import json
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests/harness")]

from kills import DDP, FSDP, TINY, differences, disturbed_run, final_state  # noqa: E402
from object_store import object_store  # noqa: E402
from runs import run_door  # noqa: E402

SIGNALS_PER_RUN = 5
PIECES = {"kills": signal.SIGKILL, "sigterm": signal.SIGTERM, "uploads": signal.SIGKILL}


def bucket_faults(client: Any, bucket: str) -> list[str]:
    """Check that each best.json in the bucket names an object with the sha256 that it states."""
    found = []
    for item in client.list_objects_v2(Bucket=bucket).get("Contents", []):
        if item["Key"].endswith("/best.json"):
            pointer = json.loads(client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read())
            key = pointer["key"] if pointer["key"].startswith("p/") else f"{Path(item['Key']).parent}/{pointer['key']}"
            body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
            if hashlib.sha256(body).hexdigest() != pointer["sha256"]:
                found.append(f"{item['Key']} names {key}, whose sha256 is another")
    return found


def second_machine_faults(
    client: Any, bucket: str, command: list[str], folder: Path, environment: dict[str, str]
) -> list[str]:
    """Start a new run of an id that the bucket has; it must be refused and change nothing there."""

    def objects() -> list[tuple[str, str]]:
        listed = client.list_objects_v2(Bucket=bucket).get("Contents", [])
        return [(item["Key"], item["ETag"]) for item in listed]

    before = objects()
    done = run_door("train", *command, logs=folder, environment=environment)
    faults = []
    if done.code != 2:
        faults.append(f"a second machine ended with exit code {done.code}: {done.output[-600:]}")
    if objects() != before:
        faults.append("a second machine changed the bucket")
    return faults


def soak(piece: str, count: int, chance: random.Random, folder: Path) -> tuple[int, list[str]]:
    """Send at least `count` signals; returns how many were sent and what was wrong."""
    wrong: list[str] = []
    references, seconds = [], []
    sent = number = 0
    with ExitStack() as stack:
        environment, s3, client, bucket = {}, [], None, ""
        if piece == "uploads":
            store = stack.enter_context(object_store(folder / "store"))
            environment, client, bucket = store.environment(), store.client(), store.new_bucket()
            s3 = [f"s3.endpoint_url={store.endpoint_url}", f"s3.uri=s3://{bucket}/p"]
        for index, strategy in enumerate((DDP, FSDP)):
            began = time.monotonic()
            done = run_door("train", *strategy, *TINY, "run_id=reference", logs=folder / f"reference-{index}")
            assert done.code == 0, done.output
            references.append(final_state(done.folder))
            seconds.append(time.monotonic() - began)
        while sent < count:
            index = number % 2
            name, times = f"{piece}-{number}", min(SIGNALS_PER_RUN, count - sent)
            command = [*(DDP, FSDP)[index], *TINY, *s3, f"run_id={name}"]
            done, hits = disturbed_run(
                command, folder / name, chance, PIECES[piece], times, 1.2 * seconds[index], environment
            )
            sent += hits
            found = [f"exit code {done.code}: {done.output[-600:]}"] if done.code else []
            found += [] if done.code else differences(references[index], final_state(done.folder))
            if client is not None:
                found += bucket_faults(client, bucket)
                elsewhere = folder / f"{name}-elsewhere"
                found += second_machine_faults(client, bucket, command, elsewhere, environment)
            wrong += [f"run {number}: {fault}" for fault in found]
            number += 1
            print(f"{piece}: {sent} of {count} signals, {number} runs, {len(wrong)} wrong", flush=True)
    return sent, wrong


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pieces", nargs="*", metavar="PIECE", choices=[*PIECES, []])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60, help="signals of each piece")
    given = parser.parse_args(argv)
    bad = 0
    for piece in given.pieces or PIECES:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            sent, wrong = soak(piece, given.count, random.Random(given.seed), Path(folder))
            print(f"{piece}: {sent} signals, {time.monotonic() - began:.0f} s, {len(wrong)} wrong", *wrong, sep="\n")
            bad += len(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
