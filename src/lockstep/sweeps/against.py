"""Build the arms of a sweep with against=baseline: with and without overrides of the recipe."""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from lockstep.config.keys import REPEAT_KEYS, is_omitted_by_baseline
from lockstep.config.schema import key_of
from lockstep.process.errors import UserError

log = logging.getLogger(__name__)

AGAINST = "against"
EXAMPLE = "-m experiment=quickstart seed=1,2,3 against=baseline optimizer.lr=0.01"
SWEEPER = "hydra/sweeper"
PAIRED = "paired"


def choose_paired_sweeper(
    overrides: list[str], parsed: Sequence[Any], sweeper: str = ""
) -> list[str]:
    """Return the overrides of a sweep, with the sweeper of arms where against= asks for it.

    Args:
        parsed: the overrides as Hydra has parsed them.
        sweeper: the chosen option of hydra/sweeper.
    Raises:
        UserError: against= is missing, or has no arm or no seeds to compare.
    """
    against_words = [word for word in overrides if key_of(word) == AGAINST]
    if not against_words:
        if sweeper == PAIRED:
            raise UserError(
                f"{SWEEPER}={PAIRED} needs against=baseline, which chooses it. {EXAMPLE} is an "
                "example."
            )
        return overrides
    omitted = find_omitted_overrides(overrides)
    _check_arms(against_words[-1], omitted)
    _check_pairs(parsed)
    sweeper_words = [word for word in overrides if key_of(word) == SWEEPER]
    if any(word.partition("=")[2] != PAIRED for word in sweeper_words):
        raise UserError("against=baseline chooses its own sweeper: remove hydra/sweeper=.")

    log.info(f"the baseline omits {' '.join(omitted)}; both arms have the other overrides")
    return [*(word for word in overrides if word not in sweeper_words), f"{SWEEPER}={PAIRED}"]


def _check_arms(against: str, omitted: Sequence[str]) -> None:
    """Refuse another baseline, and arms that are equal."""
    if against.partition("=")[2] != "baseline":
        raise UserError(f"{against}: against=baseline is the only one. {EXAMPLE} is an example.")
    if not omitted:
        raise UserError(
            f"against=baseline needs an override that the baseline omits, as in {EXAMPLE}. Data, "
            "task, trainer, seeds and places are the same in both arms."
        )


def _check_pairs(parsed: Sequence[Any]) -> None:
    """Refuse a sweep that repeats nothing, and ranges of values."""
    repeats = [word for word in parsed if key_of(word.input_line) in REPEAT_KEYS]
    if not any(word.is_sweep_override() for word in repeats):
        raise UserError(
            "against=baseline compares pairs of runs: add seed=1,2,3 (or data.fold=0,1,2), three "
            "or more."
        )
    for word in parsed:
        if word.is_sweep_override() and not word.is_discrete_sweep():
            raise UserError(f"{word.input_line} is a range: give values, as KEY=1,2.")


def find_omitted_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the recipe that the baseline omits.

    These are the ones that follow against=. If none follows it, these are the ones before it.
    """
    position = max(number for number, word in enumerate(overrides) if key_of(word) == AGAINST)
    omitted = [
        word
        for word in overrides
        if is_omitted_by_baseline(key_of(word)) and not word.startswith("hydra")
    ]
    later = [word for word in overrides[position:] if word in omitted]
    return later or omitted


def expand_arms(overrides: Sequence[Any]) -> list[Sequence[str]]:
    """Return the overrides of each job, beginning with the baseline's.

    Args:
        overrides: the whole command line as Hydra has parsed it.
    """
    omitted = find_omitted_overrides([word.input_line for word in overrides])
    recipe = [word for word in overrides if key_of(word.input_line) != AGAINST]
    baseline = [word for word in recipe if word.input_line not in omitted]
    return [*_combine_values(baseline), *_combine_values(recipe)]


def _combine_values(overrides: Sequence[Any]) -> list[Sequence[str]]:
    """Return the overrides of each job that takes one value of each key."""
    choices = []
    for override in overrides:
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line])
    return list(itertools.product(*choices))
