"""Which files make up the logbook, and writing those that changed."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.pages import figures
from lockstep.pages.comparison_page import comparison_page, labels_for, saved_comparisons
from lockstep.pages.entry import Entry, experiment_slug
from lockstep.pages.experiment_page import RUNS_PER_PAGE, experiment_page
from lockstep.pages.facts import RunFacts
from lockstep.pages.index_page import GENERATED, ROWS_PER_PAGE, index_page, older_page
from lockstep.pages.markdown import plain
from lockstep.pages.notes import read_note, run_note_path
from lockstep.pages.publish import HOW_TO_OPEN, is_shown_as_source, listed_reports, report_links
from lockstep.pages.repeats import repeats_block
from lockstep.pages.source import read_sources, write_if_changed

GIT_ATTRIBUTES = """\
# Pages are generated: where two branches added runs, take both and run `make logbook`
/*.md merge=union linguist-generated
/figures/*.svg linguist-generated
/runs/*.json linguist-generated
"""


def load_entries(logbook: Path, now: str | None = None) -> list[Entry]:
    """Every run of the logbook, oldest first."""
    links = report_links(listed_reports(logbook))
    entries = []
    for source in read_sources(logbook):
        facts = RunFacts(source, now)
        note = read_note(run_note_path(logbook, facts.run_id))
        entries.append(Entry(facts, note, reports=tuple(links.get(facts.run_id, ()))))
    return entries


def write_pages(logbook: Path, changed_runs: set[str] | None, now: str | None = None) -> list[Path]:
    """Write what differs; returns the files that changed.

    Args:
        changed_runs: only pages and pictures that show one of these; None for all, and for removing what is stale.
    """
    entries = load_entries(logbook, now)
    pages = dict(all_pages(logbook, entries, changed_runs))
    if not (logbook / ".gitattributes").exists():
        pages[".gitattributes"] = GIT_ATTRIBUTES
    changed = [logbook / name for name, text in pages.items() if write_if_changed(logbook / name, text, kept=False)]
    return changed + (remove_stale(logbook, set(pages)) if changed_runs is None else [])


def all_pages(logbook: Path, entries: Sequence[Entry], changed_runs: set[str] | None) -> Iterator[tuple[str, str]]:
    """(path within the logbook, text)."""
    by_experiment: dict[str, list[Entry]] = {}
    for entry in entries:
        by_experiment.setdefault(experiment_slug(entry.facts), []).append(entry)
    for name, members in by_experiment.items():
        place_on_pages(name, members)
    for name, members in by_experiment.items():
        if changed_runs is None or any(entry.run_id in changed_runs for entry in members):
            yield from experiment_pages(logbook, name, members)
    for entry in entries:
        if changed_runs is None or entry.run_id in changed_runs:
            yield from run_figures(entry)
    yield from comparison_pages(logbook, entries, changed_runs and beside(changed_runs, by_experiment))
    yield from index_pages(logbook, entries)


def beside(changed_runs: set[str], by_experiment: dict[str, list[Entry]]) -> set[str]:
    """All runs of the experiments of these: a new run may move an old one to another page, which links must follow."""
    experiments = [{entry.run_id for entry in members} for members in by_experiment.values()]
    return changed_runs.union(*(members for members in experiments if members & changed_runs))


def archived(entries: Sequence[Entry], size: int) -> tuple[list[Sequence[Entry]], Sequence[Entry]]:
    """Full pages of the oldest runs, which never change again, and the newest one to two pages of them.

    Args:
        entries: oldest first.
    """
    num_full = max(0, len(entries) // size - 1)
    return [entries[i * size : (i + 1) * size] for i in range(num_full)], entries[num_full * size :]


def place_on_pages(name: str, members: Sequence[Entry]) -> None:
    older, newest = archived(members, RUNS_PER_PAGE)
    for number, page in enumerate(older, 1):
        for entry in page:
            entry.page = f"{name}-older-{number}.md"
    for entry in newest:
        entry.page = f"{name}.md"


def experiment_pages(logbook: Path, name: str, members: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    trained = [entry for entry in members if not entry.facts.is_evaluation]
    before = {after.run_id: earlier for earlier, after in zip(trained, trained[1:], strict=False)}
    older, newest = archived(members, RUNS_PER_PAGE)
    title = members[-1].facts.experiment
    older_names = [f"{name}-older-{number}.md" for number in range(len(older), 0, -1)]
    preface = read_note(logbook / "notes" / "experiments" / f"{name}.md").text
    yield f"{name}.md", experiment_page(title, newest[::-1], before, preface, older_names, repeats_block(members))
    for number, page in enumerate(older, 1):
        heading = f"{title}, older runs {number}"
        yield f"{name}-older-{number}.md", experiment_page(heading, page[::-1], before, "", [f"{name}.md"])


def run_figures(entry: Entry) -> Iterator[tuple[str, str]]:
    if entry.has_curves:
        yield entry.curves_file, figures.run_figure(entry.facts)
    if entry.has_confusion:
        yield entry.confusion_file, figures.confusion_figure(entry.facts)
    if entry.facts.calibration:
        yield entry.calibration_file, figures.calibration_figure(entry.facts)


def comparison_pages(
    logbook: Path, entries: Sequence[Entry], changed_runs: set[str] | None
) -> Iterator[tuple[str, str]]:
    """The pages of saved comparisons; runs that the logbook no longer holds are only named."""
    known = {entry.run_id: entry for entry in entries}
    for name, held in saved_comparisons(logbook).items():
        chosen = [known[run_id] for run_id in held.runs if run_id in known]
        if not chosen or (changed_runs is not None and not changed_runs & set(held.runs)):
            continue
        labels = labels_for(chosen)
        picture = figures.comparison_figure([entry.facts for entry in chosen], labels)
        file = f"figures/compare-{name}.svg"
        missing = [run_id for run_id in held.runs if run_id not in known]
        yield f"compare-{name}.md", comparison_page(held.title, chosen, labels, file if picture else "", missing)
        if picture:
            yield file, picture


def index_pages(logbook: Path, entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    older, newest = archived(entries, ROWS_PER_PAGE)
    older_names = [f"older-runs-{number}.md" for number in range(len(older), 0, -1)]
    preface = read_note(logbook / "notes" / "README.md").text
    yield "README.md", index_page(entries[::-1], newest[::-1], preface, links_block(logbook, entries), older_names)
    for number, page in enumerate(older, 1):
        yield f"older-runs-{number}.md", older_page(page[::-1], number)


def links_block(logbook: Path, entries: Sequence[Entry]) -> str:
    known = {entry.run_id for entry in entries}
    compared = [
        f"- [{plain(held.title)}](compare-{name}.md)"
        for name, held in saved_comparisons(logbook).items()
        if known & set(held.runs)
    ]
    reports = [f"- {link}, {num} runs" if num != 1 else f"- {link}" for link, num in report_lines(logbook)]
    if any(map(is_shown_as_source, reports)):
        reports += ["", f"{HOW_TO_OPEN}."]
    measured = [
        f"- [{plain(path.read_text().partition(chr(10))[0].lstrip('# '))}](measurements/{path.name})"
        for path in sorted((logbook / "measurements").glob("*.md"))
    ]
    parts = (("## Comparisons", compared), ("## Interactive reports", reports), ("## Measurements", measured))
    return "\n\n".join(f"{title}\n\n" + "\n".join(lines) for title, lines in parts if lines)


def report_lines(logbook: Path) -> list[tuple[str, int]]:
    return [(report.link, len(report.runs)) for report in listed_reports(logbook)]


def remove_stale(logbook: Path, current: set[str]) -> list[Path]:
    """Delete pictures and pages that we wrote once and that no source calls for any more."""
    pictures = [path for path in (logbook / "figures").glob("*.svg") if figures.is_ours(path)]
    pages = [path for path in logbook.glob("*.md") if GENERATED in path.read_text(errors="replace")[:2000]]
    stale = sorted(path for path in pictures + pages if str(path.relative_to(logbook)) not in current)
    for path in stale:
        path.unlink()
    return stale
