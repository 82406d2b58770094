"""Every strategy trains as one process does: 20 steps, the same seed, order, augmentation and global batch.

    make parity          (python benchmarks/parity.py --help)

Writes benchmarks/results/parity.json and benchmarks/parity.md; ends with 1 if a row differs by more than 1e-9
in float64, if a loss does not fall by 20 %, or if a seeded fault goes unnoticed.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "harness"))

from parity_runs import FAULTS, GLOBAL_BATCH, MODELS, STEPS, Case, bare_loop, lightning_run

from local_ranks import local_cluster, run_ranks

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-9  # relative, in float64
FALL = 0.20  # what the loss must lose, so that the comparison means something


@dataclass(frozen=True)
class Row:
    name: str
    strategy: str
    ranks: int = 1
    accumulate: int = 1
    fine_tuning: bool = False
    mixup: bool = False


ROWS = (
    Row("one process", "one_process"),
    Row("one process, 4-step accumulation", "one_process", accumulate=4),
    Row("ddp_sim, 2 ranks", "ddp", 2),
    Row("ddp_sim, 2 ranks, 4-step accumulation", "ddp", 2, 4),
    Row("fsdp_sim, 2 ranks", "fsdp", 2),
    Row("fsdp_sim, 2 ranks, 4-step accumulation", "fsdp", 2, 4),
    Row("fsdp_sim, 4 ranks", "fsdp", 4),
    Row("allreduce_sim, 2 ranks", "allreduce", 2),
    Row("model_parallel [cpu,cpu]", "model_parallel"),
    Row("one process, fine-tuning", "one_process", fine_tuning=True),
    Row("ddp_sim, 2 ranks, fine-tuning", "ddp", 2, fine_tuning=True),
    Row("fsdp_sim, 2 ranks, fine-tuning", "fsdp", 2, fine_tuning=True),
    Row("one process, mixup", "one_process", mixup=True),
    Row("ddp_sim, 2 ranks, 4-step accumulation, mixup", "ddp", 2, 4, mixup=True),
    Row("fsdp_sim, 2 ranks, mixup", "fsdp", 2, mixup=True),
)


@dataclass
class Result:
    model: str
    row: str
    compared_with: str
    difference: dict[str, dict[str, float]] = field(default_factory=dict)  # precision → losses, weights
    first_loss: float = 0.0
    last_loss: float = 0.0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return max(self.difference["64-true"].values()) <= TOLERANCE and self.last_loss <= (1 - FALL) * self.first_loss


def run(case: Case, ranks: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """The loss of each global batch, and the final weights."""
    if ranks > 1:
        parts = run_ranks(lightning_run, ranks, case)
    elif case.strategy == "bare":
        parts = [bare_loop(case)]
    else:
        parts = [lightning_run(local_cluster(0, 1, 0), case)]
    losses = np.mean([part["losses"] for part in parts], axis=0).reshape(STEPS, case.accumulate).mean(1)
    return losses.tolist(), parts[0]["weights"]


def differences(found: tuple[list[float], dict], expected: tuple[list[float], dict]) -> dict[str, float]:
    """The largest relative difference over steps, and over weight tensors (by their norms)."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(found[0], expected[0], strict=True))
    assert found[1].keys() == expected[1].keys(), found[1].keys() ^ expected[1].keys()
    pairs = [(found[1][name].ravel(), expected[1][name].ravel()) for name in expected[1]]
    weights = max(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30) for a, b in pairs)
    return {"losses": float(losses), "weights": float(weights)}


def compare(model: str, cache_dir: str) -> tuple[list[Result], dict[str, float]]:
    """The rows of a model, and how far float32 by itself takes the bare loop from float64."""
    results: dict[str, Result] = {}
    bare: dict[str, Any] = {}
    for precision in ("64-true", "32-true"):
        expected: dict[tuple[int, bool, bool], Any] = {}
        for row in ROWS:
            # BatchNorm sees micro-batches: only one process with the same ones can agree.
            accumulate = row.accumulate if model == "alexnet_bn" else 1
            case = Case(model, precision, row.strategy, row.accumulate, row.fine_tuning, row.mixup, cache_dir=cache_dir)
            kind = (accumulate, row.fine_tuning, row.mixup)
            if kind not in expected:
                alone = replace(case, strategy="bare", accumulate=accumulate)
                expected[kind] = run(alone, 1)
            started = time.perf_counter()
            found = run(case, row.ranks)
            label = "bare loop" if accumulate == 1 else f"bare loop, {accumulate} micro-batches"
            result = results.setdefault(row.name, Result(model, row.name, label))
            result.difference[precision] = differences(found, expected[kind])
            if precision == "64-true":
                result.first_loss, result.last_loss = found[0][0], float(np.mean(found[0][-3:]))
                result.seconds = round(time.perf_counter() - started, 2)
        bare[precision] = expected[1, False, False]
    return list(results.values()), differences(bare["32-true"], bare["64-true"])


