"""Test accuracy of `experiment=cifar10_speedrun` and the seconds of its whole process; the limit is 15 minutes.

python benchmarks/speedrun.py [--root FOLDER]     # FOLDER holds cifar-10-batches-py; default: it is downloaded
"""

import argparse
import tempfile
import time

from measuring import goal_row, run_record, save

LIMIT_S, ACCURACY = 900, 0.90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        words = ["experiment=cifar10_speedrun"]
        words += [f"data.root={arguments.root}"] if arguments.root else []
        started = time.perf_counter()
        record = run_record(scratch, words)
        seconds = time.perf_counter() - started
    accuracy = record["metrics"]["test/acc"]
    goal = goal_row(
        6, "cifar10_speedrun: test accuracy in 15 minutes on 2 cores", "≥ 90 %", round(100 * accuracy, 2),
        accuracy >= ACCURACY and seconds <= LIMIT_S, unit="%", detail=f"whole process {seconds:.0f} s",
    )  # fmt: skip
    save(
        "speedrun", [goal],
        seconds=round(seconds, 1), test_accuracy=accuracy, test_images=record["metrics"]["test/images"],
        val_accuracy_best=record["metrics"]["val/acc_best"], fit_seconds=record["fit_seconds"],
        step_seconds=record["throughput"]["step_seconds"], images_per_s=record["images_per_s"],
        seed=42,
    )  # fmt: skip


if __name__ == "__main__":
    main()
