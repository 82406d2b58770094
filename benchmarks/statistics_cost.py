"""What hardware statistics and throughput cost the training steps, by what they take and by runs with and without.

    python benchmarks/statistics_cost.py [--pairs 6] [--seconds 4]

Writes benchmarks/results/statistics_cost.json and logbook/measurements/statistics_cost.md.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/statistics_cost.json", ROOT / "logbook/measurements/statistics_cost.md"
sys.path.insert(0, str(ROOT / "src"))

from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402

from classifier import ImageClassifier  # noqa: E402
from data.synthetic import SyntheticDataModule  # noqa: E402
from lockstep.callbacks.hardware_stats import HardwareStats  # noqa: E402
from lockstep.callbacks.throughput import Throughput  # noqa: E402
from lockstep.runs.provenance import code_state  # noqa: E402
from models.small_cnn import SmallCNN  # noqa: E402
from models.timm import TimmModel  # noqa: E402

GOAL = 0.01
HOOKS = ("on_train_batch_start", "on_before_backward", "on_train_batch_end")
VIT = {"name": "vit_tiny_patch16_224", "pretrained": False, "patch_size": 4, "embed_dim": 192, "depth": 12}
NETS = {  # net, images of 32 px a step
    "small_cnn": (partial(SmallCNN, num_classes=10, image_size=32, channels=3), 64),
    "vit_tiny_32": (partial(TimmModel, num_classes=10, image_size=32, channels=3, **VIT), 64),
}


class Clock(pl.Callback):
    """Seconds between the ends of neighbouring training steps."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())

    @property
    def steps(self) -> list[float]:
        return [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)][5:]


def timed(callback: pl.Callback, spent: list[float]) -> pl.Callback:
    """The callback, with the seconds of each of its calls in a step appended to `spent`."""
    for name in HOOKS:
        own = getattr(callback, name)

        def hook(*arguments: Any, own: Any = own) -> None:
            started = time.perf_counter()
            own(*arguments)
            spent.append(time.perf_counter() - started)

        setattr(callback, name, hook)
    return callback


def fit(name: str, steps: int, folder: Path, measured: bool) -> dict[str, Any]:
    """One training; with all statistics on where `measured`."""
    make, batch = NETS[name]
    torch.manual_seed(0)
    data = SyntheticDataModule(
        image_size=32, num_images=batch * (steps + 1) + 8, num_val=8, num_test_images=8, global_batch_size=batch,
        cache_dir=folder / "cache",
    )  # fmt: skip
    data.prepare()
    data.place(rank=0, world_size=1)
    module = ImageClassifier(make(), partial(torch.optim.AdamW, lr=1e-3), num_classes=10)
    clock, spent = Clock(), []
    stats = HardwareStats(folder / f"run-{time.monotonic_ns()}", tensorboard_interval_s=1.0)
    callbacks = [clock]
    if measured:
        callbacks += [timed(Throughput(batch, measure_peak=False), spent), timed(stats, spent)]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, limit_val_batches=0, callbacks=callbacks,
        logger=TensorBoardLogger(folder, "tensorboard", "") if measured else False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, log_every_n_steps=10**6,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    found = {"mean_step_s": statistics.fmean(clock.steps), "hooks_s": sum(spent), "steps": len(clock.marks)}
    if measured:
        found["thread_s"], found["wall_s"] = stats.sampler.seconds_busy, clock.marks[-1] - clock.marks[0]
        found["samples"] = len(next(iter(stats.sampler.values.values())))
    return found


def measure(name: str, pairs: int, seconds: float, folder: Path) -> dict[str, Any]:
    steps = max(20, round(seconds / fit(name, 30, folder, False)["mean_step_s"]))
    found: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    for number in range(pairs):
        for arm in ("with", "without") if number % 2 else ("without", "with"):
            found[arm].append(fit(name, steps, folder, arm == "with"))
    step = statistics.median(run["mean_step_s"] for run in found["without"])
    taken = [(run["hooks_s"] + run["thread_s"]) / run["wall_s"] for run in found["with"]]
    ratios = [on["mean_step_s"] / off["mean_step_s"] for on, off in zip(found["with"], found["without"], strict=True)]
    hooks = statistics.median(run["hooks_s"] / run["steps"] for run in found["with"])
    sample = statistics.median(run["thread_s"] / run["samples"] for run in found["with"])
    return {
        "net": name, "steps_per_run": steps, "step_s": step, "hooks_s_per_step": hooks, "sample_s": sample,
        "share_taken": statistics.median(taken), "with_over_without": ratios, "runs": found,
    }  # fmt: skip


def page(found: dict[str, Any]) -> str:
    lines = [
        "# What the statistics cost",
        "",
        "Written by `benchmarks/statistics_cost.py`; do not edit. One process trains on all "
        f"{found['cores']} cores. *Taken*: seconds inside the callbacks' hooks of every step, TensorBoard's scalars "
        "once a second included (ten times as often as by default), and of the sampling thread (a sample a second), "
        "over the seconds of training, as if the thread always stood in training's way. *With over without*: mean "
        "steps of neighbouring runs, in both orders; what it shows beyond *taken* is this machine's noise.",
        "",
        "| net | step, ms | hooks, µs a step | a sample, ms | taken | goal ≤ 1 % | with over without, median (all) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        ratios = row["with_over_without"]
        every = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
        lines.append(
            f"| {row['net']} | {1000 * row['step_s']:.1f} | {1e6 * row['hooks_s_per_step']:.0f} | "
            f"{1000 * row['sample_s']:.1f} | {row['share_taken']:.2%} | "
            f"{'holds' if row['share_taken'] <= GOAL else 'not reached'} | {statistics.median(ratios):.3f} ({every}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = [measure(net, given.pairs, given.seconds, Path(name)) for net in NETS]
    facts = {"code": code_state(ROOT)["commit"], "cores": os.cpu_count(), "torch": torch.__version__}
    found = {**facts, "load_average_at_end": os.getloadavg()[0], "rows": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
