"""Keep, compare and list runs: the logbook.

    python src/logbook.py keep RUN …             copy runs from logs/ into the logbook, as logbook=keep does
    python src/logbook.py remove RUN …           delete them from the logbook; their folders in logs/ stay
    python src/logbook.py compare RUN RUN …      side by side, with ratios to the first
                    --md FILE                    write the comparison as a page; logbook/NAME.md is listed there
                    --html FILE|s3://…           write interactive curves as one HTML file, linked from the runs' pages
    python src/logbook.py table [KEY …]          runs with any field, metric or option as a column; --sort KEY, --csv
    python src/logbook.py build                  write all pages of the logbook again

RUN is a run id, a part of one that only one run has, or a run folder. Every run has a page of its own,
logs/train/runs/<run_id>/page.md; its heading and the text between its two comments are yours.
"""

import argparse
import csv
import io
import shutil
import sys
from pathlib import Path
from typing import Any

from lockstep.logbook import build
from lockstep.logbook.compare import as_text, write_comparison
from lockstep.logbook.folders import Run, find_run, read_run
from lockstep.logbook.render import aligned
from lockstep.logbook.report import report_html
from lockstep.process.errors import UserError
from lockstep.process.files import write_atomically
from lockstep.process.output import say, set_up
from lockstep.process.project import REPOSITORY
from lockstep.process.script import exit_code_of
from lockstep.records.folder import run_folders
from lockstep.records.record import locked_record

COLUMNS = (
    "started_at", "status", "data", "model", "trainer", "world_size", "global_batch_size", "epochs", "monitor",
    "best_value", "test_value", "fit_seconds", "images_per_s", "peak_memory_gib", "cost.usd",
)  # fmt: skip


def keep(options: argparse.Namespace) -> None:
    for folder in [find_run(word, options.logs) for word in options.runs]:
        say(build.keep_run(folder, options.logbook))


def remove(options: argparse.Namespace) -> None:
    for folder in [find_run(Path(word).name, options.logbook) for word in options.runs]:  # never one in logs/
        shutil.rmtree(folder)
        say(f"{folder} removed")
    build.write_index(options.logbook)


def build_pages(options: argparse.Namespace) -> None:
    for error in build.build(options.logbook):
        say(f"skipped: {error}")
    say(f"{options.logbook}: {len(run_folders(options.logbook))} runs")


def compare(options: argparse.Namespace) -> None:
    runs = [read_run(find_run(word, options.logs, options.logbook)) for word in options.runs]
    if len(runs) < 2 and not options.html:
        raise UserError("A comparison needs at least two runs: logbook.py compare RUN RUN.")
    title = options.title or " beside ".join(run.title for run in runs)
    say(as_text(runs))
    if options.md:
        write_comparison(options.md, runs, title)
        say(options.md)
    if options.html:
        endpoint = next((each for run in runs if (each := run.config.get("s3.endpoint_url"))), None)
        address = write_report(report_html(title, runs).encode(), options.html, endpoint)
        link_from_pages(runs, options.logbook, title, address)
        say(address)
    if options.logbook.is_dir() and (options.md or options.html):
        build.write_index(options.logbook)


def link_from_pages(runs: list[Run], logbook: Path, title: str, address: str) -> None:
    """Link the report from each run's page in the logbook and in its folder, unless it is alive."""
    for run in runs:
        kept = logbook / run.run_id
        if (kept / "run.json").exists():
            # Only these commands write there: no lock, whose file would lie in the logbook.
            build.add_report(kept, title, address)
        if run.folder == kept.resolve():
            continue
        if run.status == "running":
            say(f"{run.run_id} is running: its page gets no link to the report.")
            continue
        with locked_record(run.folder / "run.json"):
            build.add_report(run.folder, title, address)


def write_report(page: bytes, place: str, endpoint: str | None) -> str:
    """Write the interactive report to a file or an object; return where a browser finds it."""
    if not place.startswith("s3://"):
        write_atomically(Path(place), lambda file: file.write(page), binary=True)
        return place
    from lockstep.storage.s3 import Bucket

    prefix, _, name = place.rpartition("/")
    bucket = Bucket(prefix, endpoint)
    bucket.write(name, page, ContentType="text/html; charset=utf-8", CacheControl="no-cache")
    return bucket.web_url(name)


def table(options: argparse.Namespace) -> None:
    found = {folder.name: folder for root in (options.logbook, options.logs) for folder in run_folders(root)}
    runs = [read_run(folder) for folder in found.values()]
    names, key = options.columns or COLUMNS, options.sort or "started_at"
    for name in [*options.columns, *filter(None, [options.sort])]:
        if all(run.value(name) is None for run in runs):
            raise UserError(f"No run has {name}. Names are those of run.json and of config.yaml, as optimizer.lr.")

    def rank(run: Run) -> tuple[bool, bool, Any]:
        value = run.value(key)
        is_number = isinstance(value, int | float)
        return value is not None, is_number, value if is_number else str(value)

    runs.sort(key=rank, reverse=True)
    rows = [["run_id", *names]]
    for values in ([run.run_id, *map(run.value, names)] for run in runs):
        rows.append(["" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for v in values])
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    say(text.getvalue().rstrip("\n") if options.csv else aligned(rows))


def main(argv: list[str]) -> int:
    set_up()
    top = argparse.ArgumentParser("logbook.py", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--logbook", type=Path, default=REPOSITORY / "logbook", help="where the pages are")
    top.add_argument("--logs", type=Path, default=REPOSITORY / "logs", help="where the run folders are")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for task in (keep, remove, compare, table, build_pages):
        command = commands.add_parser(task.__name__.removesuffix("_pages"))
        command.set_defaults(task=task)
        if task in (keep, remove, compare):
            command.add_argument("runs", nargs="+", metavar="RUN")
        if task is compare:
            command.add_argument("--title", help="of the page and the report")
            command.add_argument("--md", type=Path, metavar="FILE")
            command.add_argument("--html", metavar="FILE|s3://bucket/prefix/FILE")
        if task is table:
            command.add_argument("columns", nargs="*", metavar="KEY", help="as val/acc_best, optimizer.lr or cost.usd")
            command.add_argument("--sort", metavar="KEY", help="the largest first; default: the newest")
            command.add_argument("--csv", action="store_true", help="for pandas, DuckDB or a spreadsheet")
    options = top.parse_args(argv)
    return exit_code_of(lambda: options.task(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
