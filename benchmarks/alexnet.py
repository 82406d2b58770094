"""AlexNet on CIFAR-10 as the SLURM tutorials train it: images/s of whole epochs with their validation.

    python benchmarks/alexnet.py --root FOLDER      # holds cifar-10-batches-py
    python benchmarks/alexnet.py --root FOLDER trainer.precision=bf16-mixed       # our run's own options, and without

Both sides train one epoch after a warm-up epoch on the same number of images and validate on a tenth of them. The
tutorial's side is benchmarks/peers/alexnet_tutorial.py with its best worker count.
"""

import argparse
import csv
import re
import sys
import tempfile
from pathlib import Path

from measuring import HERE, goal_row, in_turns, median, output_of, paired_ratio, run_record, save, with_and_without

TUTORIAL = [sys.executable, str(HERE / "peers" / "alexnet_tutorial.py")]
LIMIT_CPU, LIMIT_GPU = 1.3, 50
WORKERS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--images", type=int, default=5120)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    root, images = arguments.root.resolve(), arguments.images

    def tutorial(workers: int) -> float:
        said = output_of([*TUTORIAL, f"--root={root}", f"--images={images}", f"--workers={workers}", "--epochs=2"])
        return float(re.findall(r"images_per_s (\S+)", said)[-1])

    trial = {workers: tutorial(workers) for workers in WORKERS}
    best = max(trial, key=trial.__getitem__)
    with tempfile.TemporaryDirectory() as scratch:
        theirs, ours, *plain = in_turns(
            arguments.repetitions,
            lambda: tutorial(best),
            *[
                lambda options=options: our_rate(Path(scratch), root, images, options)
                for options in with_and_without(arguments.overrides)
            ],
        )
    ratio = paired_ratio(ours, theirs)
    detail = f"ours {median(ours, 0):.0f} images/s, the tutorial's recipe {median(theirs, 0):.0f} with {best} workers"
    if plain:
        detail += f"; ours with {' '.join(arguments.overrides)}, without {paired_ratio(*plain, theirs):g} ×"
    save(
        "alexnet",
        [goal_row(5, "AlexNet on CIFAR-10, images/s with validation ÷ the tutorial's recipe", f"≥ {LIMIT_CPU}", ratio,
                  ratio >= LIMIT_CPU, detail=detail)],
        images_per_s={"ours": ours, "ours_plain": plain, "tutorial": theirs}, tutorial_by_workers=trial, images=images,
        overrides=arguments.overrides,
    )  # fmt: skip


def our_rate(scratch: Path, root: Path, images: int, overrides: list[str]) -> float:
    """Images (training and validation) per second of the last epoch: from one validation's end to the next one's."""
    steps = images * 9 // 10 // 256
    words = ["experiment=alexnet_cifar10", "trainer=cpu", f"data.root={root}", f"data.num_val={images // 10}",
             f"trainer.limit_train_batches={steps}", "trainer.max_epochs=3", "test=false"]  # fmt: skip
    folder = run_record(scratch, [*words, *overrides])["folder"]
    with (folder / "metrics.csv").open() as file:
        ends = [float(row["time_s"]) for row in csv.DictReader(file) if row.get("val/acc")]
    return (steps * 256 + images // 10) / (ends[-1] - ends[-2])


if __name__ == "__main__":
    main()
