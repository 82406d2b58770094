"""Is the largest batch that a search finds the largest, and does the run that follows it fit? On null GPUs.

    python benchmarks/largest_batch.py [--gib 2 4 8 16] [--models …] [--trainers …]

For each net, trainer and size of device: the search's batch trains two steps and validates; the batch that it would
be more than 5 % below runs out of memory. Null GPUs (nullgpu/README.md) compute nothing here; torch's CUDA code and
its allocator are those of a GPU.
Writes benchmarks/results/largest_batch.json and logbook/measurements/largest_batch.md.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/harness"), str(ROOT / "nullgpu")]
RESULTS, PAGE = ROOT / "benchmarks/results/largest_batch.json", ROOT / "logbook/measurements/largest_batch.md"

IMAGES = 2500  # for each GiB of each device: two steps of more than fit
DATA = ["data=synthetic", "data.num_val=64", "data.eval_batch_size=16", "test=false"]
MODELS = {
    "vit_tiny_32": ["model=vit_tiny_32"],
    "resnet18": ["model=timm", "model.name=resnet18", "model.pretrained=false", "data.image_size=64"],
}
TRAINERS = {"gpu": 1, "ddp": 2, "fsdp": 2}
SHORT = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "callbacks=none"]
MOST_BELOW = 0.95
NO_VALUES = "import warnings; warnings.resetwarnings()"  # sums over ranks are nothing here, of which Lightning warns
NOTHING_COMPUTED = ("became nan", "not a number or text")  # what ends a run whose steps and validation fitted
HEAD = """# The largest batch

Written by `benchmarks/largest_batch.py`; do not edit. What `find_batch_size.py` found on **null GPUs, not GPUs** of
each size, whether a run with that batch fits, and whether one runs out of memory with the smallest batch of which it
would be less than 95 %, as it should.

| model | trainer | devices | GiB | largest batch per device | tries | of them out of memory | it runs | that one |
|---|---|---:|---:|---:|---:|---:|---|---|
"""


def measure(model: str, trainer: str, gib: float, folder: Path) -> dict[str, Any]:
    from null_gpus import run_on_null_gpus

    def run(door: str, *more: str) -> Any:
        words = [*DATA, f"data.num_images={int(IMAGES * gib * devices)}", *MODELS[model], f"trainer={trainer}", *more]
        logs = folder / f"{model}-{trainer}-{gib}-{len(list(folder.iterdir()))}"
        before = partial(exec, NO_VALUES)
        return run_on_null_gpus(door, *words, logs=logs, before=before, devices=devices, memory_gib=gib, compute=False)

    devices = TRAINERS[trainer]
    done = run("find_batch_size")
    assert done.code == 0, done.output
    found = done.record["largest_batch"]
    batch = found["per_device"]
    after = run("train", *SHORT, f"data.global_batch_size={batch * devices}")
    beyond = run("train", *SHORT, f"data.global_batch_size={(math.floor(batch / MOST_BELOW) + 1) * devices}")
    return {
        "model": model, "trainer": trainer, "devices": devices, "gib": gib, "batch": batch, "found": found,
        "runs": after.code == 0 or any(words in after.output for words in NOTHING_COMPUTED),
        "more_runs_out": beyond.code != 0 and "out of memory" in beyond.output,
    }  # fmt: skip


def page(rows: dict[str, dict[str, Any]]) -> str:
    text = HEAD
    for row in rows.values():
        cells = [row["model"], row["trainer"], row["devices"], f"{row['gib']:g}", row["batch"]]
        cells += [row["found"]["probes"], row["found"]["out_of_memory"], "yes" if row["runs"] else "**no**"]
        cells.append("out of memory" if row["more_runs_out"] else "**fits too**")
        text += "| " + " | ".join(map(str, cells)) + " |\n"
    run = sum(row["runs"] for row in rows.values())
    near = sum(row["more_runs_out"] for row in rows.values())
    text += "\n| goal | wanted | measured | |\n|---|---|---|---|\n"
    text += f"| the batch that was found runs | every time | {run} of {len(rows)} | {verdict(run == len(rows))} |\n"
    text += f"| at most 5 % below the largest | every time | {near} of {len(rows)} | {verdict(near == len(rows))} |\n"
    return text


def verdict(held: bool) -> str:
    return "holds" if held else "not reached"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", nargs="*", type=float, default=[2, 4, 8, 16])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--trainers", nargs="*", default=list(TRAINERS), choices=list(TRAINERS))
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for gib, model, trainer in itertools.product(given.gib, given.models, given.trainers):
            row = rows[f"{model}, {trainer}, {gib:g}"] = measure(model, trainer, gib, Path(folder))
            print(f"{model} {trainer} {gib:g} GiB: {row}", flush=True)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
