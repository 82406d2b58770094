"""The usual Hydra + Lightning template on the same MNIST net, optimizer, batch and epochs as
experiment=mnist.

    python benchmarks/template.py --root FOLDER                        # MNIST in torchvision's
    layout, FOLDER/MNIST/raw python benchmarks/template.py --root FOLDER --data fashion_mnist   #
    Fashion-MNIST's files there, unpacked

template_peer.txt is written as the template's own documentation shows it. Measures whole processes.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from measuring import HERE, goal_row, in_turns, output_of, paired_ratio, run_record, save

WHOLE_LIMIT = 0.8


def main() -> None:
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
    arguments = parser.parse_args()
    accuracies: dict[str, list[float]] = {"ours": [], "template": []}
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.root.resolve()
        peer = write_peer(Path(scratch) / "peer")
        epochs = f"trainer.max_epochs={arguments.epochs}"

        def ours() -> float:
            words = [
                "experiment=mnist",
                f"data={arguments.data}",
                f"data.root={root}",
                "data.num_val=5000",
                epochs,
            ]
            started = time.perf_counter()
            record = run_record(f"{scratch}/{time.time_ns()}", [*words, *arguments.overrides])
            seconds = time.perf_counter() - started
            accuracies["ours"].append(round(record["metrics"]["test/acc"], 4))
            return seconds

        def template() -> float:
            words = [
                epochs,
                "data.train_val_test_split=[55000,5000,10000]",
                f"data.data_dir={root}",
            ]
            started = time.perf_counter()
            said = output_of([sys.executable, str(peer), *words], env={"PROJECT_ROOT": scratch})
            seconds = time.perf_counter() - started
            accuracies["template"].append(float(re.findall(r"accuracy (\S+) threads", said)[-1]))
            return seconds

        theirs, mine = in_turns(3, template, ours)
    whole, detail = (
        paired_ratio(mine, theirs),
        f"{arguments.epochs} epoch(s); images: {arguments.data}",
    )
    detail += f"; ours with {' '.join(arguments.overrides)}" if arguments.overrides else ""
    what = "whole process ÷ the usual Hydra + Lightning template's"
    save(
        "template_with_overrides" if arguments.overrides else "template",
        [goal_row(what, f"≤ {WHOLE_LIMIT}", whole, whole <= WHOLE_LIMIT, detail=detail)],
        seconds={"ours": mine, "template": theirs}, accuracies=accuracies,
    )  # fmt: skip


def write_peer(folder: Path) -> Path:
    """Write the peer's files; return its script."""
    for part in re.split(r"(?m)^=== ", (HERE / "template_peer.txt").read_text())[1:]:
        name, _, text = part.partition("\n")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "train.py"


if __name__ == "__main__":
    main()
