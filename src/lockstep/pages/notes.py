"""What a person adds to a run afterwards: `logbook/notes/<run_id>.md`, which no rebuild ever touches.

    ---
    name: the good one
    tags: [paper, table 2]
    ---
    Any markdown.

`notes/README.md` stands at the top of the logbook, `notes/experiments/<page>.md` at the top of an experiment's page.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.pages.json_values import as_text, items
from lockstep.runs.files import write_atomically
from lockstep.runs.foreign_files import parse_yaml
from lockstep.runs.redact import redact, redact_text

MAX_CHARACTERS = 2**20


@dataclass(frozen=True)
class Note:
    name: str = ""
    tags: tuple[str, ...] | None = None  # None: as the run was started
    text: str = ""


def run_note_path(logbook: Path, run_id: str) -> Path:
    return logbook / "notes" / f"{run_id}.md"


def read_note(path: Path) -> Note:
    """An empty note where there is none; a head that is no YAML counts as text."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_CHARACTERS)
    except OSError:
        return Note()
    head, body = split_head(text)
    tags = tuple(filter(None, map(as_text, items(head["tags"])))) if "tags" in head else None
    return Note(redact_text(as_text(head.get("name"))), redact(tags) and tuple(redact(tags)), redact_text(body).strip())


def split_head(text: str) -> tuple[dict[str, Any], str]:
    if not text.startswith("---\n") or "\n---" not in text[3:]:
        return {}, text
    head, _, body = text[4:].partition("\n---")
    try:
        loaded = parse_yaml(head)
    except ValueError:
        return {}, text
    return (loaded, body.partition("\n")[2]) if isinstance(loaded, dict) else ({}, text)


def add_note(path: Path, text: str = "", name: str | None = None, tags: list[str] | None = None) -> None:
    """Append a paragraph; a name or tags replace those that stand there."""
    import yaml

    old = path.read_text(encoding="utf-8") if path.exists() else ""
    head, body = split_head(old)
    if name is not None:
        head["name"] = name
    if tags is not None:
        head["tags"] = tags
    body = "\n\n".join(part for part in (body.strip(), redact_text(text).strip()) if part)
    front = f"---\n{yaml.safe_dump(redact(head), sort_keys=True, allow_unicode=True)}---\n" if head else ""
    write_atomically(path, lambda file: file.write(f"{front}{body}\n"))
