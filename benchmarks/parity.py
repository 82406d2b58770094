"""Every strategy trains as one process does: 20 steps, the same seed, order, augmentation and
global batch.

    make parity          (python benchmarks/parity.py --help)

Writes benchmarks/parity.md; ends with 1 if a row differs by more than 1e-9 in float64, if a
training does not change its loss, or if a seeded fault goes unnoticed.
"""

import argparse
import platform
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import lightning
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "harness"))

from parity_runs import FAULTS, GLOBAL_BATCH, MODELS, STEPS, Case, bare_loop, lightning_run

from local_ranks import local_cluster, run_ranks

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-9  # relative, in float64
# The loss must change so much in some step: equal runs that train nothing would prove nothing. How
# far it falls in 20 steps is another question, which augmentation and mixup decide.
CHANGE = 0.05


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


def run(case: Case, ranks: int) -> "Result":
    """The loss of each global batch, and the final weights."""
    if ranks > 1:
        parts = run_ranks(lightning_run, ranks, case)
    elif case.strategy == "bare":
        parts = [bare_loop(case)]
    else:
        parts = [lightning_run(local_cluster(0, 1, 0), case)]
    losses = (
        np.mean([part["losses"] for part in parts], axis=0).reshape(STEPS, case.accumulate).mean(1)
    )
    return losses.tolist(), parts[0]["weights"]


Result = tuple[list[float], dict[str, np.ndarray]]  # losses of the steps, final weights


def differences(result: Result, expected: Result) -> dict[str, float]:
    """The largest relative difference over steps, and over weight tensors (by their norms)."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(result[0], expected[0], strict=True))
    weights, expected_weights = result[1], expected[1]
    assert weights.keys() == expected_weights.keys(), weights.keys() ^ expected_weights.keys()
    distances = []
    for name, tensor in expected_weights.items():
        distance = np.linalg.norm(weights[name].ravel() - tensor.ravel())
        distances.append(distance / max(np.linalg.norm(tensor.ravel()), 1e-30))
    return {"losses": float(losses), "weights": float(max(distances))}


def verdict_of(losses: list[float], distance: dict[str, float]) -> str:
    """Return "equal", or in bold what is wrong."""
    if max(distance.values()) > TOLERANCE:
        return "**differs**"
    if max(abs(loss - losses[0]) for loss in losses) < CHANGE * abs(losses[0]):
        return "**trains nothing**"
    return "equal"


def compare(model: str, cache_dir: str) -> list[tuple[str, bool]]:
    """Return each row of the table, and whether it passed."""
    results = []
    references: dict[tuple[int, bool, bool], Result] = {}
    for row in ROWS:
        # BatchNorm sees micro-batches: only one process with the same ones can agree.
        accumulate = row.accumulate if model == "alexnet_bn" else 1
        case = Case(
            model, row.strategy, row.accumulate, row.fine_tuning, row.mixup, cache_dir=cache_dir
        )
        kind = (accumulate, row.fine_tuning, row.mixup)
        if kind not in references:
            references[kind] = run(replace(case, strategy="bare", accumulate=accumulate), 1)
        result = run(case, row.ranks)
        distance = differences(result, references[kind])
        verdict = verdict_of(result[0], distance)
        reference = "bare loop" if accumulate == 1 else f"bare loop, {accumulate} micro-batches"
        first = result[0][0]
        last = float(np.mean(result[0][-3:]))
        cells = [
            model,
            row.name,
            reference,
            f"{distance['losses']:.1e}",
            f"{distance['weights']:.1e}",
            f"{first:.3f} → {last:.3f}",
            verdict,
        ]
        results.append((f"| {' | '.join(cells)} |", verdict == "equal"))
    return results


def catch_faults(cache_dir: str) -> dict[str, dict[str, float]]:
    """Return the difference that each seeded fault makes.

    It is noticed where that exceeds the tolerance.
    """
    expected = run(Case("small_cnn", "bare", cache_dir=cache_dir), 1)
    cases = {
        fault: Case("small_cnn", "allreduce", fault=fault, cache_dir=cache_dir) for fault in FAULTS
    }
    return {fault: differences(run(case, 2), expected) for fault, case in cases.items()}


PAGE = """# Parity: every strategy against one process

Written by `make parity`; do not edit. Largest relative difference of the losses of {steps} steps and of the final
weights (SGD with momentum, global batch {batch}, dropout off, crop and flip on) from a bare PyTorch loop, in float64,
which must stay below {tolerance:g}.

{date} · {machine} · torch {torch} · lightning {lightning} · `make parity`

| model | strategy | compared with | losses | weights | loss | verdict |
|---|---|---|---|---|---|---|
{rows}

alexnet_bn runs with synchronised BatchNorm; under accumulation its statistics are those of a micro-batch by nature, so
it is compared with a bare loop over the same micro-batches. The last loss is the mean of three. Fine-tuning: first
layers frozen, layer decay 0.8, 1.5 times the learning rate for the head, weight decay on matrices alone; compared with
a bare loop that does the same. Mixup: half of the pairs of neighbours mixed.

| seeded fault (small_cnn, allreduce_sim) | losses | weights | noticed |
|---|---|---|---|
{faults}
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare every strategy with one process.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, help="file to write, in place of benchmarks/parity.md")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: list[tuple[str, bool]] = []
    with tempfile.TemporaryDirectory() as cache_dir:
        for model in options.models:
            results += compare(model, cache_dir)
        faults = catch_faults(cache_dir)
    missed = [fault for fault, seen in faults.items() if max(seen.values()) <= TOLERANCE]
    seeded = [
        f"| {fault} | {seen['losses']:.1e} | {seen['weights']:.1e} | {'**no**' if fault in missed else 'yes'} |"
        for fault, seen in faults.items()
    ]
    text = PAGE.format(
        steps=STEPS, batch=GLOBAL_BATCH, tolerance=TOLERANCE, date=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=f"{platform.machine()}, {torch.get_num_threads()} thread a rank", torch=torch.__version__,
        lightning=lightning.__version__, rows="\n".join(row for row, _ in results), faults="\n".join(seeded),
    )  # fmt: skip
    (options.out or HERE / "parity.md").write_text(text)
    print(text)
    return 1 if missed or not all(passed for _, passed in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
