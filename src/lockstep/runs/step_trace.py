"""Read what `lockstep.callbacks.step_digest` writes, and compare two runs. Imports no torch."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.records.proof_table import CheckResult

# Digests are compared relative to the largest norm of their kind.
DIGESTS = ("weights", "optimizer")


@dataclass(frozen=True)
class Difference:
    """The first difference of a run from its reference.

    Args:
        kind: images, learning rate, loss, weights, optimizer, steps or metric.
        name: the tensor, the metric or the image.
        amount: the difference relative to the reference; None if it is no number.
        ratio: the reference's value divided by the run's, if both are numbers.
    """

    kind: str
    step: int
    name: str = ""
    amount: float | None = None
    ratio: float | None = None

    def __str__(self) -> str:
        text = f"{self.kind} {self.name}".strip()
        return text if self.amount is None else f"{text} by {self.amount:.1e}"


def difference_result(check: str, difference: Difference, cause: str) -> CheckResult:
    """Return the line of a check that has found a difference."""
    return CheckResult(check, False, difference.step, str(difference), cause)


@dataclass(frozen=True)
class State:
    """The state of a training after an optimizer step.

    Args:
        weights: the digest of each weight and buffer.
        optimizer: the digest of each tensor of the optimizer's state.
        attributes: numbers and tensors that the module holds beside its state.
    """

    step: int
    weights: dict[str, list[Any]]
    optimizer: dict[str, list[Any]]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Step(State):
    """An optimizer step, and the state after it.

    Args:
        images: the hashes of each image, of all ranks.
        draws_random_numbers: whether rank 0 has drawn any.
        losses: the loss of each micro-batch of each rank.
    """

    epoch: int
    images: list[list[str]]
    draws_random_numbers: bool
    losses: list[float]
    learning_rates: list[float]

    @property
    def loss(self) -> float | None:
        """The mean of the losses; None without any."""
        return math.fsum(self.losses) / len(self.losses) if self.losses else None


@dataclass(frozen=True)
class TrainingSetup:
    """The loaders and the module, as `StepDigest` describes them when the training starts.

    Args:
        loaders: number of training loaders.
        without_state: classes of the loaders that cannot be resumed by a state.
        streams: the data sets that are streams.
        generators: random generators that data sets hold.
        random_calls: lines of the user's code that draw random numbers.
        batch_norms: names of the layers that normalise a rank's share of the batch.
        num_workers: the worker processes of each training loader.
        smallest_validation_batch: the samples in it; 0 if none was counted.
    """

    loaders: int = 1
    without_state: list[str] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    generators: list[str] = field(default_factory=list)
    random_calls: list[str] = field(default_factory=list)
    batch_norms: list[str] = field(default_factory=list)
    num_workers: list[int] = field(default_factory=list)
    smallest_validation_batch: int = 0


@dataclass
class StepTrace:
    """The steps, metrics and starts of all ranks of a run.

    Attributes:
        steps: each step by its number.
        metrics: the values of each rank, by stage and step.
        setup: the setup of rank 0.
        unused: parameters without a gradient in the first step, with the line that makes them.
        starts: the state at each start.
    """

    steps: dict[int, Step] = field(default_factory=dict)
    metrics: dict[tuple[str, int], list[dict[str, float]]] = field(default_factory=dict)
    setup: TrainingSetup = field(default_factory=TrainingSetup)
    unused: dict[str, str] = field(default_factory=dict)
    starts: list[State] = field(default_factory=list)

    @property
    def draws_random_numbers(self) -> bool:
        return any(step.draws_random_numbers for step in self.steps.values())

    @property
    def losses(self) -> list[float | None]:
        return [step.loss for step in self.steps.values()]

    @property
    def whole_batches(self) -> int:
        """The steps of an epoch before its first smaller batch; 0 if all are equally large."""
        sizes = [len(step.images) for step in self.steps.values() if step.epoch == 0]
        smaller = [position for position, size in enumerate(sizes) if size < sizes[0]]
        return smaller[0] if smaller else 0


def read_trace(folder: Path) -> StepTrace:
    """Return the trace of a run's folder; if a step was repeated, its last repetition counts."""
    # Rank 2 comes before rank 10.
    paths = sorted(folder.glob("steps-rank*.jsonl"), key=lambda path: (len(path.name), path.name))
    trace = _read_rank(paths[0]) if paths else StepTrace()
    for path in paths[1:]:
        _add_rank(trace, _read_rank(path))
    return trace


def _read_rank(path: Path) -> StepTrace:
    """Return the trace of one rank; the last row of a step or a metric counts."""
    trace = StepTrace()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        kind = row.pop("kind")
        if kind == "step":
            losses = row.pop("loss")
            draws = row.pop("draws")
            trace.steps[row["step"]] = Step(losses=losses, draws_random_numbers=draws, **row)
        elif kind == "start":
            trace.starts.append(State(**row))
        elif kind == "metrics":
            trace.metrics[row["stage"], row["step"]] = [row["values"]]
        elif kind == "unused":
            trace.unused[row["name"]] = row["line"]
        elif kind == "facts":
            trace.setup = TrainingSetup(**row)
    return trace


def _add_rank(trace: StepTrace, rank_trace: StepTrace) -> None:
    """Add what differs between ranks; the state and the setup are those of rank 0."""
    for number, step in trace.steps.items():
        if number in rank_trace.steps:
            step.images.extend(rank_trace.steps[number].images)
            step.losses.extend(rank_trace.steps[number].losses)
    for key, values in rank_trace.metrics.items():
        trace.metrics.setdefault(key, []).extend(values)
    trace.unused.update(rank_trace.unused)