def catch_faults(cache_dir: str) -> dict[str, dict[str, Any]]:
    """Each seeded fault with the difference that it makes; it is caught where that exceeds the tolerance."""
    expected = run(Case("small_cnn", "64-true", "bare", cache_dir=cache_dir), 1)
    caught = {}
    for fault in FAULTS:
        found = run(Case("small_cnn", "64-true", "allreduce", fault=fault, cache_dir=cache_dir), 2)
        difference = differences(found, expected)
        caught[fault] = {**difference, "caught": max(difference.values()) > TOLERANCE}
    return caught


def page(content: dict[str, Any]) -> str:
    """The table in markdown, of what results/parity.json holds."""
    rounding = content["float32_against_float64"]
    own = "; ".join(f"{m} {r['losses']:.1e} in losses, {r['weights']:.1e} in weights" for m, r in rounding.items())
    lines = [
        "# Parity: every strategy against one process",
        "",
        f"Written by `make parity`; do not edit. Largest relative difference of the losses of {STEPS} steps and of the "
        f"final weights (SGD with momentum, global batch {GLOBAL_BATCH}, dropout off, crop and flip on) from a bare "
        f"PyTorch loop. float64 must stay below {TOLERANCE:g}; float32 is for comparison.",
        "",
        f"{content['date']} · {content['machine']} · torch {content['torch']} · lightning {content['lightning']} · "
        f"`{content['command']}` · {content['seconds']:.0f} s",
        "",
        "| model | strategy | compared with | losses, float64 | weights, float64 | losses, float32 | weights, float32 "
        "| loss | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in content["rows"]:
        double, single = r["difference"]["64-true"], r["difference"].get("32-true", {})
        numbers = [double["losses"], double["weights"], single.get("losses"), single.get("weights")]
        cells = ["–" if n is None else f"{n:.1e}" for n in numbers]
        lines.append(
            f"| {r['model']} | {r['row']} | {r['compared_with']} | {' | '.join(cells)} | "
            f"{r['first_loss']:.3f} → {r['last_loss']:.3f} | {'equal' if r['passed'] else '**differs**'} |"
        )
    lines += [
        "",
        f"float32 alone takes the bare loop this far from the bare loop in float64: {own}.",
        "",
        "alexnet_bn runs with synchronised BatchNorm; under accumulation its statistics are those of a micro-batch by "
        "nature, so it is compared with a bare loop over the same micro-batches. The last loss is the mean of three.",
        "Fine-tuning: first layers frozen, layer decay 0.8, 1.5 times the learning rate for the head, weight decay on "
        "matrices alone; compared with a bare loop that does the same. Mixup: half of the pairs of neighbours mixed.",
        "",
        "| seeded fault (small_cnn, allreduce_sim, float64) | losses | weights | noticed |",
        "|---|---|---|---|",
    ]
    for fault, seen in content["faults"].items():
        verdict = "yes" if seen["caught"] else "**no**"
        lines.append(f"| {fault} | {seen['losses']:.1e} | {seen['weights']:.1e} | {verdict} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare every strategy with one process.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, help="folder for page and results, instead of the repository's own")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    started = time.perf_counter()
    results: list[Result] = []
    rounding: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as cache_dir:
        for model in options.models:
            rows, rounding[model] = compare(model, cache_dir)
            results += rows
            print(f"{model}: {sum(r.passed for r in results if r.model == model)} rows equal", flush=True)
        faults = catch_faults(cache_dir)
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": machine(), "torch": torch.__version__,
        "lightning": lightning.__version__, "command": "make parity", "seconds": time.perf_counter() - started,
    }  # fmt: skip
    passed = all(r.passed for r in results) and all(seen["caught"] for seen in faults.values())
    place, file = (options.out or HERE) / "results", (options.out or HERE) / "parity.md"
    for folder in (place, file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    content = {
        **facts, "passed": passed, "tolerance": TOLERANCE, "rows": [{**asdict(r), "passed": r.passed} for r in results],
        "float32_against_float64": rounding, "faults": faults,
    }  # fmt: skip
    (place / "parity.json").write_text(json.dumps(content, indent=1) + "\n")
    text = page(content)
    file.write_text(text)
    print(text)
    return 0 if passed else 1


def machine() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} thread a rank"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
