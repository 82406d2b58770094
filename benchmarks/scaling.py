"""A model of step time for DDP and FSDP over N ranks: fitted here, checked against published figures, asked for EC2.

    python benchmarks/scaling.py               # measure 1, 2 and 4 ranks, fit, write the results and scaling.md
    python benchmarks/scaling.py --no-measure  # from the measurements that results/scaling.json holds

Ranks are CPU processes over gloo with one thread each; where there are more ranks than cores they share them, and the
model says so. What it predicts for GPUs rests on the assumptions that scaling.md lists, not on a measurement.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measuring import HERE, provenance, run_record, save
from scaling_model import CHECKS, WORKLOAD, predictions, published_checks
from scaling_page import page
from scipy.optimize import nnls

RESULT = HERE / "results" / "scaling.json"
RANKS, BATCHES, STEPS = (1, 2, 4), (8, 32), 16
UNITS = 7  # vit_tiny_32: six blocks and the rest, each gathered twice and reduced once by FSDP
NAMES = ("seconds of one core per image", "seconds of one core per step", "seconds per byte", "seconds per message")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-measure", action="store_true")
    kept = parser.parse_args().no_measure
    measured = (json.loads(RESULT.read_text())["measured"] if RESULT.exists() else []) if kept else measure()
    cores = provenance.available_cores()
    coefficients, rows = fit(measured, cores)
    content: dict[str, Any] = {
        "measured": measured,
        "fitted": dict(zip(NAMES, coefficients, strict=False)),
        "fit_rows": rows,
        "fit_cores": cores,
        "checks": published_checks(),
        "published": CHECKS,
        "workload": WORKLOAD,
        "predictions": predictions(),
    }
    save("scaling", [], **content)
    (HERE / "scaling.md").write_text(page(json.loads(RESULT.read_text())))


def measure() -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in RANKS:
            for strategy in ("ddp", "fsdp") if ranks > 1 else ("none",):
                for batch in BATCHES:
                    rows.append(one_run(Path(scratch), strategy, ranks, batch))
                    print(rows[-1], flush=True)
    return rows


def one_run(scratch: Path, strategy: str, ranks: int, batch: int) -> dict[str, Any]:
    trainer = ["trainer=cpu"] if ranks == 1 else [f"trainer={strategy}_sim", f"trainer.devices={ranks}"]
    words = ["model=vit_tiny_32", "data=synthetic", f"data.global_batch_size={ranks * batch}", "test=false",
             "trainer.max_epochs=1", "trainer.limit_val_batches=0", "trainer.num_threads=1", "data.num_val=10",
             f"data.num_images={10 + STEPS * ranks * batch}"]  # fmt: skip
    record = run_record(scratch, [*words, *trainer])
    seconds = record["throughput"]["step_seconds"]
    return {"strategy": strategy, "ranks": ranks, "per_rank_batch": batch, "step_s": seconds["p50"],
            "step_p95_s": seconds["p95"], "parameters": record["num_parameters"]}  # fmt: skip


def features(row: dict[str, Any], cores: int) -> list[float]:
    """What each coefficient is multiplied by: images and steps per core, bytes and messages that a rank waits for."""
    n, share = row["ranks"], row["ranks"] / min(row["ranks"], cores)
    ring = 4 * row["parameters"] * (n - 1) / n
    passes, messages = {"none": (0, 0), "ddp": (2, 2 * (n - 1)), "fsdp": (3, 3 * UNITS * (n - 1))}[row["strategy"]]
    return [share * row["per_rank_batch"], share, share * passes * ring, share * messages]


def fit(measured: list[dict[str, Any]], cores: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Non-negative least squares on relative errors; the rows with what the model says. Nothing from nothing."""
    if not measured:
        return [], []
    seconds = np.array([row["step_s"] for row in measured])
    matrix = np.array([features(row, cores) for row in measured])
    scale = np.abs(matrix).max(axis=0)
    solution, _ = nnls(matrix / scale / seconds[:, None], np.ones(len(seconds)))
    modelled = matrix / scale @ solution
    rows = [{**row, "model_s": round(float(m), 5), "error": round(float(m / s - 1), 3)}
            for row, m, s in zip(measured, modelled, seconds, strict=True)]  # fmt: skip
    return [float(value) for value in solution / scale], rows


if __name__ == "__main__":
    main()
