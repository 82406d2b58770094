"""What `find_batch_size.py --estimate` predicts, against what torch's caching allocator reserves on null GPUs.

    python benchmarks/estimates_gpu.py [--models …] [--devices 1 2 4 8]

Null GPUs (nullgpu/README.md) compute nothing here; torch's CUDA code and its allocator are those of a GPU. Writes
benchmarks/results/estimates_gpu.json, where rows that are not measured this time stay, and
logbook/measurements/estimates_gpu.md.
"""

import argparse
import itertools
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/harness"), str(ROOT / "nullgpu")]
RESULTS, PAGE = ROOT / "benchmarks/results/estimates_gpu.json", ROOT / "logbook/measurements/estimates_gpu.md"

DATA = [
    "data=synthetic",
    "data.num_images=9300",  # two steps of each row, without the tenth to validate on
    "data.num_test_images=64",
    "data.eval_batch_size=16",
    "data.device_cache_gib=0",
]
# Options and images per device: peaks of one to four GiB
MODELS = {
    "vit": (["model=vit", "model.pretrained=false", "data.image_size=224", "data.num_images=1200"], 64),
    "vit_tiny_32": (["model=vit_tiny_32"], 512),
    "alexnet": (["model=alexnet", "data.image_size=64"], 512),
    "resnet18": (["model=timm", "model.name=resnet18", "model.pretrained=false", "data.image_size=96"], 128),
    "efficientnet_lite0": (
        ["model=timm", "model.name=tf_efficientnet_lite0", "model.pretrained=false", "data.image_size=96"],
        128,
    ),
}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
MIB = 2**20
GOAL = 0.05
HEAD = """# Estimates against the caching allocator

Written by `benchmarks/estimates_gpu.py`; do not edit. MiB at the peak of two steps and a validation on each device:
what torch's caching allocator gave out, what it reserved for that, and what `find_batch_size.py --estimate` predicts
of the latter without a device. **Null GPUs, not GPUs**: torch's CUDA code and its allocator ran, kernels did not; what
cuDNN takes for itself is not in it. The allocator reserves more than it gives out, in pages and for each stream apart.

| model | images | trainer | devices | precision | recompute | allocated | reserved | estimated | off |
|---|---:|---|---:|---|---|---:|---:|---:|---:|
"""


def cases_of(model: str, devices: int) -> dict[str, dict[str, Any]]:
    """Every row of a model on a number of devices, without its figures."""
    rows = {}
    for trainer, precision, recompute in itertools.product(("ddp", "fsdp"), PRECISIONS, (False, True)):
        named = {"model": model, "trainer": trainer, "devices": devices, "precision": precision}
        row = {**named, "recompute": recompute, "batch": MODELS[model][1]}
        rows[", ".join(str(value) for value in row.values())] = row
    return rows


def plan_of(row: dict[str, Any], folder: str) -> Any:
    from lockstep.batch_size.estimate import stated_plan
    from lockstep.config.compose import chosen_options, compose, plain
    from lockstep.runs.config import read_only

    words = [*DATA, *MODELS[row["model"]][0], f"trainer={row['trainer']}", f"trainer.devices={row['devices']}"]
    words += [f"trainer.precision={row['precision']}", f"trainer.activation_checkpointing={row['recompute']}"]
    cfg = compose("train", [*words, "test=false", f"paths.data_dir={folder}", f"paths.log_dir={folder}"])
    return stated_plan(read_only(plain(cfg)), chosen_options(cfg))


def estimated(plan: Any, batch: int) -> int:
    from lockstep.batch_size import estimate
    from lockstep.training.rank import prepare_process

    facts = estimate.stated_facts(plan.config)
    prepare_process(plan)
    estimate.peak_bytes(plan, facts, 2)  # as the script does: what is done once in a process is not counted
    return max(estimate.peak_bytes(plan, facts, batch).values())


def page(rows: dict[str, dict[str, Any]]) -> str:
    text = HEAD
    for row in rows.values():
        cells = [row["model"], row["batch"], row["trainer"], row["devices"], row["precision"]]
        cells += ["yes" if row["recompute"] else "no", *(f"{row[key] / MIB:.0f}" for key in KEYS)]
        cells.append(f"{error(row):+.1%}")
        text += "| " + " | ".join(map(str, cells)) + " |\n"
    text += "\n| goal | wanted | measured | |\n|---|---|---|---|\n"
    off = [abs(error(row)) for row in rows.values()]
    within = sum(each <= GOAL for each in off)
    measured = f"{within} of {len(off)} rows; worst {max(off):.1%}"
    text += f"| off from reserved by at most | {GOAL:.0%} | {measured} | {verdict(within == len(off))} |\n"
    return text


MEASURED = ("allocated", "reserved")
KEYS = (*MEASURED, "estimated")


def error(row: dict[str, Any]) -> float:
    return row["estimated"] / row["reserved"] - 1


def verdict(held: bool) -> str:
    return "holds" if held else "not reached"


def main() -> None:
    from memory_runs import allocator_peaks

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--measured", action="store_true", help="estimate anew what was measured, and measure nothing")
    given = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for devices, model in itertools.product(given.devices, given.models):
        with tempfile.TemporaryDirectory() as folder:
            chosen = cases_of(model, devices)
            plans = {name: plan_of(row, folder) for name, row in chosen.items()}
            cases = [(plans[name], row["batch"]) for name, row in chosen.items()]
            if given.measured:
                peaks_of = [
                    [rows[name][key] for key in MEASURED] if name in rows else "not measured" for name in chosen
                ]
            else:
                peaks_of = allocator_peaks(cases, Path(folder), devices)
            for (name, row), seen in zip(chosen.items(), peaks_of, strict=True):
                if isinstance(seen, str):
                    print(f"{name}: refused: {seen}", flush=True)
                    continue
                peaks = dict(zip(KEYS, (*seen, estimated(plans[name], row["batch"])), strict=True))
                rows[name] = {**row, **peaks}
                print(
                    f"{name}: {error(rows[name]):+.1%} {[round(v / MIB) for v in peaks.values()]}",
                    flush=True,
                )
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
