"""The logbook: pages of what was run and what came out.

    python src/logbook.py build [RUN_FOLDER | s3://bucket/prefix …]     write the pages (default: from logs/)
    python src/logbook.py compare RUN RUN … [--title "DDP beside FSDP"]
    python src/logbook.py publish RUN … --to s3://bucket/prefix | DIR
    python src/logbook.py note RUN "text" [--name NAME] [--tag TAG …]

RUN is a run id, a part of one that only one run has, or the name that a note gave it.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from lockstep.runs.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from lockstep.runs.output import set_up
from lockstep.runs.provenance import REPOSITORY
from lockstep.storage.s3 import StoreError

log = logging.getLogger(__name__)


def build(options: argparse.Namespace) -> None:
    from lockstep.pages.build import belongs_here, run_folders_under
    from lockstep.pages.build import build as build_pages

    addresses = [source for source in options.sources if source.startswith("s3://")]
    given = [Path(source) for source in options.sources if source not in addresses]
    for path in given:
        if not run_folders_under(path):
            raise UserError(f"{path} holds no run: give a run folder, a folder of runs such as logs, or s3://….")
    folders = [folder for path in given for folder in run_folders_under(path)]
    if not options.sources:
        found = [folder for folder in run_folders_under(options.logs) if is_readable(folder)]
        folders = [folder for folder in found if belongs_here(folder, options.logbook)]
        if elsewhere := len(found) - len(folders):
            print(f"{elsewhere} runs keep their pages in another logbook (paths.logbook_dir).")
    if options.check:
        if addresses:
            raise UserError("--check compares with folders of this machine: leave s3://… out.")
        check(options.logbook, folders)
        return
    changed = build_pages(options.logbook, folders)
    for address in addresses:
        changed += build_from_bucket(address, options)
    print(f"{options.logbook}: {len(changed)} files changed" if changed else f"{options.logbook}: up to date")


def is_readable(folder: Path) -> bool:
    """One damaged record keeps no other run out of the logbook."""
    from lockstep.runs.record import read_record

    try:
        read_record(folder / "run.json")
    except (UserError, OSError, RecursionError) as error:
        log.warning(f"Left out: {folder} ({error}).")
        return False
    return True


def check(logbook: Path, folders: list[Path]) -> None:
    """UserError where a build would change a page; changes nothing itself."""
    import shutil

    from lockstep.pages.build import build as build_pages

    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "logbook"
        shutil.copytree(logbook, copy)
        changed = build_pages(copy, folders)
        if changed:
            names = ", ".join(str(path.relative_to(copy)) for path in changed[:5])
            raise UserError(
                f"{len(changed)} files of {logbook} are not up to date ({names}); make logbook writes them."
            )
    print(f"{logbook}: up to date")


def build_from_bucket(address: str, options: argparse.Namespace) -> list[Path]:
    from lockstep.pages.bucket_source import fetch_runs
    from lockstep.pages.build import build as build_pages
    from lockstep.pages.build import known_runs
    from lockstep.storage.bucket import Bucket
    from lockstep.storage.s3 import S3Options

    where = S3Options(address, endpoint_url=options.endpoint_url)
    with tempfile.TemporaryDirectory() as scratch:
        found = fetch_runs(Bucket(where), where.prefix, Path(scratch), known_runs(options.logbook))
        print(f"{address}: {len(found)} runs that the logbook did not have")
        return build_pages(options.logbook, found, shown_as=found)


def chosen_runs(options: argparse.Namespace) -> list[Any]:
    """The entries of the runs named on the command line, in that order; takes them in from logs/ where need be.

    Raises:
        UserError: no such run, or more than one.
    """
    from lockstep.pages.build import build as build_pages
    from lockstep.pages.build import known_runs, run_folders_under
    from lockstep.pages.page_set import load_entries
    from lockstep.runs.record import read_record

    known = known_runs(options.logbook)
    folders = {path.name: path for path in run_folders_under(options.logs)}
    asked = {name for name in folders for word in options.runs if word in name}
    newer = [
        folders[name]
        for name in sorted(asked)
        if known.get(name, "") < str(read_record(folders[name] / "run.json").get("updated_at"))
    ]
    if newer:
        build_pages(options.logbook, newer)
    entries = load_entries(options.logbook)
    return [one_run(entries, word) for word in options.runs]


def one_run(entries: list[Any], word: str) -> Any:
    exact = [entry for entry in entries if word == entry.run_id]
    named = [entry for entry in entries if word == entry.note.name]
    partly = [entry for entry in entries if word in entry.run_id]
    found = exact or named or partly
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(entry.run_id for entry in found[-3:])
        raise UserError(f"{word!r} means {len(found)} runs ({some} …): give more of the run id.")
    newest = ", ".join(entry.run_id for entry in entries[-3:]) or "there are none yet"
    raise UserError(f"The logbook has no run {word!r}; the newest are: {newest}.")


def compare(options: argparse.Namespace) -> None:
    from lockstep.pages.build import write_some_pages
    from lockstep.pages.comparison_page import labels_for, save_comparison

    entries = chosen_runs(options)
    if len(entries) < 2:
        raise UserError("A comparison takes two runs or more: logbook.py compare RUN RUN.")
    title = options.title or " beside ".join(labels_for(entries))
    name = save_comparison(options.logbook, title, [entry.run_id for entry in entries])
    write_some_pages(options.logbook, {entry.run_id for entry in entries})
    print(options.logbook / f"compare-{name}.md")


def publish(options: argparse.Namespace) -> None:
    from lockstep.pages.build import write_some_pages
    from lockstep.pages.publish import publish_report

    entries = chosen_runs(options)
    report = publish_report(
        options.logbook, entries, options.to, title=options.title, endpoint_url=options.endpoint_url, base=options.base
    )
    write_some_pages(options.logbook, set(report.runs))
    print(report.uri if report.uri.startswith("s3://") else (options.logbook / report.uri).resolve())
    if report.address.startswith("http"):
        print(report.address)


def note(options: argparse.Namespace) -> None:
    from lockstep.pages.build import write_some_pages
    from lockstep.pages.notes import add_note, run_note_path

    options.runs = [options.run]
    entry = chosen_runs(options)[0]
    if not (options.text or options.name is not None or options.tag is not None):
        raise UserError('Nothing to note: give a text, --name or --tag, as in logbook.py note RUN "text".')
    path = run_note_path(options.logbook, entry.run_id)
    add_note(path, options.text, options.name, options.tag)
    write_some_pages(options.logbook, {entry.run_id})
    print(path)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="logbook.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--logbook", type=Path, default=REPOSITORY / "logbook", help="where the pages are")
    top.add_argument("--logs", type=Path, default=REPOSITORY / "logs", help="where the run folders are")
    top.add_argument("--endpoint-url", help="of a store that speaks S3; none: Amazon's")
    doors = top.add_subparsers(required=True, metavar="build | compare | publish | note")

    door = doors.add_parser("build", help="write the pages")
    door.add_argument("sources", nargs="*", metavar="RUN_FOLDER|s3://…", help="default: every run under logs/")
    door.add_argument("--check", action="store_true", help="change nothing; exit code 2 where a page is not up to date")
    door.set_defaults(task=build)

    door = doors.add_parser("compare", help="write a page of runs side by side")
    door.add_argument("runs", nargs="+", metavar="RUN", help="the first is what the others are measured against")
    door.add_argument("--title", help="of the page; its file is named after it")
    door.set_defaults(task=compare)

    door = doors.add_parser("publish", help="write one HTML file with interactive curves, and link it")
    door.add_argument("runs", nargs="+", metavar="RUN")
    door.add_argument("--to", required=True, metavar="s3://bucket/prefix|DIR", help="where the file goes")
    door.add_argument("--title", help="of the report; its file is named after it")
    door.add_argument(
        "--base", metavar="URL", help="web address under which that place is read, if not the store's own"
    )
    door.set_defaults(task=publish)

    door = doors.add_parser("note", help="add a person's words, a name or tags to a run")
    door.add_argument("run", metavar="RUN")
    door.add_argument("text", nargs="?", default="", help="markdown, added as a paragraph")
    door.add_argument("--name", help="shown instead of the run id")
    door.add_argument("--tag", action="append", metavar="TAG", help="replaces the tags; may be given more than once")
    door.set_defaults(task=note)
    return top


def main(argv: list[str]) -> int:
    set_up()
    options = parser().parse_args(argv)
    try:
        options.task(options)
    except (UserError, StoreError) as error:
        log.error(error)
        return EXIT_USER_ERROR
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
