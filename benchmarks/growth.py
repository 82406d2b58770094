"""How images/s and memory grow with ranks and with the number of images; the logbook's build over 10 to 1,000 runs.

    python benchmarks/growth.py

Whole runs of `python src/train.py` on made-up images. Memory is the highest resident sum over a run's processes,
sampled ten times a second; pages that ranks share count once per rank. The logbook's figures are logbook_build.py's.
"""

import argparse
import json
import math
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from measuring import HERE, TRAIN, goal_row, places, save

RANKS = (1, 2, 4)
IMAGES = (1_000, 10_000, 50_000)
LINEAR = 1.1  # an exponent of growth up to here is called linear: what a second of noise makes of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        common = ["model=vit_tiny_32", "data=synthetic", "test=false", "trainer.limit_val_batches=0"]
        ranks = [
            {"ranks": n} | run(Path(scratch), [*common, "data.global_batch_size=64", "data.num_images=1920",
                                               "data.num_val=640", "trainer.max_epochs=1", *_trainer(n)])
            for n in RANKS
        ]  # fmt: skip
        small = ["model=small_cnn", "data=synthetic", "test=false", "trainer.limit_val_batches=0", "trainer=cpu",
                 "model.dropout=0", "data.image_size=8", "data.global_batch_size=100"]  # fmt: skip
        images = [
            {"images": n} | run(Path(scratch), [*small, f"data.num_images={n}", "data.num_val=100",
                                                f"trainer.max_epochs={max(1, 50_000 // n)}"])
            for n in IMAGES
        ]  # fmt: skip
    logbook = json.loads((HERE / "results" / "logbook_build.json").read_text())["rows"]
    curves = {
        "memory over ranks": exponent(ranks, "ranks", "peak_mib"),
        "memory over images": exponent(images, "images", "peak_mib"),
        "seconds for the first decoding and 50,000 images of training, over images": exponent(
            images, "images", "seconds"
        ),
        "logbook build over runs": exponent(logbook, "num_runs", "build_s"),
    }
    worst = max(curves.values())
    save(
        "growth",
        [goal_row(12, "growth: the steepest curve's exponent", "≤ 1 (linear)", worst, worst <= LINEAR, unit="",
                  detail="; ".join(f"{name} {value:g}" for name, value in curves.items()))],
        over_ranks=ranks, over_images=images, over_runs=logbook, exponents=curves,
    )  # fmt: skip


def exponent(rows: list[dict[str, float]], over: str, what: str) -> float:
    """The slope between the first and the last row on logarithmic axes: 1 is linear."""
    first, last = rows[0], rows[-1]
    return round(math.log(last[what] / first[what]) / math.log(last[over] / first[over]), 3)


def _trainer(ranks: int) -> list[str]:
    return ["trainer=cpu"] if ranks == 1 else ["trainer=ddp_sim", f"trainer.devices={ranks}"]


def run(scratch: Path, words: list[str]) -> dict[str, Any]:
    run_id = f"bench{time.time_ns()}"
    started = time.perf_counter()
    process = psutil.Popen([*TRAIN, *words, *places(scratch), f"run_id={run_id}"], stdout=subprocess.DEVNULL)
    peak, ended = [0.0], threading.Event()
    watch = threading.Thread(target=_watch, args=(process, peak, ended))
    watch.start()
    code = process.wait()
    ended.set()
    watch.join()
    if code:
        raise SystemExit(f"{words} ended with {code}")
    record = json.loads((scratch / "log" / "train" / "runs" / run_id / "run.json").read_text())
    return {"images_per_s": record["images_per_s"], "peak_mib": round(peak[0]), "fit_seconds": record["fit_seconds"],
            "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip


def _watch(process: psutil.Process, peak: list[float], ended: threading.Event) -> None:
    while not ended.wait(0.1):
        total = 0.0
        for each in [process, *_children(process)]:
            try:
                total += each.memory_info().rss / 2**20
            except psutil.Error:
                continue
        peak[0] = max(peak[0], total)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


if __name__ == "__main__":
    main()
