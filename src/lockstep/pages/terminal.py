"""Runs side by side as a terminal shows them."""

from collections.abc import Sequence
from unicodedata import east_asian_width

from lockstep.pages.comparison_page import MAX_KEYS, RATIOS, memory_words
from lockstep.pages.entry import Entry
from lockstep.pages.fairness import cautions
from lockstep.pages.html_report import number_rows, setting_rows

OF_A_FILE = ("Best checkpoint", "sha256")  # long, and other in every run


def comparison_text(entries: Sequence[Entry], labels: Sequence[str]) -> str:
    """The numbers, each beside its ratio to the first run's, then what differs in the settings."""
    settings = setting_rows(entries)
    head = ["", *labels]
    parts = [
        aligned([head, *(row for row in number_rows(entries) if row[0] not in OF_A_FILE)]),
        RATIOS.format(labels[0]),
        memory_words(entries),
        *cautions(entries, labels),
        aligned([["Settings that differ", *labels], *settings[:MAX_KEYS]]) if settings else "The same settings.",
        f"… and {len(settings) - MAX_KEYS} more" if len(settings) > MAX_KEYS else "",
    ]
    return "\n\n".join(filter(None, parts))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell + " " * (width - columns(cell)) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def columns(text: str) -> int:
    """How wide it is on a terminal."""
    return len(text) + sum(east_asian_width(character) in "WF" for character in text)
