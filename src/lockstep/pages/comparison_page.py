"""`logbook/compare-<name>.md`: chosen runs side by side, each number beside its ratio to the first run's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.pages.entry import Entry
from lockstep.pages.fairness import caution, load_caution
from lockstep.pages.figures import MAX_COMPARED
from lockstep.pages.index_page import GENERATED, status_cell
from lockstep.pages.json_values import as_text, items, mapping
from lockstep.pages.markdown import blocks, code, code_block, plain, quote, table
from lockstep.pages.measured import measured_values
from lockstep.pages.names import free_name
from lockstep.pages.run_details import value_text
from lockstep.pages.source import NOT_COMPARED, is_same_setting, write_if_changed
from lockstep.runs.foreign_files import read_json

MAX_KEYS = 80
RATIOS = "×: times {}; for accuracies the difference in percentage points."


def comparison_page(
    title: str, entries: Sequence[Entry], labels: Sequence[str], figure_file: str, missing: Sequence[str] = ()
) -> str:
    """
    Args:
        entries: in the order they were asked for; the first is what the others are measured against.
        figure_file: the picture, or empty where nothing was logged.
        missing: runs that were compared and that the logbook no longer holds.
    """
    return blocks(
        [
            f"# {plain(title)}",
            GENERATED,
            "[← all runs](README.md)",
            f"No longer in the logbook: {', '.join(map(code, missing))}." if missing else "",
            caution(entries),
            load_caution(entries, labels),
            numbers_table(entries, labels),
            RATIOS.format(plain(labels[0])) if entries[1:] else "",
            memory_words(entries),
            *(
                f"{plain(label)}:\n\n{quote(e.note.text)}"
                for e, label in zip(entries, labels, strict=True)
                if e.note.text
            ),
            f"![Curves side by side]({figure_file})" if figure_file else "",
            f"The picture shows the first {MAX_COMPARED} of the {len(entries)} runs."
            if figure_file and len(entries) > MAX_COMPARED
            else "",
            "## What differs in the settings\n",
            settings_table(entries, labels) or "Nothing: the same settings.",
            "## How each was started\n",
            *(started_with(entry, label) for entry, label in zip(entries, labels, strict=True)),
        ]
    )


def memory_words(entries: Sequence[Entry]) -> str:
    """What the two rows on memory count where there is no GPU."""
    on_cpu = all(not node.gpus for entry in entries for node in entry.facts.nodes)
    if not on_cpu or all(entry.facts.record.largest_batch.peak_memory_gib is None for entry in entries):
        return ""
    return (
        "Peak memory is a process's; at the largest batch it is that of its tensors, which the simulated limit counts."
    )


def started_with(entry: Entry, label: str) -> str:
    command = code_block(entry.facts.commands or "# the command is not in the record", "sh", 3000)
    return f"{plain(label)}, {entry.link}:\n\n{command}"


def labels_for(entries: Sequence[Entry]) -> list[str]:
    """The shortest words that tell the runs apart: a person's names, else the strategies, else the run ids."""
    for candidates in (
        [entry.note.name for entry in entries],
        [entry.facts.strategy for entry in entries],
        [f"{entry.facts.strategy} {entry.facts.record.model or ''}".strip() for entry in entries],
    ):
        if all(candidates) and len(set(candidates)) == len(candidates):
            return list(candidates)
    return [entry.title for entry in entries]


def numbers_table(entries: Sequence[Entry], labels: Sequence[str]) -> str:
    rows = [
        ["Run", *(entry.link for entry in entries)],
        ["Status", *(status_cell(entry) for entry in entries)],
        ["Model", *(plain(entry.facts.record.model, 60) for entry in entries)],
        ["Data", *(plain(entry.facts.record.data, 60) for entry in entries)],
        ["World", *(plain(entry.facts.world, 40) for entry in entries)],
    ]
    rows.extend([plain(name), *cells] for name, cells in measured_values(entries))
    head = ("", *(plain(label, 60) for label in labels))
    return table(head, rows, "l" + "r" * len(entries))


def differing_settings(entries: Sequence[Entry]) -> list[tuple[str, list[str]]]:
    """(key, one value a run): only the keys that are not equal in all runs."""
    configs = [entry.facts.config for entry in entries]
    keys = sorted({key for config in configs for key in config if key.split(".")[0] not in NOT_COMPARED})
    rows = [(key, [config.get(key) for config in configs]) for key in keys]
    return [
        (key, [value_text(value) for value in values])
        for key, values in rows
        if not all(is_same_setting(key, values[0], value) for value in values[1:])
    ]


def settings_table(entries: Sequence[Entry], labels: Sequence[str]) -> str:
    found = differing_settings(entries)
    rows = [[code(key, 100), *(code(value, 80) for value in values)] for key, values in found[:MAX_KEYS]]
    if len(found) > MAX_KEYS:
        rows.append([f"… and {len(found) - MAX_KEYS} more", *("" for _ in entries)])
    return table(("key", *(plain(label, 60) for label in labels)), rows)


# --- which comparisons a logbook has: logbook/comparisons/<name>.json ---


@dataclass(frozen=True)
class Comparison:
    title: str
    runs: list[str]


def save_comparison(logbook: Path, title: str, run_ids: Sequence[str]) -> str:
    """Remember it, so that every rebuild writes its page again; returns its name."""
    name, title = free_name(logbook / "comparisons", title, run_ids)
    text = json.dumps({"title": title, "runs": list(run_ids)}, indent=1)
    write_if_changed(logbook / "comparisons" / f"{name}.json", text + "\n")
    return name


def saved_comparisons(logbook: Path) -> dict[str, Comparison]:
    """{name: comparison} in alphabetical order; what is no such file is passed over."""
    found = {}
    for path in sorted((logbook / "comparisons").glob("*.json")):
        try:
            held = mapping(read_json(path))
        except (OSError, ValueError):
            continue
        runs = [run for run in items(held.get("runs")) if isinstance(run, str)]
        if runs:
            found[path.stem] = Comparison(as_text(held.get("title")) or path.stem, runs)
    return found
