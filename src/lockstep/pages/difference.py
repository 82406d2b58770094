"""Where two runs part: by the hashes of their steps where both have them, else by the rows of metrics.csv."""

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.pages.curves import Column, read_columns
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.step_hashes import first_difference, read_hashes

TIMES = ("time_s", "images_per_s")  # differ in every run
KEYS = ("step", "epoch")


@dataclass(frozen=True)
class Parting:
    """
    Args:
        where: the first difference, as text; empty where there is none.
        compared: what of how many steps.
        is_bit_exact: equal means that every bit is.
    """

    where: str
    compared: str
    is_bit_exact: bool

    def __str__(self) -> str:
        return f"first difference {self.where}" if self.where else f"no difference in {self.compared}"


def parting(one: RunFolder, other: RunFolder) -> Parting:
    """
    Raises:
        UserError: there is nothing that can be compared.
    """
    if one.hashes.exists() and other.hashes.exists():
        return by_hashes(one, other)
    return by_metrics(read_columns(one.metrics), read_columns(other.metrics))


def by_hashes(one: RunFolder, other: RunFolder) -> Parting:
    difference, steps, is_whole = first_difference(read_hashes(one.hashes), read_hashes(other.hashes))
    parts = "images, losses, gradients and weights" if is_whole else "images (alone: they cut their batches otherwise)"
    return Parting(str(difference or ""), f"the {parts} of {steps} steps", is_whole)


def by_metrics(one: Mapping[str, Column], other: Mapping[str, Column], *, exact: bool = True) -> Parting:
    """
    Args:
        one, other: columns of metrics.csv.
        exact: with all their digits.
    Raises:
        UserError: they hold no common steps.
    """
    rows = _by_step(one), _by_step(other)
    steps = sorted(rows[0].keys() & rows[1].keys())
    names = [name for name in one if name in other and name not in (*TIMES, *KEYS)]
    if not steps or not names:
        raise UserError("The two runs have no metrics of the same steps: there is nothing to compare.")
    for step in steps:
        for name in names:
            mine, others = rows[0][step].get(name), rows[1][step].get(name)
            if mine != others:
                return Parting(f"in step {step:.0f}: {name} is {mine} and {others}", "", False)
    compared = f"the {len(names)} metrics of {len(steps)} rows of metrics.csv (trainer.record_hashes=true keeps more)"
    return Parting("", compared, exact)


def _by_step(columns: Mapping[str, Column]) -> dict[float, dict[str, float | None]]:
    steps = columns.get("step", [])
    return {
        step: {name: column[place] for name, column in columns.items()}
        for place, step in enumerate(steps)
        if step is not None
    }
