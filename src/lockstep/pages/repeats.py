"""The folds, or seeds, of one configuration as one line: mean ± standard deviation of their accuracies."""

import json
from collections.abc import Sequence

from lockstep.pages import formats as f
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.markdown import blocks, code, table
from lockstep.pages.run_details import value_text
from lockstep.pages.source import NOT_COMPARED
from lockstep.runs.repeats import REPEATED, spread

SHOWN = 6  # keys in which the configurations of an experiment differ
HEAD = ("Settings", "Runs", "Folds", "Seeds", "Best val acc", "Test acc")
WORDS = """Each line: finished runs of one configuration that differ in `data.fold` or `seed` alone, of each fold and
seed the newest; mean ± standard deviation (n − 1)."""

Group = list[Entry]


def repeats_block(entries: Sequence[Entry]) -> str:
    """
    Args:
        entries: all runs of an experiment, oldest first.
    """
    groups = [group for group in groups_of(entries) if len(group) > 1]
    if not groups:
        return ""
    differing = differing_keys(groups)
    return blocks(["## Folds and seeds together\n", table(HEAD, [row(g, differing) for g in groups], "lrllrr"), WORDS])


def groups_of(entries: Sequence[Entry]) -> list[Group]:
    """Finished trainings by configuration, each with its newest run of every fold and seed."""
    groups: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        run = entry.facts
        if run.status == "finished" and not run.is_evaluation and run.tested_images is None and run.config:
            group = groups.setdefault(json.dumps([run.record.data_hash, settings(run)], sort_keys=True), {})
            group[json.dumps([run.config.get(key) for key in REPEATED])] = entry
    return [list(group.values()) for group in groups.values()]


def settings(run: RunFacts) -> dict[str, object]:
    return {
        key: value
        for key, value in run.config.items()
        if key not in REPEATED and key.split(".")[0] not in (*NOT_COMPARED, "logbook", "verbose", "quiet")
    }


def differing_keys(groups: Sequence[Group]) -> list[str]:
    each = [settings(group[0].facts) for group in groups]
    keys = sorted({key for found in each for key in found})
    return [key for key in keys if len({value_text(found.get(key)) for found in each}) > 1]


def row(group: Group, differing: Sequence[str]) -> list[str]:
    config = group[-1].facts.config
    named = [code(f"{key}={value_text(config.get(key))}", 80) for key in differing[:SHOWN]]
    named += [f"and {len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
    folds = sorted({fold for entry in group if isinstance(fold := entry.facts.config.get("data.fold"), int)})
    total = config.get("data.num_folds")
    return [
        ", ".join(named) or group[-1].facts.experiment,
        str(len(group)),
        f"{', '.join(map(str, folds))} of {total}" if folds else f.NONE,
        ", ".join(sorted({str(entry.facts.record.seed) for entry in group})),
        accuracy([entry.facts.best_val_acc for entry in group]),
        accuracy([entry.facts.test_acc for entry in group]),
    ]


def accuracy(values: Sequence[float | None]) -> str:
    """97.22 ± 0.31 %; a dash where a run has none."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f.NONE
    mean, deviation = spread(known)
    return f"{100 * mean:.2f} ± {f.percent(deviation)}"
