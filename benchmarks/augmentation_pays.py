"""What augmentation is worth from scratch on CIFAR-10: the same net and epochs with and without, three seeds each.

    python benchmarks/augmentation_pays.py --root FOLDER [--epochs 8] [overrides of the runs]

The recipe is experiment=cifar10_cpu. Writes results/augmentation_pays.json and
logbook/measurements/augmentation_pays.md; the best by validation should be the recipe's own.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measuring import REPOSITORY, run_record, save

PAGE = REPOSITORY / "logbook" / "measurements" / "augmentation_pays.md"
SIDES = {
    "none": ["augmentation=none"],
    "crop and flip": ["augmentation=crop_flip"],
    "crop, flip and cutmix": ["augmentation=crop_flip", "augmentation.cutmix_alpha=1.0", "augmentation.mix_prob=0.5"],
}


def measure(words: list[str], seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        record = run_record(scratch, ["experiment=cifar10_cpu", *words, f"seed={seed}"])
    metrics = record["metrics"]
    percent = {name: round(100 * metrics[key], 2) for name, key in (("val", "val/acc_best"), ("test", "test/acc"))}
    return {**percent, "seconds": record["fit_seconds"], "seed": seed}


def page(content: dict[str, Any]) -> str:
    """The table in markdown, of what results/augmentation_pays.json holds."""
    lines = [
        "# What augmentation is worth from scratch",
        "",
        f"Written by `{content['command']}` on {content['date']}; do not edit. CIFAR-10, the net of `cifar10_cpu`, "
        f"{content['epochs']} epochs, {len(content['seeds'])} seeds each; the same steps, so the same time "
        f"but for noise ({content['machine']['cpu']}, {content['machine']['cores']} cores). Mean, lowest to highest.",
        "",
        "| augmentation | validation | test | training, s |",
        "|---|---|---|---|",
    ]
    for side, runs in content["runs"].items():
        cells = [
            f"{statistics.mean(r[k] for r in runs):.2f} % ({low(runs, k)}–{high(runs, k)})" for k in ("val", "test")
        ]
        lines.append(f"| {side} | {' | '.join(cells)} | {statistics.median(r['seconds'] for r in runs):.0f} |")
    return "\n".join(lines) + f"\n\nBest by validation: **{content['best']}**.\n"


def low(runs: list[dict[str, float]], key: str) -> str:
    return f"{min(run[key] for run in runs):.2f}"


def high(runs: list[dict[str, float]], key: str) -> str:
    return f"{max(run[key] for run in runs):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    common = [f"data.root={options.root.resolve()}", f"trainer.max_epochs={options.epochs}", *options.overrides]
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number, seed in enumerate(options.seeds, 1):
        for side, words in SIDES.items():
            runs[side].append(measure([*words, *common], seed))
            print(side, runs[side][-1], flush=True)
        best = max(SIDES, key=lambda side: statistics.mean(run["val"] for run in runs[side]))
        path = save("augmentation_pays", [], epochs=options.epochs, seeds=options.seeds[:number], runs=runs, best=best)
        PAGE.write_text(page(json.loads(path.read_text())))  # an hour's work that is broken off leaves what is done


if __name__ == "__main__":
    main()
