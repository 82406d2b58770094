"""Which run is meant by a word of the command line: a run id, a part of one, a run folder, the name of a note."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.pages.build import build, known_runs, run_folders_under
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.notes import read_note, run_note_path
from lockstep.pages.page_set import load_entries
from lockstep.pages.source import import_run
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import read_json

NAMED = 5  # of the runs that a word means


def one_folder(logs: Path, word: str) -> Path:
    """
    Raises:
        UserError: no such run, or more than one.
    """
    if RunFolder(Path(word)).record.exists():
        return Path(word).resolve()
    folders = run_folders_under(logs)
    exact = [folder for folder in folders if folder.name == word]
    found = exact or [folder for folder in folders if word in folder.name]
    return only_one([(folder.name, folder) for folder in found], word, [folder.name for folder in folders], str(logs))


def chosen_runs(words: Sequence[str], logs: Path, logbook: Path, *, takes_in: bool = True) -> list[Entry]:
    """The entries of the runs named on the command line, in that order.

    Args:
        takes_in: runs of logs/ that the logbook lacks, or has as they were before, go into it.
    Raises:
        UserError: no such run, or more than one.
    """
    known = known_runs(logbook)
    given = [Path(word).resolve() for word in words if RunFolder(Path(word)).record.exists()]
    names = [Path(word).name if Path(word).resolve() in given else word for word in words]
    folders = {path.name: path for path in [*run_folders_under(logs), *given]}
    asked = {name for name in folders for word in names if word in name}
    newer = [
        folders[name]
        for name in sorted(asked)
        if known.get(name, "") != str(read_json(folders[name] / "run.json").get("updated_at"))
    ]
    if newer and takes_in:
        build(logbook, newer)
    entries = load_entries(logbook)
    if not takes_in:
        fresh = {folder.name: fresh_entry(folder, logbook) for folder in newer}
        entries = [*(entry for entry in entries if entry.run_id not in fresh), *fresh.values()]
    others = sorted(folders.keys() - known.keys(), key=lambda name: folders[name].stat().st_mtime)
    return [one_run(entries, name, others) for name in names]


def fresh_entry(folder: Path, logbook: Path) -> Entry:
    facts = RunFacts(import_run(folder))
    return Entry(facts, read_note(run_note_path(logbook, facts.run_id)))


def one_run(entries: list[Any], word: str, others: Sequence[str] = ()) -> Any:
    """
    Args:
        others: runs that are no entries, which may be meant.
    Raises:
        UserError: no such run, or more than one.
    """
    exact = [entry for entry in entries if word == entry.run_id]
    named = [entry for entry in entries if word == entry.note.name]
    partly = [entry for entry in entries if word in entry.run_id]
    found = [(entry.run_id, entry) for entry in exact or named or partly]
    return only_one(found, word, [*(entry.run_id for entry in entries), *others], "The logbook")


def only_one(found: list[tuple[str, Any]], word: str, run_ids: list[str], place: str) -> Any:
    """
    Args:
        found: run ids with what is returned of one, oldest first, as `run_ids` of all runs.
    Raises:
        UserError: `found` holds none, or more than one.
    """
    if len(found) == 1:
        return found[0][1]
    if found:
        names = ["…"] * (len(found) > NAMED) + [name for name, _ in found[-NAMED:]]
        raise UserError(f"{word!r} means {len(found)} runs ({', '.join(names)}): give more of the run id.")
    newest = ", ".join(run_ids[-3:]) or "there are none yet"
    near = "".join(f" did you mean {name}?" for name in difflib.get_close_matches(word, run_ids, 1, cutoff=0.7))
    raise UserError(f"{place} has no run {word!r};{near} the newest are: {newest}.")
