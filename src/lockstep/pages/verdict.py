"""A run beside its repetition: bit-equal, within the spread of seeds, or different, and from which step on."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.pages.curves import Column, read_columns
from lockstep.pages.difference import Parting, by_metrics, parting
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.html_report import number_rows
from lockstep.pages.json_values import items, mapping
from lockstep.pages.source import Source, differences
from lockstep.pages.terminal import OF_A_FILE, aligned
from lockstep.runs.folder import RunFolder

BIT_EQUAL, EQUAL, WITHIN, DIFFERENT = "bit-equal", "equal", "within the seeds' spread", "different"
SEEDS_NEEDED = 3  # runs of one config for a spread
# What does not change a training
UNHEARD = ("seed", "data.seed", "logbook", "verbose", "quiet", "test", "trainer.record_hashes")
PLACES = ("paths", "s3", "logger", "callbacks")


@dataclass(frozen=True)
class Verdict:
    """
    Args:
        word: BIT_EQUAL, EQUAL, WITHIN or DIFFERENT.
        why: one sentence.
    """

    word: str
    why: str


def verdict(
    one: Source, other: Source, folders: tuple[RunFolder | None, RunFolder], known: Sequence[Source]
) -> Verdict:
    """
    Args:
        one, other: the run and its repetition.
        folders: of both; the first may be gone.
        known: runs whose seeds may differ, for the spread.
    Raises:
        UserError: the two have nothing in common that could be compared.
    """
    facts = RunFacts(one), RunFacts(other)
    hashes = [run.record.data_hash for run in facts]
    if None not in hashes and hashes[0] != hashes[1]:
        return Verdict(DIFFERENT, "the data are not the same (data_hash)")
    found = _parting(one, other, folders)
    unlike = found.where or _unlike_results(*facts)
    if not unlike:
        digits = "" if found.is_bit_exact else ", to the five digits that the logbook keeps"
        said = f"no difference in {found.compared}{digits}, nor in what was tested"
        return Verdict(BIT_EQUAL if found.is_bit_exact else EQUAL, said)
    spread = seeds_spread(one, known)
    reached = facts[1].test_acc if facts[1].test_acc is not None else facts[1].best_val_acc
    if spread is None or reached is None:
        return Verdict(DIFFERENT, f"first {unlike} (no {SEEDS_NEEDED} runs of other seeds to measure a spread by)")
    low, high, count = spread
    is_within = low <= reached <= high
    where = f"{'lies' if is_within else 'does not lie'} in {low:.4f} to {high:.4f}, two deviations of {count} seeds"
    return Verdict(WITHIN if is_within else DIFFERENT, f"first {unlike}; its accuracy {reached:.4f} {where}")


def _parting(one: Source, other: Source, folders: tuple[RunFolder | None, RunFolder]) -> Parting:
    if folders[0] is None:
        return by_metrics(columns_of(one), columns_of(other), exact=False)
    found = parting(folders[0], folders[1])
    if found.where or found.is_bit_exact:
        return found
    return by_metrics(*(read_columns(folder.metrics) for folder in folders if folder))  # of images alone


def columns_of(source: Source) -> dict[str, Column]:
    """The logbook's curves as metrics.csv has them: a row for each step."""
    curves = {name: _points(pair) for name, pair in mapping(source.get("curves")).items()}
    steps = sorted({step for points in curves.values() for step in points})
    return {"step": [*steps], **{name: [points.get(step) for step in steps] for name, points in curves.items()}}


def _points(pair: object) -> dict[float, float]:
    """{step: value} of a curve's [steps, values]."""
    sides = items(pair)
    both = zip(items(sides[0]), items(sides[1]), strict=False) if len(sides) == 2 else ()
    return {step: value for step, value in both if isinstance(step, int | float) and isinstance(value, int | float)}


def _unlike_results(one: RunFacts, other: RunFacts) -> str:
    """The first metric of the test that is not the same."""
    mine, others = one.record.metrics, other.record.metrics
    names = [name for name in sorted(mine.keys() & others.keys()) if name.startswith(("test/", "val/"))]
    return next((f"in {name}: {mine[name]} and {others[name]}" for name in names if mine[name] != others[name]), "")


def seeds_spread(source: Source, known: Sequence[Source]) -> tuple[float, float, int] | None:
    """(mean − 2 s, mean + 2 s, runs) of the accuracy over runs that differ from this one in the seed alone.

    None: there are fewer than SEEDS_NEEDED.
    """
    by_seed = {}
    for other in [*known, source]:
        if not unlike_options(source, other):
            facts = RunFacts(other)
            reached = facts.test_acc if facts.test_acc is not None else facts.best_val_acc
            if reached is not None:
                by_seed[facts.record.seed] = reached
    if len(by_seed) < SEEDS_NEEDED:
        return None
    mean, deviation = statistics.mean(by_seed.values()), statistics.stdev(by_seed.values())
    return mean - 2 * deviation, mean + 2 * deviation, len(by_seed)


def unlike_options(one: Source, other: Source) -> list[str]:
    """Options other than the seed in which two runs differ."""
    keys = differences(mapping(one.get("config")), mapping(other.get("config")))
    return [key for key in keys if key not in UNHEARD and key.split(".")[0] not in PLACES]


def side_by_side(sources: Sequence[Source], labels: Sequence[str]) -> str:
    """A table for the terminal; a checkpoint holds its run's places too."""
    rows = number_rows([Entry(RunFacts(source)) for source in sources])
    return aligned([["", *labels], *(row for row in rows if row[0] not in ("Run", *OF_A_FILE))])
