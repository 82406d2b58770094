"""Keep, compare and list runs: the logbook.

    python src/logbook.py keep RUN …         copy runs or sweeps from logs/ into the logbook
    python src/logbook.py remove RUN …       delete them from the logbook, not from logs/
    python src/logbook.py compare RUN RUN …  side by side, with ratios to the first; groups of runs
                                             with means and intervals: KEY=VALUE, or RUN,RUN,RUN
                    --md FILE                write the comparison as a page, listed in the logbook
                    --html FILE|s3://…       write interactive curves, linked from the runs' pages
    python src/logbook.py table [KEY …]      runs of logs/ and of the logbook, with any field,
                    --sort KEY, --csv        metric, option or group as a column
    python src/logbook.py build              write the pages of runs and sweeps again

RUN is a run id, a part of one that only one run has, or a run folder. `keep` also takes
s3://bucket/prefix/<run_id>, of a run whose machine is gone. Every run has a page of its own,
logs/train/runs/<run_id>/page.md. Its heading and the text between its two comments are yours, and
so are those of a comparison's page.
"""

import argparse
import csv
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from lockstep.logbook import build
from lockstep.logbook.compare import caution_about_runs, comparison_text, title_of, write_comparison
from lockstep.logbook.folders import (
    RecordedRun,
    find_run,
    heading_of,
    holds_run,
    is_url,
    read_run,
    read_text,
)
from lockstep.logbook.groups import (
    caution_about_pairs,
    flatten_groups,
    is_group_text,
    make_arms,
    select_runs,
    shorten_names,
)
from lockstep.logbook.index import write_index
from lockstep.logbook.render import align_columns
from lockstep.logbook.report import report_html
from lockstep.logbook.sweep_page import find_sweep, keep_sweep
from lockstep.process.errors import UserError
from lockstep.process.files import write_atomically
from lockstep.process.output import configure_logging, print_result
from lockstep.process.project import REPOSITORY
from lockstep.process.script import exit_code_of
from lockstep.records.folder import run_folders, validate_run_id
from lockstep.records.record import locked_record
from lockstep.storage.s3 import is_s3

COLUMNS = (
    "started_at",
    "status",
    "data",
    "model",
    "trainer",
    "world_size",
    "global_batch_size",
    "epochs",
    "monitor",
    "best_value",
    "test_value",
    "fit_seconds",
    "images_per_s",
    "peak_memory_gib",
    "cost.usd",
)