def find_first_difference(
    run: StepTrace, reference: StepTrace, tolerance: float, *, compares_metrics: bool = True
) -> Difference | None:
    """Return where a run first differs from its reference.

    Args:
        tolerance: the largest relative difference; 0: equal to the bit.
        compares_metrics: compare what the module logs, too.
    """
    for step, expected in reference.steps.items():
        if step not in run.steps:
            return Difference("steps", step, f"end at {max(run.steps, default=0)}")
        difference = find_step_difference(run.steps[step], expected, tolerance)
        if difference:
            return difference
    if compares_metrics:
        return find_metric_difference(run, reference, tolerance)
    return None


def find_step_difference(run: Step, expected: Step, tolerance: float) -> Difference | None:
    """Return the first difference of a step: what it read, then its loss, then what it changed."""
    step = expected.step
    position = _find_first_unequal(run.images, expected.images)
    if position is not None:
        return Difference("images", step, f"number {position} of the batch")
    rates = zip(run.learning_rates, expected.learning_rates, strict=False)
    for group, (value, expected_rate) in enumerate(rates):
        if relative_difference(value, expected_rate) > tolerance:
            amount = relative_difference(value, expected_rate)
            return Difference("learning rate", step, f"of group {group}", amount)
    amount = relative_difference(run.loss, expected.loss)
    if amount > tolerance:
        ratio = expected.loss / run.loss if run.loss and expected.loss else None
        return Difference("loss", step, "", amount, ratio)
    return find_state_difference(run, expected, tolerance)


def find_state_difference(run: State, expected: State, tolerance: float) -> Difference | None:
    """Return the tensor that differs most among the weights, else in the optimizer's state."""
    for kind in DIGESTS:
        name, amount = _find_largest_difference(
            getattr(run, kind), getattr(expected, kind), tolerance
        )
        if name:
            return Difference(kind, expected.step, name, amount)
    return None


def _find_first_unequal(items: list[Any], expected: list[Any]) -> int | None:
    """Return the position of the first item that differs."""
    if items == expected:
        return None
    for position, (item, other) in enumerate(zip(items, expected, strict=False)):
        if item != other:
            return position
    return min(len(items), len(expected))


class Digest(NamedTuple):
    """A tensor as a trace has it: the hash of its bytes, its norm and a projection of it."""

    bytes_hash: str
    norm: float
    projection: float


def _find_largest_difference(
    digests: dict[str, list[Any]], expected: dict[str, list[Any]], tolerance: float
) -> tuple[str, float | None]:
    """Return the name and the amount of the largest difference above the tolerance; "" if none."""
    norms = _largest_norms(expected)
    worst_name = ""
    worst = tolerance
    for name, values in expected.items():
        if name not in digests:
            return f"{name} (is missing)", None
        digest = Digest(*digests[name])
        other = Digest(*values)
        if digest.bytes_hash == other.bytes_hash:
            continue
        change = max(abs(digest.norm - other.norm), abs(digest.projection - other.projection))
        amount = change / (norms[_moment_of(name)] or 1.0)
        # The bytes may differ where neither number does. Without a tolerance this counts, too.
        if amount > worst or (tolerance == 0 and not worst_name) or amount != amount:
            worst_name = name
            worst = amount
    return worst_name, worst if worst_name else None


def _largest_norms(digests: dict[str, list[Any]]) -> dict[str, float]:
    """Return the largest norm of each moment of an optimizer; weights have the moment ""."""
    norms: dict[str, float] = {}
    for name, values in digests.items():
        moment = _moment_of(name)
        norms[moment] = max(norms.get(moment, 0.0), Digest(*values).norm)
    return norms


def _moment_of(name: str) -> str:
    """Return `exp_avg` for net.weight/exp_avg, and "" for the name of a weight."""
    return name.rpartition("/")[2] if "/" in name else ""


def relative_difference(value: float | None, expected: float | None) -> float:
    """Return the relative difference of two numbers; 0 if both are missing or nan."""
    if value is None or expected is None:
        return 0.0 if value is expected else math.inf
    if value == expected or (value != value and expected != expected):
        return 0.0
    difference = abs(value - expected) / max(abs(expected), 1e-12)
    return math.inf if difference != difference else difference


def find_metric_difference(
    run: StepTrace, reference: StepTrace, tolerance: float, names: list[str] | None = None
) -> Difference | None:
    """Return the first metric of a validation or an epoch that differs, by the values of rank 0.

    A validation that only one of the two has is left out: a resume has no sanity check.

    Args:
        names: the metrics to compare; None: all.
    """
    for (stage, step), ranks in reference.metrics.items():
        if (stage, step) not in run.metrics:
            continue
        values = run.metrics[stage, step][0]
        for name, expected in ranks[0].items():
            if (names is not None and name not in names) or name not in values:
                continue
            amount = relative_difference(values[name], expected)
            if amount > tolerance:
                ratio = expected / values[name] if values[name] else None
                return Difference("metric", step, name, amount, ratio)
    return None


def find_changed_attributes(run: State, expected: State) -> list[str]:
    """Return the attributes of the module that differ between two states."""
    attributes = run.attributes
    return [name for name, value in expected.attributes.items() if attributes.get(name) != value]
