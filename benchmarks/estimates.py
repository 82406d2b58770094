"""What `find_batch_size.py --estimate` predicts on fake tensors, against the tracked bytes of real ranks.

    python benchmarks/estimates.py [--models …] [--batch 16]

Writes benchmarks/results/estimates.json, where rows that are not measured this time stay, and
logbook/measurements/estimates.md.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "harness")]
RESULTS, PAGE = ROOT / "benchmarks/results/estimates.json", ROOT / "logbook/measurements/estimates.md"

DATA = ["data=synthetic", "data.num_images=600", "data.num_test_images=20", "data.eval_batch_size=4"]
MODELS = {
    "vit_tiny_32": ["model=vit_tiny_32"],
    "small_cnn": ["model=small_cnn"],
    "alexnet": ["model=alexnet", "data.image_size=64"],
    "alexnet_bn": ["model=alexnet_bn", "data.image_size=127"],
    "airbench": ["model=airbench"],
}
WORLDS = [("cpu", 1), ("ddp_sim", 2), ("ddp_sim", 4), ("fsdp_sim", 2), ("fsdp_sim", 4)]
TRIES = 3  # gloo lets go of a buffer sooner or later: the smallest peak of a few is that of the training
MIB = 2**20
HEAD = """# Estimates against real ranks

Written by `benchmarks/estimates.py`; do not edit. MiB of tracked tensor bytes at the peak of a step, on fake tensors in
a fake process group and in real processes, {batch} images for each. The phase is the one in which the peak lies.

| model | trainer | ranks | real | phase | estimated | phase | error |
|---|---|---|---|---|---|---|---|
"""


def compare(options: list[str], trainer: str, ranks: int, batch: int, folder: Path) -> dict[str, Any]:
    from lockstep.batch_size import estimate
    from memory_runs import peaks, planned

    more = [f"trainer.devices={ranks}"] if ranks > 1 else []
    plan = planned([*DATA, *options, f"trainer={trainer}", *more], folder)
    first = peaks(plan, folder, ranks, [batch] * TRIES)[0]
    real = {phase: min(tried[phase] for tried in first) for phase in first[0]}
    facts = {"num_classes": 10, "image_size": plan.config["data"]["image_size"], "channels": 3}
    if ranks > 1:
        estimate.peak_bytes(plan, facts, 2)
    estimated = estimate.peak_bytes(plan, facts, batch)
    error = max(estimated.values()) / max(real.values()) - 1
    return {"trainer": trainer, "ranks": ranks, "batch": batch, "real": real, "estimated": estimated, "error": error}


def page(rows: dict[str, dict[str, Any]]) -> str:
    lines = [HEAD.format(batch=next(iter(rows.values()))["batch"]).rstrip("\n")]
    for row in rows.values():
        cells = [row["model"], row["trainer"], row["ranks"]]
        for phases in (row["real"], row["estimated"]):
            phase = max(phases, key=lambda name: phases[name])
            cells += [f"{phases[phase] / MIB:.2f}", phase]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, f"{row['error']:+.2%}"]) + " |")
    off = {name: row["error"] for name, row in rows.items() if abs(row["error"]) > 0.01}
    worst = max(abs(row["error"]) for row in rows.values())
    lines += ["", "| goal | wanted | measured | |", "|---|---|---|---|"]
    words = "all rows" if not off else f"all but {', '.join(off)}"
    lines.append(f"| off by at most | 1 % | {words} | {'not reached' if off else 'holds'} |")
    lines.append(f"| off by at most, where the peak moves | 10 % | {worst:.2%} | {_verdict(worst <= 0.1)} |")
    return "\n".join(lines) + "\n"


def _verdict(good: bool) -> str:
    return "holds" if good else "not reached"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=16)
    given = parser.parse_args()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    rows: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for model in given.models:
        for trainer, ranks in WORLDS:
            with tempfile.TemporaryDirectory() as name:
                row = compare(MODELS[model], trainer, ranks, given.batch, Path(name))
            rows[f"{model}, {trainer}, {ranks}"] = {"model": model, **row}
            print(f"{model} {trainer} {ranks}: {row['error']:+.3%}", flush=True)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
