"""Test accuracy of `experiment=cifar10_speedrun` and the seconds of its whole process.

The limit is 15 minutes.

python benchmarks/speedrun.py [--root FOLDER]      # FOLDER holds cifar-10-batches-py
"""

import argparse
import tempfile
import time

from measuring import build_goal_row, save, train_for_record

LIMIT_S = 900
ACCURACY = 0.90


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root")
    root = parser.parse_args().root
    overrides = ["experiment=cifar10_speedrun"]
    if root:
        overrides.append(f"data.root={root}")
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        record = train_for_record(scratch, overrides)
        seconds = time.perf_counter() - started
    accuracy = record["metrics"]["test/acc"]
    goal = build_goal_row(
        "cifar10_speedrun: test accuracy in 15 minutes on 2 cores",
        "≥ 90 %",
        round(100 * accuracy, 2),
        accuracy >= ACCURACY and seconds <= LIMIT_S,
        unit="%",
        detail=f"whole process {seconds:.0f} s",
    )
    save(
        "speedrun",
        [goal],
        seconds=round(seconds, 1),
        test_accuracy=accuracy,
        fit_seconds=record["fit_seconds"],
        images_per_s=record["images_per_s"],
    )


if __name__ == "__main__":
    main()
