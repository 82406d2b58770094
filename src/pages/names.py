"""The file names of comparisons and reports: after their titles, and never those of other runs."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from pages.markdown import slug
from pages.tolerant import items, mapping


def free_name(folder: Path, title: str, run_ids: Sequence[str]) -> str:
    """The title as a name, with a number behind it where `folder` has that name for other runs."""
    names = (slug(title) if number == 1 else f"{slug(title)}-{number}" for number in itertools.count(1))
    return next(name for name in names if held_runs(folder / f"{name}.json") in (None, set(run_ids)))


def held_runs(path: Path) -> set[str] | None:
    """The runs that the file names; None where there is no such file."""
    try:
        held = mapping(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):  # a person may yet mend it
        return set()
    return {run for run in items(held.get("runs")) if isinstance(run, str)}
