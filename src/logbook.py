"""The logbook: pages of what was run and what came out.

    python src/logbook.py keep RUN …             copy runs of logs/ into the logbook, as logbook=keep does
    python src/logbook.py remove RUN …           delete them from the logbook; their folders in logs/ stay
    python src/logbook.py compare RUN RUN …      side by side, with ratios to the first
                    --md FILE                    write the comparison as a page; logbook/NAME.md is listed there
                    --html FILE|s3://…           write interactive curves as one HTML file, linked from the runs' pages
    python src/logbook.py table [KEY …]          runs with any field, metric or option as a column; --sort KEY, --csv
    python src/logbook.py build                  write all pages of the logbook anew

RUN is a run id, a part of one that only one run has, a run folder, or the title of a note. Every run has a page of its
own: logs/train/runs/<run_id>/page.md. It begins with what you write into note.md beside it; `build` takes it over.
"""

import argparse
import csv
import difflib
import os
import sys
from pathlib import Path
from typing import Any

from lockstep.logbook.folders import Run, find_run, folders_under, read_run
from lockstep.logbook.render import aligned
from lockstep.runs.errors import UserError
from lockstep.runs.output import say, set_up
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.script import exit_code_of

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

    for error in build_all(options.logbook, options.logs):
        say(f"skipped: {error}")
    say(f"{options.logbook}: {len(folders_under(options.logbook))} runs")


def compare(options: argparse.Namespace) -> None:
    from lockstep.logbook.build import write_index
    from lockstep.logbook.compare import as_text, write_comparison

    runs = [read_run(find_run(word, options.logs, options.logbook)) for word in options.runs]
    if len(runs) < 2 and not options.html:
        raise UserError("A comparison takes two runs or more: logbook.py compare RUN RUN.")
    title = options.title or " beside ".join(run.title for run in runs)
    say(as_text(runs))
    if options.md:
        write_comparison(options.md, runs, title)
        say(options.md)
    if options.html:
        say(publish(runs, title, options))
    if options.logbook.is_dir() and (options.md or options.html):
        write_index(options.logbook)


def publish(runs: list[Run], title: str, options: argparse.Namespace) -> str:
    """Write the interactive report, and link it from the pages of its runs; return where a browser finds it."""
    from lockstep.logbook.build import write_page
    from lockstep.logbook.report import report_html
    from lockstep.runs.record import save_record

    page, address = report_html(title, runs).encode(), options.html
    if address.startswith("s3://"):
        from lockstep.storage.s3 import Bucket

        prefix, _, name = address.rpartition("/")
        bucket = Bucket(prefix, options.endpoint_url)
        bucket.write(name, page, ContentType="text/html; charset=utf-8", CacheControl="no-cache")
        address = bucket.web_url(name)
    else:
        try:
            Path(address).parent.mkdir(parents=True, exist_ok=True)
            Path(address).write_bytes(page)
        except OSError as error:
            raise UserError(f"{address} cannot be written ({error.strerror}): give another place.") from None
    for folder in {folder for run in runs for folder in places_of(run.folder, options.logbook)}:
        run = read_run(folder)
        run.record.reports[title] = address if "://" in address else os.path.relpath(address, folder)
        save_record(folder / "run.json", run.record)
        write_page(run)
    return address


def places_of(folder: Path, logbook: Path) -> set[Path]:
    """Return the run's folder and its copy in the logbook, as far as they exist."""
    return {place.resolve() for place in (folder, logbook / folder.name) if (place / "run.json").exists()}


def table(options: argparse.Namespace) -> None:
    found = {folder.name: folder for root in (options.logbook, options.logs) for folder in folders_under(root)}
    runs = [read_run(folder) for folder in found.values()]
    for name in filter(None, [*options.columns, options.sort]):
        if all(run.value(name) is None for run in runs):
            known = {key for run in runs for held in (run.record.metrics, run.config) for key in held}
            near = ", ".join(difflib.get_close_matches(name, known, 3, cutoff=0.5))
            raise UserError(f"No run has {name}. Names are those of run.json and of config.yaml: {near} …")
    key = options.sort or "started_at"
    runs.sort(key=lambda run: (run.value(key) is not None, run.value(key)), reverse=True)
    names = options.columns or COLUMNS
    rows = [["run_id", *names], *([run.run_id, *(_cell(run.value(name)) for name in names)] for run in runs)]
    if options.csv:
        csv.writer(sys.stdout).writerows(rows)
    else:
        say(aligned(rows))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser("logbook.py", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--logbook", type=Path, default=REPOSITORY / "logbook", help="where the pages are")
    top.add_argument("--logs", type=Path, default=REPOSITORY / "logs", help="where the run folders are")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for task in (keep, remove, compare, table, build):
        command = commands.add_parser(task.__name__)
        command.set_defaults(task=task)
        if task in (keep, remove, compare):
            command.add_argument("runs", nargs="+", metavar="RUN")
        if task is compare:
            command.add_argument("--title", help="of the page and the report")
            command.add_argument("--md", type=Path, metavar="FILE")
            command.add_argument("--html", metavar="FILE|s3://bucket/prefix/FILE")
            command.add_argument("--endpoint-url", help="of a store other than Amazon's that speaks S3")
        if task is table:
            command.add_argument("columns", nargs="*", metavar="KEY", help="as val/acc_best, optimizer.lr or cost.usd")
            command.add_argument("--sort", metavar="KEY", help="the largest first; default: the newest")
            command.add_argument("--csv", action="store_true", help="for pandas, DuckDB or a spreadsheet")
    return top


def main(argv: list[str]) -> int:
    set_up()
    options = parser().parse_args(argv)
    return exit_code_of(lambda: options.task(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