def keep(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as fetched:
        sweeps = {}
        runs = {}
        for name in options.runs:
            sweep = None if is_s3(name) else find_sweep(name, options.logs)
            if sweep:
                sweeps[name] = sweep
            elif is_s3(name):
                runs[name] = _fetch_run(name.rstrip("/"), Path(fetched))
            else:
                runs[name] = find_run(name, options.logs)
        for name, folder in runs.items():
            address = name.rstrip("/") if is_s3(name) else ""
            print_result(build.keep_run(folder, options.logbook, address))
        for folder in sweeps.values():
            print_result(keep_sweep(folder, options.logbook))
    # The page of a sweep links the pages of its jobs that are kept.
    build.write_sweep_pages(options.logbook)
    write_index(options.logbook)


def _fetch_run(address: str, root: Path) -> Path:
    """Return a folder below `root` with the small files of a run in a bucket."""
    from lockstep.storage.fetch import fetch_for_page
    from lockstep.storage.s3 import Bucket

    folder = root / validate_run_id(address.rpartition("/")[2])
    fetch_for_page(Bucket(address), folder)
    return folder


def remove(options: argparse.Namespace) -> None:
    folders = [_find_kept(name, options.logbook) for name in options.runs]
    for folder in folders:
        shutil.rmtree(folder)
        print_result(f"{folder} removed")
    build.write_sweep_pages(options.logbook)
    write_index(options.logbook)


def _find_kept(name: str, logbook: Path) -> Path:
    """Return the folder of a run or a sweep in the logbook.

    A folder in logs/ names its copy; "." is the name of the working directory.
    """
    run_id = Path(os.path.abspath(name)).name
    sweep = find_sweep(run_id, logbook, is_path=False)
    return sweep or find_run(run_id, logbook, is_path=False)


def build_pages(options: argparse.Namespace) -> None:
    for error in build.build(options.logbook):
        print_result(f"skipped: {error}")
    print_result(f"{options.logbook}: {len(run_folders(options.logbook))} runs")


def compare(options: argparse.Namespace) -> None:
    if any(is_group_text(word) for word in options.runs):
        compare_groups(options)
        return
    runs = [_find_run(name, options) for name in options.runs]
    if len(runs) < 2 and not options.html:
        raise UserError("A comparison needs at least two runs: logbook.py compare RUN RUN.")
    title = options.title or title_of(runs, options.md)
    print_result(comparison_text(runs))
    if options.md:
        write_comparison(options.md, runs, title, caution=caution_about_runs(runs))
    write_report_and_index(options, runs, title)


def compare_groups(options: argparse.Namespace) -> None:
    """Compare groups of runs as a sweep compares its arms."""
    folders = _folders_by_id(options.logbook) | _folders_by_id(options.logs)
    all_runs = [_read_run(folder) for folder in folders.values()]

    def find_by_id(name: str) -> RecordedRun:
        return _find_run(name, options)

    names = shorten_names(options.runs)
    members = [select_runs(word, all_runs, find_by_id) for word in options.runs]
    groups = dict(zip(names, members, strict=True))
    arms = make_arms(groups)
    if not arms.ranked:
        raise UserError(f"Nothing is compared. {arms.remarks[0]}")
    caution = caution_about_pairs(groups, arms)
    lines = [*arms.lines(), *arms.remarks, *arms.winner_lines(), caution]
    print_result("\n".join(filter(None, lines)))
    title = options.title or (options.md and heading_of(read_text(options.md)))
    title = title or " beside ".join(groups)
    runs = flatten_groups(groups)
    if options.md:
        write_comparison(options.md, runs, title, caution=caution, arms=arms)
    write_report_and_index(options, runs, title)


def _find_run(name: str, options: argparse.Namespace) -> RecordedRun:
    return _read_run(find_run(name, options.logs, options.logbook))


def _read_run(folder: Path) -> RecordedRun:
    """Return a run with its summary, which run.json lacks until the run has ended."""
    run = read_run(folder)
    if "folder" not in run.record.summary:
        run.record.summary = build.summary_of(run)
    return run


def write_report_and_index(
    options: argparse.Namespace, runs: list[RecordedRun], title: str
) -> None:
    """Write the report that the command line asks for, and list the new pages in the logbook."""
    if options.md:
        print_result(options.md)
    if options.html:
        address = write_report(
            report_html(title, runs).encode(), options.html, _endpoint_of_runs(runs)
        )
        link_from_pages(runs, options.logbook, title, address)
        print_result(address)
    if options.logbook.is_dir() and (options.md or options.html):
        write_index(options.logbook)


def _endpoint_of_runs(runs: list[RecordedRun]) -> str | None:
    """Return the address of the store that the runs used."""
    endpoints = [run.config.get("s3.endpoint_url") for run in runs]
    return next(filter(None, endpoints), None)


def link_from_pages(runs: list[RecordedRun], logbook: Path, title: str, address: str) -> None:
    """Link the report from each run's page in the logbook and in its folder, unless it is alive."""
    for run in runs:
        kept = logbook / run.run_id
        # Readers of the logbook have no other files of this machine.
        is_readable = is_url(address) or Path(address).resolve().is_relative_to(logbook.resolve())
        if is_readable and holds_run(kept, run):
            # Only these commands write there: no lock, whose file would lie in the logbook.
            build.add_report(kept, title, address)
        if run.folder == kept.resolve():
            continue
        if run.status == "running":
            print_result(f"{run.run_id} is running: its page gets no link to the report.")
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
    in_logs = _folders_by_id(options.logs)
    # A run that is in both is the one in logs/, which may have gone on.
    folders = _folders_by_id(options.logbook) | in_logs
    runs = [_read_run(folder) for folder in folders.values()]
    for name in filter(None, [*options.columns, options.sort]):
        if all(run.value(name) is None for run in runs):
            raise UserError(
                f"No run has {name}. Names are those of run.json and of config.yaml, as "
                "optimizer.lr, and groups, as augmentation."
            )

    columns = options.columns or COLUMNS
    key = options.sort or "started_at"
    runs.sort(key=lambda run: _sort_key(run.value(key)), reverse=True)
    rows = [["run_id", *columns]]
    for run in runs:
        rows.append([run.run_id, *(_format_cell(run.value(name)) for name in columns)])
    if options.csv:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        print_result(text.getvalue().rstrip("\n"))
        return
    print_result(align_columns(rows))
    only_kept = len(runs) - len(in_logs)
    print_result(f"\n{len(in_logs)} runs of {options.logs}, {only_kept} only of {options.logbook}")


def _folders_by_id(root: Path) -> dict[str, Path]:
    return {folder.name: folder for folder in run_folders(root)}


def _sort_key(value: Any) -> tuple[bool, bool, Any]:
    """Return what sorts numbers above texts, and texts above missing values."""
    is_number = isinstance(value, int | float)
    return value is not None, is_number, value if is_number else str(value)


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def main(argv: list[str]) -> int:
    configure_logging()
    top = argparse.ArgumentParser(
        "logbook.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    logbook = REPOSITORY / "logbook"
    logs = REPOSITORY / "logs"
    top.add_argument("--logbook", type=Path, default=logbook, help="where the pages are")
    top.add_argument("--logs", type=Path, default=logs, help="where the run folders are")
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
            keys = "as val/acc_best, optimizer.lr, augmentation or cost.usd"
            command.add_argument("columns", nargs="*", metavar="KEY", help=keys)
            largest = "the largest first; default: the newest"
            command.add_argument("--sort", metavar="KEY", help=largest)
            csv_help = "for pandas, DuckDB or a spreadsheet"
            command.add_argument("--csv", action="store_true", help=csv_help)
    options = top.parse_args(argv)
    return exit_code_of(lambda: options.task(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
