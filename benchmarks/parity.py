"""Every strategy trains as one process does: the same seed, order, augmentation and global batch.

    make parity          (python benchmarks/parity.py --help)

Writes benchmarks/parity.md; ends with 1 if a row differs by more than 1e-9 in float64, if a
training does not change its loss, or if a seeded fault goes unnoticed.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import lightning
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "harness"))

from parity_runs import FAULTS, GLOBAL_BATCH, MODELS, STEPS, Case, run_bare_loop, train_all

from local_ranks import local_cluster, run_ranks
from strategy_runs import mean_losses, worst

HERE = Path(__file__).resolve().parent
# This is a relative difference, in float64.
TOLERANCE = 1e-9
# The loss must change by this share in some step, because equal runs that train nothing prove
# nothing. It need not fall: augmentation and mixup decide how far it falls in a few steps.
CHANGE = 0.05
# All cases of a model run in the same ranks, and end in this time.
TIMEOUT_S = 1800.0


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
    Row("ddp_model_parallel_sim, 2 ranks of 2 stages", "ddp_model_parallel", 2),
    Row("one process, fine-tuning", "one_process", fine_tuning=True),
    Row("ddp_sim, 2 ranks, fine-tuning", "ddp", 2, fine_tuning=True),
    Row("fsdp_sim, 2 ranks, fine-tuning", "fsdp", 2, fine_tuning=True),
    Row("one process, mixup", "one_process", mixup=True),
    Row("ddp_sim, 2 ranks, 4-step accumulation, mixup", "ddp", 2, 4, mixup=True),
    Row("fsdp_sim, 2 ranks, mixup", "fsdp", 2, mixup=True),
)


@dataclass(frozen=True)
class Result:
    """The loss of each global batch, and the final weights."""

    losses: list[float]
    weights: dict[str, np.ndarray]

    @classmethod
    def from_ranks(cls, case: Case, ranks: Iterable[dict]) -> "Result":
        results = list(ranks)
        return cls(mean_losses(results, case.accumulate), results[0]["weights"])

    def distance(self, expected: "Result") -> "Distance":
        pairs = zip(self.losses, expected.losses, strict=True)
        losses = max(abs(loss - reference) / abs(reference) for loss, reference in pairs)
        return Distance(losses, worst(self.weights, expected.weights))

    @property
    def loss_complaint(self) -> str:
        """Return a complaint if the training has not changed its loss; else an empty text."""
        first = self.losses[0]
        if max(abs(loss - first) for loss in self.losses) < CHANGE * abs(first):
            return "**trains nothing**"
        return ""


@dataclass(frozen=True)
class Distance:
    """The largest relative difference over steps, and over weight tensors (by their norms)."""

    losses: float
    weights: float

    @property
    def is_noticed(self) -> bool:
        return max(self.losses, self.weights) > TOLERANCE

    @property
    def cells(self) -> str:
        return f"{self.losses:.1e} | {self.weights:.1e}"


@dataclass(frozen=True)
class Line:
    """A line of a table, and whether it says what it must."""

    text: str
    is_right: bool


def train_cases(cases: list[Case], ranks: int) -> list[Result]:
    """Train the cases one after the other in `ranks` processes."""
    if ranks == 1:
        by_rank = [train_all(local_cluster(0, 1, 0), cases)]
    else:
        by_rank = run_ranks(train_all, ranks, cases, timeout_s=TIMEOUT_S)
    by_case = zip(*by_rank, strict=True)
    return [Result.from_ranks(case, results) for case, results in zip(cases, by_case, strict=True)]


def compare(model: str, cache_dir: str) -> list[Line]:
    """Return the lines of a model's rows."""
    results: dict[Row, Result] = {}
    for ranks in sorted({row.ranks for row in ROWS}):
        rows = [row for row in ROWS if row.ranks == ranks]
        cases = [build_case(row, model, cache_dir) for row in rows]
        results.update(zip(rows, train_cases(cases, ranks), strict=True))

    references: dict[Case, Result] = {}
    lines = []
    for row in ROWS:
        # BatchNorm sees micro-batches, so only a loop over the same micro-batches can agree.
        accumulate = row.accumulate if model == "alexnet_bn" else 1
        case = Case(
            model,
            accumulate=accumulate,
            fine_tuning=row.fine_tuning,
            mixup=row.mixup,
            cache_dir=cache_dir,
        )
        if case not in references:
            references[case] = Result.from_ranks(case, [run_bare_loop(case)])
        lines.append(build_line(row, results[row], case, references[case]))
    return lines


