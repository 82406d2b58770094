"""Test accuracy of `experiment=cifar10_speedrun` and the seconds of its whole process; the limit is 15 minutes.

    python benchmarks/speedrun.py [--root FOLDER]                          # FOLDER holds cifar-10-batches-py
    python benchmarks/speedrun.py --root FOLDER --keep FOLDER --piece-s 220    # on a machine lent for minutes at a time

With --piece-s a run is asked to stop (SIGTERM) after so many seconds and the same command goes on with it where it
stopped, bit-equal; every start, every import and every stop counts, what lies between the pieces does not.
"""

import argparse
import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from measuring import REPOSITORY, TRAIN, goal_row, places, save

LIMIT_S, ACCURACY = 900, 0.90
INTERRUPTED = 75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root")
    parser.add_argument("--keep", type=Path, help="where the run lies between pieces")
    parser.add_argument("--piece-s", type=float)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.keep or Path(scratch)).resolve()
        pieces = train(folder, [f"data.root={arguments.root}"] if arguments.root else [], arguments.piece_s)
        if pieces is not None:
            report(folder, pieces)


def train(folder: Path, words: list[str], piece_s: float | None) -> list[float] | None:
    """Start the run in `folder`, or go on with it; the seconds of all its processes, or None where it goes on later."""
    told = folder / "pieces.json"
    pieces: list[float] = json.loads(told.read_text()) if told.exists() else []
    resume = ["resume=auto"] if pieces else []
    command = [*TRAIN, "experiment=cifar10_speedrun", "run_id=speedrun", *words, *places(folder), *resume]
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        code = process.wait(timeout=piece_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    pieces.append(time.perf_counter() - started)
    if code not in (0, INTERRUPTED):
        raise SystemExit(f"{command} ended with {code}")
    folder.mkdir(parents=True, exist_ok=True)
    told.write_text(json.dumps(pieces))
    return pieces if code == 0 else None


def report(folder: Path, pieces: list[float]) -> None:
    record = json.loads((folder / "log" / "train" / "runs" / "speedrun" / "run.json").read_text())
    accuracy, seconds = record["metrics"]["test/acc"], sum(pieces)
    goal = goal_row(
        6, "cifar10_speedrun: test accuracy in 15 minutes on 2 cores", "≥ 90 %", round(100 * accuracy, 2),
        accuracy >= ACCURACY and seconds <= LIMIT_S, unit="%",
        detail=f"whole process {seconds:.0f} s" + (f" in {len(pieces)} pieces" if len(pieces) > 1 else ""),
    )  # fmt: skip
    save(
        "speedrun", [goal],
        seconds=round(seconds, 1), pieces=[round(piece, 1) for piece in pieces], test_accuracy=accuracy,
        test_images=record["metrics"]["test/images"], val_accuracy_best=record["metrics"]["val/acc_best"],
        fit_seconds=record["fit_seconds"], step_seconds=record["throughput"]["step_seconds"],
        images_per_s=record["images_per_s"], seed=42,
    )  # fmt: skip


if __name__ == "__main__":
    main()
