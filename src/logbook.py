"""The logbook: pages of what was run and what came out.

    python src/logbook.py keep RUN …      take runs of logs/ into the logbook; train.py logbook=keep does it itself
    python src/logbook.py remove RUN …    take them out again, files and all
    python src/logbook.py build [RUN_FOLDER …]    write the pages; take in the runs named here
    python src/logbook.py compare RUN RUN … [--keep] [--title "DDP beside FSDP"]    side by side; --keep: as a page
    python src/logbook.py publish RUN … --to s3://bucket/prefix | DIR | FILE.html
    python src/logbook.py query "status = 'finished' and val/acc > 0.9" [--sort NAME] [--json | --csv | --md]
    python src/logbook.py note RUN "text" [--name NAME] [--tag TAG …]

RUN is a run id, a part of one that only one run has, a run folder, or the name that a note gave it. note,
compare --keep and publish take the runs that they name into the logbook; publish does where others can open its report:
in a bucket, in this repository, under --base. Every run has a page of its own: logs/train/runs/<run_id>/page.md.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import argparse
import logging
import sys
from pathlib import Path

from lockstep.pages.choose import chosen_runs, one_folder, one_run
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.output import say, set_up
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.script import exit_code_of
from lockstep.storage.object_store import StoreError

log = logging.getLogger(__name__)


def build(options: argparse.Namespace) -> None:
    from lockstep.pages.build import build as build_pages
    from lockstep.pages.build import kept_folders, lost_folders, run_folders_under

    given = [Path(source) for source in options.sources]
    for path in given:
        if not run_folders_under(path):
            raise UserError(f"{path} holds no run: give a run folder, or a folder of runs such as logs.")
    folders = [folder for path in given for folder in run_folders_under(path)]
    if not options.sources:
        folders = [folder for folder in kept_folders(options.logs, options.logbook) if is_readable(folder)]
        if lost := lost_folders(options.logs, options.logbook):
            names = " ".join(folder.name for folder in lost)
            say(f"Lost before they could be kept: python src/logbook.py keep {names}")
    if options.check:
        check(options.logbook, folders)
        return
    changed = build_pages(options.logbook, folders)
    say(f"{options.logbook}: {len(changed)} files changed" if changed else f"{options.logbook}: up to date")
    if not options.sources:
        write_run_pages(run_folders_under(options.logs))


def write_run_pages(folders: list[Path]) -> None:
    """Of runs whose own page is missing or of an earlier record: they died, or are running."""
    from lockstep.pages.run_page import shows_record, write_run_page

    for run in map(RunFolder, folders):
        try:
            if not shows_record(run):
                write_run_page(run.path)
        except (UserError, OSError) as error:
            log.warning(f"{run.path} has no page ({error}).")


def keep(options: argparse.Namespace) -> None:
    from lockstep.pages.build import keep_run

    folders = [one_folder(options.logs, word) for word in options.runs]
    for page in dict.fromkeys(keep_run(folder, options.logbook) for folder in folders):
        say(page)


def remove(options: argparse.Namespace) -> None:
    from lockstep.pages.build import remove_runs
    from lockstep.pages.page_set import load_entries

    entries = load_entries(options.logbook)
    run_ids = [one_run(entries, Path(word).name).run_id for word in options.runs]
    changed = remove_runs(run_ids, options.logbook)
    say(f"{options.logbook}: {', '.join(run_ids)} removed, {len(changed)} files changed")


def is_readable(folder: Path) -> bool:
    """One damaged record keeps no other run out of the logbook."""
    from lockstep.runs.record import read_json

    try:
        read_json(folder / "run.json")
    except (UserError, OSError, RecursionError) as error:
        log.warning(f"Left out: {folder} ({error}).")
        return False
    return True


def check(logbook: Path, folders: list[Path]) -> None:
    """UserError where a build would change a page; changes nothing itself."""
    from lockstep.pages.build import not_up_to_date

    if changed := not_up_to_date(logbook, folders):
        names = ", ".join(changed[:5])
        raise UserError(f"{len(changed)} files of {logbook} are not up to date ({names}); make logbook writes them.")
    say(f"{logbook}: up to date")


def compare(options: argparse.Namespace) -> None:
    from lockstep.pages.build import write_some_pages
    from lockstep.pages.comparison_page import labels_for, save_comparison
    from lockstep.pages.terminal import comparison_text

    if len(options.runs) < 2:
        raise UserError("A comparison takes two runs or more: logbook.py compare RUN RUN.")
    if options.title and not options.keep:
        raise UserError("--title is of the page that --keep writes: give --keep too.")
    entries = chosen_runs(options.runs, options.logs, options.logbook, takes_in=options.keep)
    labels = labels_for(entries)
    say(comparison_text(entries, labels))
    if not options.keep:
        return
    title = options.title or " beside ".join(labels)
    name = save_comparison(options.logbook, title, [entry.run_id for entry in entries])
    write_some_pages(options.logbook, {entry.run_id for entry in entries})
    say(f"\n{options.logbook / f'compare-{name}.md'}")


def publish(options: argparse.Namespace) -> None:
    from lockstep.pages.build import write_some_pages
    from lockstep.pages.publish import is_for_others, publish_report

    is_linked = is_for_others(options.to, options.base, options.logbook)
    entries = chosen_runs(options.runs, options.logs, options.logbook, takes_in=is_linked)
    report = publish_report(
        options.logbook, entries, options.to, title=options.title, endpoint_url=options.endpoint_url, base=options.base
    )
    if is_linked:
        write_some_pages(options.logbook, set(report.runs))
    say(report.uri if report.uri.startswith("s3://") else (options.logbook / report.uri).resolve())
    if report.address.startswith("http"):
        say(report.address)


def note(options: argparse.Namespace) -> None:
    from lockstep.pages.build import write_some_pages
    from lockstep.pages.notes import add_note, run_note_path

    entry = chosen_runs([options.run], options.logs, options.logbook)[0]
    if not (options.text or options.name is not None or options.tag is not None):
        raise UserError('Nothing to note: give a text, --name or --tag, as in logbook.py note RUN "text".')
    path = run_note_path(options.logbook, entry.run_id)
    add_note(path, options.text, options.name, options.tag)
    write_some_pages(options.logbook, {entry.run_id})
    say(path)


def query(options: argparse.Namespace) -> None:
    from lockstep.pages.query import find_runs, listing

    found = find_runs(options.logbook, options.where, options.sort, ascending=options.ascending)
    say(listing(found, options.form, options.sort))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="logbook.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--logbook", type=Path, default=REPOSITORY / "logbook", help="where the pages are")
    top.add_argument("--logs", type=Path, default=REPOSITORY / "logs", help="where the run folders are")
    top.add_argument("--endpoint-url", help="of a store that speaks S3; none: Amazon's")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("keep", help="take runs into the logbook")
    command.add_argument("runs", nargs="+", metavar="RUN")
    command.set_defaults(task=keep)

    command = commands.add_parser("remove", help="take runs out of the logbook; their folders in logs/ stay")
    command.add_argument("runs", nargs="+", metavar="RUN")
    command.set_defaults(task=remove)

    command = commands.add_parser("build", help="write the pages")
    command.add_argument("sources", nargs="*", metavar="RUN_FOLDER", help="runs to take in; default: news of kept ones")
    command.add_argument(
        "--check", action="store_true", help="change nothing; exit code 2 where a page is not up to date"
    )
    command.set_defaults(task=build)

    command = commands.add_parser("compare", help="print runs side by side")
    command.add_argument("runs", nargs="+", metavar="RUN", help="the first is what the others are measured against")
    command.add_argument("--keep", action="store_true", help="as a page of the logbook, which takes the runs in, too")
    command.add_argument("--title", help="of that page; its file is named after it")
    command.set_defaults(task=compare)

    command = commands.add_parser("publish", help="write one HTML file with interactive curves, and link it")
    command.add_argument("runs", nargs="+", metavar="RUN")
    command.add_argument("--to", required=True, metavar="s3://bucket/prefix|DIR|FILE.html", help="where it goes")
    command.add_argument("--title", help="of the report; its file is named after it")
    command.add_argument(
        "--base", metavar="URL", help="web address under which that place is read, if not the store's own"
    )
    command.set_defaults(task=publish)

    command = commands.add_parser("query", help="list the logbook's runs for which an SQL condition holds")
    command.add_argument("where", nargs="?", default="1", metavar="WHERE", help="as \"status = 'finished'\"; none: all")
    command.add_argument("--sort", metavar="NAME", help="a column, as val/acc: the largest first")
    command.add_argument("--ascending", action="store_true", help="the smallest first")
    forms = command.add_mutually_exclusive_group()
    for form, words in (("json", "a list of records"), ("csv", "all columns"), ("md", "a table for a page")):
        forms.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=words)
    command.set_defaults(task=query, form="text")

    command = commands.add_parser("note", help="add a person's words, a name or tags to a run")
    command.add_argument("run", metavar="RUN")
    command.add_argument("text", nargs="?", default="", help="markdown, added as a paragraph")
    command.add_argument("--name", help="shown instead of the run id")
    command.add_argument("--tag", action="append", metavar="TAG", help="replaces the tags; may be given more than once")
    command.set_defaults(task=note)
    return top


def main(argv: list[str]) -> int:
    set_up()
    options = parser().parse_args(argv)
    return exit_code_of(lambda: options.task(options), StoreError)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
