"""The usual Hydra + Lightning template on the same MNIST net, optimizer, batch and epochs as experiment=mnist.

    python benchmarks/template.py --root FOLDER             # MNIST in torchvision's layout
    python benchmarks/template.py --fashion-root FOLDER     # Fashion-MNIST's four .gz files in its place

benchmarks/peers/hydra_template/ is written as the template's own documentation shows it. Seconds of whole processes,
and without imports: the template's from behind its last import, ours less a process that only imports what it needs.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from measuring import HERE, goal_row, in_turns, median, output_of, paired_ratio, run_record, save, with_and_without
from mnist_images import add_arguments, images_of

TEMPLATE = [sys.executable, str(HERE / "peers" / "hydra_template" / "train.py")]
WHOLE_LIMIT, INNER_LIMIT = 0.8, 0.4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "overrides", nargs="*", help="of our run (which also runs without them), e.g. trainer.precision=bf16-mixed"
    )
    arguments = parser.parse_args()
    sides = ("ours", "ours_plain", "template")
    inner: dict[str, list[float]] = {side: [] for side in sides}
    accuracies: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        root, data, images = images_of(arguments, Path(scratch))
        split = "data.train_val_test_split=[55000,5000,10000]"

        def ours(side: str, overrides: list[str]) -> float:
            words = [
                "experiment=mnist",
                *data,
                "data.num_val=5000",
                f"trainer.max_epochs={arguments.epochs}",
            ]
            started = time.perf_counter()
            record = run_record(f"{scratch}/{time.time_ns()}", [*words, *overrides])
            seconds = time.perf_counter() - started
            accuracies[side].append(round(record["metrics"]["test/acc"], 4))
            inner[side].append(seconds - import_s)
            return seconds

        def template() -> float:
            words = [f"trainer.max_epochs={arguments.epochs}", split, f"data.data_dir={root}"]
            started = time.perf_counter()
            said = output_of([*TEMPLATE, *words], env={"PROJECT_ROOT": scratch})
            seconds = time.perf_counter() - started
            inner["template"].append(float(re.findall(r"seconds_without_imports (\S+)", said)[-1]))
            accuracies["template"].append(float(re.findall(r"accuracy (\S+) threads", said)[-1]))
            return seconds

        import_s = import_seconds()
        named = zip(sides, with_and_without(arguments.overrides), strict=False)
        theirs, mine, *plain = in_turns(
            arguments.repetitions,
            template,
            *[lambda side=side, words=words: ours(side, words) for side, words in named],
        )
    whole, without = paired_ratio(mine, theirs), paired_ratio(inner["ours"], inner["template"])
    details = [f"{arguments.epochs} epoch(s); images: {images}"] * 2
    if plain:
        own = " ".join(arguments.overrides)
        ratios = paired_ratio(*plain, theirs), paired_ratio(inner["ours_plain"], inner["template"])
        details = [f"{text}; ours with {own}, without {ratio:g} ×" for text, ratio in zip(details, ratios, strict=True)]
    save(
        "template",
        [goal_row(8, "whole process ÷ the usual Hydra + Lightning template's", "≤ 0.8", whole, whole <= WHOLE_LIMIT,
                  detail=details[0]),
         goal_row(8, "the same without imports", "≤ 0.4", without, without <= INNER_LIMIT, detail=details[1])],
        seconds={"ours": mine, "ours_plain": plain, "template": theirs}, seconds_without_imports=inner,
        accuracies=accuracies, our_imports_s=import_s, images=images, epochs=arguments.epochs,
        medians=[median(mine), median(theirs)],
    )  # fmt: skip


def import_seconds() -> float:
    """Of what our run imports: torch, lightning.pytorch, hydra, numpy; the median of three processes."""
    command = [sys.executable, "-c", "import torch, lightning.pytorch, hydra, numpy"]
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        output_of(command)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[1]


if __name__ == "__main__":
    main()
