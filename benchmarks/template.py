"""Compare experiment=mnist with the usual Hydra + Lightning template: same net, batch and epochs.

    python benchmarks/template.py --root FOLDER            # FOLDER/MNIST/raw, as torchvision has it
    python benchmarks/template.py --root FOLDER --data fashion_mnist   # its files there, unpacked

template_peer.txt is written as the template's own documentation shows it. The times are those of whole processes.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from measuring import (
    HERE,
    build_goal_row,
    measure_in_turns,
    paired_ratio,
    run_for_output,
    save,
    train_for_record,
)

WHOLE_LIMIT = 0.8


def main() -> None:
    arguments = read_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        sides = Sides(arguments, Path(scratch))
        theirs, ours = measure_in_turns(3, sides.run_template, sides.run_ours)
    whole = paired_ratio(ours, theirs)
    detail = f"{arguments.epochs} epoch(s); images: {arguments.data}"
    name = "template"
    if arguments.overrides:
        detail += f"; ours with {' '.join(arguments.overrides)}"
        name = "template_with_overrides"
    what = "whole process ÷ the usual Hydra + Lightning template's"
    goal = build_goal_row(what, f"≤ {WHOLE_LIMIT}", whole, whole <= WHOLE_LIMIT, detail=detail)
    seconds = {"ours": ours, "template": theirs}
    save(name, [goal], seconds=seconds, accuracies=sides.accuracies)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, required=True, help="images in torchvision's layout (FOLDER/MNIST/raw)"
    )
    parser.add_argument("--data", choices=("mnist", "fashion_mnist"), default="mnist")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "overrides", nargs="*", help="of our run, e.g. trainer.precision=bf16-mixed"
    )
    return parser.parse_args()


class Sides:
    """Train the same in both projects; each returns the seconds of a whole process."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self.arguments = arguments
        self.scratch = scratch
        self.root = arguments.root.resolve()
        self.peer = write_peer(scratch / "peer")
        self.epochs = f"trainer.max_epochs={arguments.epochs}"
        self.accuracies: dict[str, list[float]] = {"ours": [], "template": []}

    def run_ours(self) -> float:
        overrides = [
            "experiment=mnist",
            f"data={self.arguments.data}",
            f"data.root={self.root}",
            "data.num_val=5000",
            self.epochs,
            *self.arguments.overrides,
        ]
        started = time.perf_counter()
        record = train_for_record(self.scratch / str(time.time_ns()), overrides)
        seconds = time.perf_counter() - started
        self.accuracies["ours"].append(round(record["metrics"]["test/acc"], 4))
        return seconds

    def run_template(self) -> float:
        overrides = [
            self.epochs,
            "data.train_val_test_split=[55000,5000,10000]",
            f"data.data_dir={self.root}",
        ]
        command = [sys.executable, str(self.peer), *overrides]
        started = time.perf_counter()
        output = run_for_output(command, env={"PROJECT_ROOT": str(self.scratch)})
        seconds = time.perf_counter() - started
        accuracy = re.findall(r"accuracy (\S+) threads", output)[-1]
        self.accuracies["template"].append(float(accuracy))
        return seconds


def write_peer(folder: Path) -> Path:
    """Write the peer's files; return its script."""
    for part in re.split(r"(?m)^=== ", (HERE / "template_peer.txt").read_text())[1:]:
        name, _, text = part.partition("\n")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "train.py"


if __name__ == "__main__":
    main()
