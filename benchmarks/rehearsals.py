"""Every recipe of configs/experiment/ that GPUs can run, rehearsed on null GPUs: does a rehearsal blame what is right?

    python benchmarks/rehearsals.py [RECIPE …]

Writes benchmarks/results/rehearsals.json, where rows that are not rehearsed this time stay, and
logbook/measurements/rehearsals.md. No figure of time is in it: null GPUs have no speed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/rehearsals.json", ROOT / "logbook/measurements/rehearsals.md"

ONE, FOUR, EIGHT = "trainer=gpu hardware=g5.xlarge", "hardware=g5.12xlarge", "hardware=p4d.24xlarge"
FOLDER = "data.root={photographs}"
RECIPES = {
    "quickstart": ONE,
    "mnist": ONE,
    "mnist_fast": ONE,
    "mnist_allreduce": f"trainer=allreduce {FOUR}",
    "kfold": ONE,
    "cifar10_cpu": ONE,
    "cifar10_speedrun": ONE,
    "alexnet_cifar10": f"trainer=ddp {FOUR}",
    "alexnet_model_parallel": f"trainer.accelerator=gpu trainer.stage_devices=[cuda:0,cuda:1] {FOUR}",
    "cats_vs_dogs": f"{ONE} {FOLDER}",
    "finetune_cifar10": ONE,
    "linear_probe": ONE,
    "vit_ddp": FOUR,
    "vit_fsdp": FOUR,
    "convnext_imagenet": f"{EIGHT} {FOLDER} data.num_val=64",
    "deit3_imagenet": f"{EIGHT} {FOLDER} data.num_val=64",
    "resnet50_a2": f"{EIGHT} {FOLDER} data.num_val=64",
}
CLASSES, IMAGES = 10, 700  # made-up photographs: three steps of the largest global batch that four ranks run
HEAD = """# The recipes, rehearsed

Written by `benchmarks/rehearsals.py`; do not edit. Each recipe as `python src/rehearse.py experiment=… …` saw it on
**null GPUs, not GPUs** ([docs/rehearsal.md](../../docs/rehearsal.md)): every start, step, checkpoint, resume and test
ran through torch's CUDA code; made-up images in place of downloads. The largest batch is `--estimate`'s. A photograph's
path is the reader's own.

| recipe | with | lines that held | that did not | largest batch |
|---|---|---:|---|---|
"""


def rehearse(recipe: str, photographs: str) -> dict[str, Any]:
    words = RECIPES[recipe].format(photographs=photographs).split()
    command = [sys.executable, str(ROOT / "src/rehearse.py"), f"experiment={recipe}", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    largest = re.search(r"estimated largest batch ((?:at least )?\d+ per device)", done.stdout)
    failed = [line.removeprefix("FAILED").strip() for line in said if line.startswith("FAILED")]
    if done.returncode and not failed:
        failed = said[-1:]
    held = sum(line.startswith("ok ") for line in said)
    return {
        "code": done.returncode, "held": held, "failed": failed, "largest": largest.group(1) if largest else None,
    }  # fmt: skip


def make_photographs(folder: Path) -> None:
    from PIL import Image

    for label in range(CLASSES):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(IMAGES):
            image = Image.new("RGB", (48, 40), (25 * label, number % 256, 128))
            image.save(folder / f"class{label}" / f"{number}.jpg")


def page(rows: dict[str, dict[str, Any]]) -> str:
    text = HEAD
    for recipe, row in rows.items():
        failed = "; ".join(row["failed"]).replace("|", "\\|") or "none"
        words = RECIPES[recipe].format(photographs="PHOTOGRAPHS")
        text += f"| {recipe} | `{words}` | {row['held']} | {failed} | {row['largest'] or '–'} |\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    rows: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder) / "photographs")
        for recipe in parser.parse_args().recipes:
            rows[recipe] = rehearse(recipe, f"{folder}/photographs")
            print(f"{recipe}: {rows[recipe]}", flush=True)
            rows = {name: rows[name] for name in RECIPES if name in rows}
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            PAGE.write_text(page(rows))
    return int(any(row["code"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
