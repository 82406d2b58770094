"""Whole-process seconds to a test accuracy: experiment=mnist_fast against PyTorch's MNIST example, the same net.

    python benchmarks/mnist.py --root FOLDER                       # MNIST in torchvision's layout (FOLDER/MNIST/raw)
    python benchmarks/mnist.py --root FOLDER --target 90           # Fashion-MNIST's files there
    python benchmarks/mnist.py --cifar-root FOLDER                 # neither at hand: CIFAR-10 in grey, 28 pixels

The example tests after every epoch and stops at the first that reaches the target. Ours runs its recipe to its end
and tests its best checkpoint once; a round in which it misses the target fails.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from measuring import HERE, goal_row, in_turns, median, output_of, paired_ratio, run_record, save
from mnist_stand_in import write_stand_in

EXAMPLE = [sys.executable, str(HERE / "peers" / "mnist_example.py")]
LIMIT = 0.333


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--cifar-root", type=Path)
    parser.add_argument("--target", type=float, help="test accuracy in percent; default 99, of CIFAR-10 in grey 64")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.target is None:
        arguments.target = 99.0 if arguments.root else 64.0
    accuracies: dict[str, list[float]] = {"ours": [], "example": []}
    epochs: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.root.resolve() if arguments.root else None
        if root is None:
            root = write_stand_in(arguments.cifar_root.resolve(), Path(scratch) / "grey")

        def ours() -> float:
            started = time.perf_counter()
            record = run_record(f"{scratch}/{time.time_ns()}", ["experiment=mnist_fast", f"data.root={root}"])
            seconds = time.perf_counter() - started
            accuracies["ours"].append(round(100 * record["metrics"]["test/acc"], 2))
            return seconds

        def example() -> float:
            started = time.perf_counter()
            said = output_of([*EXAMPLE, f"--root={root}", f"--target={arguments.target}"])
            seconds = time.perf_counter() - started
            accuracy, epoch = re.findall(r"^accuracy (\S+) epoch (\d+)$", said, re.M)[-1]
            accuracies["example"].append(float(accuracy))
            epochs.append(int(epoch))
            return seconds

        mine, theirs = in_turns(arguments.repetitions, ours, example)
    ratio = paired_ratio(mine, theirs)
    reached = min(accuracies["ours"] + accuracies["example"]) >= arguments.target
    images = "the files in --root" if arguments.root else "CIFAR-10 in grey, 28×28, in MNIST's format (a stand-in)"
    goal = f"to {arguments.target:g} % test accuracy" if arguments.root else "on a stand-in to its target"
    save(
        "mnist",
        [goal_row(4, f"MNIST example net {goal}, whole process ÷ PyTorch's example",
                  "≤ 1/3", ratio, ratio <= LIMIT and reached,
                  detail=f"images: {images}; target {arguments.target:g} %; ours {median(mine, 1)} s, the example "
                  f"{median(theirs, 1)} s")],
        images=images, target=arguments.target, seconds={"ours": mine, "example": theirs}, accuracies=accuracies,
        example_epochs=epochs,
    )  # fmt: skip


if __name__ == "__main__":
    main()
