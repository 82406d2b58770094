"""The file names of comparisons and reports: after their titles, and never those of other runs."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from lockstep.pages.json_values import items, mapping
from lockstep.pages.markdown import slug
from lockstep.runs.foreign_files import read_json


def free_name(folder: Path, title: str, run_ids: Sequence[str]) -> tuple[str, str]:
    """(file name, title): both with a number behind them where `folder` has that name for other runs."""
    first = slug(title)
    names = itertools.chain([(first, title)], ((f"{first}-{n}", f"{title} ({n})") for n in itertools.count(2)))
    return next(pair for pair in names if held_runs(folder / f"{pair[0]}.json") in (None, set(run_ids)))


def held_runs(path: Path) -> set[str] | None:
    """The runs that the file names; None where there is no such file."""
    try:
        held = mapping(read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):  # a person may yet mend it
        return set()
    return {run for run in items(held.get("runs")) if isinstance(run, str)}