def build_case(row: Row, model: str, cache_dir: str) -> Case:
    return Case(
        model, row.strategy, row.accumulate, row.fine_tuning, row.mixup, cache_dir=cache_dir
    )


def build_line(row: Row, result: Result, case: Case, reference: Result) -> Line:
    """Compare a row with the bare loop of `case`."""
    distance = result.distance(reference)
    verdict = result.loss_complaint or "equal"
    if distance.is_noticed:
        verdict = "**differs**"
    compared_with = "bare loop"
    if case.accumulate > 1:
        compared_with += f", {case.accumulate} micro-batches"
    losses = f"{result.losses[0]:.3f} → {np.mean(result.losses[-3:]):.3f}"
    cells = [case.model, row.name, compared_with, distance.cells, losses, verdict]
    return Line(f"| {' | '.join(cells)} |", verdict == "equal")


def catch_faults(cache_dir: str) -> list[Line]:
    """Return the difference that each seeded fault makes."""
    reference_case = Case("small_cnn", cache_dir=cache_dir)
    reference = Result.from_ranks(reference_case, [run_bare_loop(reference_case)])
    cases = [Case("small_cnn", "allreduce", fault=fault, cache_dir=cache_dir) for fault in FAULTS]
    lines = []
    for fault, result in zip(FAULTS, train_cases(cases, 2), strict=True):
        distance = result.distance(reference)
        noticed = "yes" if distance.is_noticed else "**no**"
        lines.append(Line(f"| {fault} | {distance.cells} | {noticed} |", distance.is_noticed))
    return lines


PAGE = """# Parity: every strategy against one process

Written by `make parity`; do not edit. Largest relative difference of the losses of {steps} steps and of the final
weights (SGD with momentum, global batch {batch}, dropout off, crop and flip on) from a bare PyTorch loop, in float64,
which must stay below {tolerance:g}.

{date} · {machine} · torch {torch} · lightning {lightning} · `make parity`

| model | strategy | compared with | losses | weights | loss | verdict |
|---|---|---|---|---|---|---|
{rows}

AlexNet's convolutions have a quarter of their width, and its head 96 neurons. alexnet_bn runs with synchronised
BatchNorm; under accumulation its statistics are those of a micro-batch by nature, so it is compared with a bare loop
over the same micro-batches. The last loss is the mean of three. Fine-tuning: first layers frozen, layer decay 0.8, 1.5
times the learning rate for the head, weight decay on matrices alone; compared with a bare loop that does the same.
Mixup: half of the pairs of neighbours mixed.

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
    rows: list[Line] = []
    with tempfile.TemporaryDirectory() as cache_dir:
        for model in options.models:
            rows += compare(model, cache_dir)
        faults = catch_faults(cache_dir)
    text = PAGE.format(
        steps=STEPS,
        batch=GLOBAL_BATCH,
        tolerance=TOLERANCE,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=f"{platform.machine()}, {torch.get_num_threads()} thread a rank",
        torch=torch.__version__,
        lightning=lightning.__version__,
        rows="\n".join(row.text for row in rows),
        faults="\n".join(fault.text for fault in faults),
    )
    (options.out or HERE / "parity.md").write_text(text)
    print(text)
    return 0 if all(line.is_right for line in [*rows, *faults]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
