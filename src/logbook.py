"""The logbook: pages of what was run and what came out.

    python src/logbook.py keep RUN …               copy runs of logs/ into the logbook, as logbook=keep does
    python src/logbook.py remove RUN …             delete them from the logbook
    python src/logbook.py note RUN "text"          add your own words to a run's page
    python src/logbook.py compare RUN RUN …        side by side; --md FILE as a page, --html FILE with curves
    python src/logbook.py publish RUN … --to s3://bucket/prefix | DIR    the HTML report, linked from the pages
    python src/logbook.py table [KEY …]            runs with any field, metric or option as a column; --csv
    python src/logbook.py build                    write all pages of the logbook anew

RUN is a run id, a part of one that only one run has, a run folder, or the title of a note. Every run has a page of its
own: logs/train/runs/<run_id>/page.md.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import argparse
import csv
import difflib
import os
import sys
from pathlib import Path

from lockstep.logbook.folders import Run, find_run, folders_under, read_run
from lockstep.logbook.render import aligned
from lockstep.runs.errors import UserError
from lockstep.runs.output import say, set_up
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.script import exit_code_of
from lockstep.storage.object_store import StoreError

COLUMNS = (
    "started_at", "status", "data", "model", "trainer", "world_size", "global_batch_size", "epochs", "val/acc_best",
    "test/acc", "fit_seconds", "images_per_s", "peak_memory_gib", "cost.usd",
)  # fmt: skip


def keep(options: argparse.Namespace) -> None:
    from lockstep.logbook.build import keep_run

    for folder in [find_run(word, options.logs) for word in options.runs]:
        say(keep_run(folder, options.logbook))


def remove(options: argparse.Namespace) -> None:
    from lockstep.logbook.build import remove_runs

    folders = [find_run(word, options.logbook) for word in options.runs]
    remove_runs(folders, options.logbook)
    say(f"{options.logbook}: {', '.join(folder.name for folder in folders)} removed")


def build(options: argparse.Namespace) -> None:
    from lockstep.logbook.build import build as build_all

    runs, errors = build_all(options.logbook, options.logs)
    for error in errors:
        say(f"skipped: {error}")
    say(f"{options.logbook}: {len(runs)} runs")


def note(options: argparse.Namespace) -> None:
    from lockstep.logbook.build import add_note, write_index

    if not options.text and not options.title:
        raise UserError('There is nothing to note: give a text or --title, as in logbook.py note RUN "text".')
    chosen = find_run(options.run, options.logs, options.logbook)
    for folder in {chosen, options.logbook / chosen.name}:
        if (folder / "run.json").exists():
            add_note(folder, options.text, options.title)
            say(folder / "note.md")
    if (options.logbook / chosen.name).exists():
        write_index(options.logbook)


def compare(options: argparse.Namespace) -> None:
    from lockstep.logbook.compare import as_text, write_comparison

    runs = chosen(options)
    if len(runs) < 2 and not options.html:
        raise UserError("A comparison takes two runs or more: logbook.py compare RUN RUN.")
    title = options.title or " beside ".join(run.title for run in runs)
    say(as_text(runs))
    if options.md:
        from lockstep.logbook.build import write_index

        write_comparison(options.md, runs, title)
        say(f"\n{options.md}")
        if options.md.resolve().parent == options.logbook.resolve():
            write_index(options.logbook)
    if options.html:
        say(write_report(runs, title, options.html))


def publish(options: argparse.Namespace) -> None:
    from lockstep.logbook.build import write_index, write_page
    from lockstep.runs.record import save_record

    runs = chosen(options)
    title = options.title or " beside ".join(run.title for run in runs)
    name = "".join(letter if letter.isalnum() else "-" for letter in title.lower()) + ".html"
    address = write_report(runs, title, f"{options.to.rstrip('/')}/{name}", options.endpoint_url)
    for run in runs:
        for folder in {run.folder, options.logbook / run.run_id}:
            if (folder / "run.json").exists():
                held = read_run(folder)
                link = address if "://" in address else os.path.relpath(address, folder)
                held.record.reports[title] = link
                save_record(folder / "run.json", held.record)
                write_page(held)
    if options.logbook.is_dir():
        write_index(options.logbook)
    say(address)


def write_report(runs: list[Run], title: str, to: str, endpoint_url: str | None = None) -> str:
    """Write the interactive report to a file or an s3:// address; return where a browser finds it."""
    from lockstep.logbook.report import report_html

    page = report_html(title, runs).encode()
    if to.startswith("s3://"):
        from lockstep.storage.bucket import open_store

        prefix, _, name = to.rpartition("/")
        store = open_store({"uri": prefix, "endpoint_url": endpoint_url})
        store.put(f"{store.prefix}{name}", page, content_type="text/html; charset=utf-8")
        return f"{store.web_root}{store.prefix}{name}"
    try:
        Path(to).parent.mkdir(parents=True, exist_ok=True)
        Path(to).write_bytes(page)
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror}): give another place.") from None
    return to


def table(options: argparse.Namespace) -> None:
    found = {folder.name: folder for root in (options.logbook, options.logs) for folder in folders_under(root)}
    runs = [read_run(folder) for folder in found.values()]
    names = ["run_id", *(options.columns or COLUMNS)]
    for name in filter(None, [*options.columns, options.sort]):
        if all(run.value(name) is None for run in runs):
            known = sorted({key for run in runs for held in (run.record.metrics, run.config) for key in held})
            near = difflib.get_close_matches(name, known, 3, cutoff=0.5)
            raise UserError(f"No run has {name}. Names are those of run.json and config.yaml: {', '.join(near)} …")
    key = options.sort or "started_at"
    runs.sort(key=lambda run: (run.value(key) is not None, run.value(key)), reverse=True)
    rows = [[run.run_id, *(_cell(run, name) for name in names[1:])] for run in runs]
    if options.csv:
        return csv.writer(sys.stdout).writerows([names, *rows])
    say(aligned([names, *rows]))


def _cell(run: Run, name: str) -> str:
    value = run.status if name == "status" else run.value(name)
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def chosen(options: argparse.Namespace) -> list[Run]:
    return [read_run(find_run(word, options.logs, options.logbook)) for word in options.runs]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="logbook.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--logbook", type=Path, default=REPOSITORY / "logbook", help="where the pages are")
    top.add_argument("--logs", type=Path, default=REPOSITORY / "logs", help="where the run folders are")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(task, help: str, runs: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(task.__name__, help=help)
        command.set_defaults(task=task)
        if runs:
            command.add_argument("runs", nargs="+", metavar="RUN")
        return command

    add(keep, "copy runs into the logbook")
    add(remove, "delete runs from the logbook; their folders in logs/ stay")
    add(build, "write all pages of the logbook anew", runs=False)
    command = add(note, "add your own words to a run's page", runs=False)
    command.add_argument("run", metavar="RUN")
    command.add_argument("text", nargs="?", default="", help="markdown, added as a paragraph")
    command.add_argument("--title", help="shown instead of the run id")
    command = add(compare, "print runs side by side, with ratios to the first")
    command.add_argument("--md", type=Path, metavar="FILE", help="write a page too; logbook/NAME.md is listed there")
    command.add_argument("--html", metavar="FILE", help="write one HTML file with interactive curves too")
    command.add_argument("--title", help="of the page and the report")
    command = add(publish, "write the HTML report where others can open it, and link it from the runs' pages")
    command.add_argument("--to", required=True, metavar="s3://bucket/prefix|DIR")
    command.add_argument("--title", help="of the report; its file is named after it")
    command.add_argument("--endpoint-url", help="of a store other than Amazon's that speaks S3")
    command = add(table, "list runs of logs/ and logbook/ with any field, metric or option as a column", runs=False)
    command.add_argument("columns", nargs="*", metavar="KEY", help="as val/acc_best, optimizer.lr or cost.usd")
    command.add_argument("--sort", metavar="KEY", help="the largest first; default: the newest")
    command.add_argument("--csv", action="store_true", help="for pandas, DuckDB or a spreadsheet")
    return top


def main(argv: list[str]) -> int:
    set_up()
    options = parser().parse_args(argv)
    return exit_code_of(lambda: options.task(options), StoreError)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
