"""Publishing a report, and which were published: `logbook/reports/<name>.json` holds the link to each."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from lockstep.pages.comparison_page import labels_for
from lockstep.pages.entry import Entry
from lockstep.pages.html_report import report_html
from lockstep.pages.json_values import as_text, items, mapping
from lockstep.pages.markdown import plain
from lockstep.pages.names import free_name
from lockstep.pages.source import write_if_changed
from lockstep.runs.errors import UserError
from lockstep.runs.files import write_atomically
from lockstep.runs.foreign_files import read_json
from lockstep.runs.redact import redact_text

HOW_TO_OPEN = "GitHub shows an HTML file as its source: download it and open it in a browser"


def is_shown_as_source(link: str) -> bool:
    """Whether a report's link leads to a file of the repository."""
    return "](" in link and not re.search(r"\]\(https?:", link)


@dataclass(frozen=True)
class Report:
    """One published report.

    Args:
        name: of its file.
        address: where a browser finds it: https://…, a path from the logbook, or one of this machine.
        uri: where it was written: s3://…, or the same path.
    """

    name: str
    title: str
    runs: tuple[str, ...]
    address: str
    uri: str

    @property
    def link(self) -> str:
        """Markdown."""
        return f"[{plain(self.title)}]({quote(redact_text(self.address), safe=':/%@?=&+,;~-._')})"


def publish_report(
    logbook: Path,
    entries: Sequence[Entry],
    to: str,
    title: str | None = None,
    endpoint_url: str | None = None,
    base: str | None = None,
) -> Report:
    """Write the report of these runs to a bucket or a folder, and remember its link where others can follow it.

    Args:
        to: s3://bucket/prefix, or a folder; of a name that ends with .html that one file.
        base: the web address under which readers see that place.
    Raises:
        UserError, StoreError: the place cannot be written.
    """
    labels = labels_for(entries)
    title = title or (" beside ".join(labels) if len(labels) <= 4 else f"{labels[0]} and {len(labels) - 1} more")
    name, title = free_name(logbook / "reports", title, [entry.run_id for entry in entries])
    page = report_html(title, entries, labels).encode()
    place, file_name = os.path.split(to) if to.endswith(".html") else (to, f"{name}.html")
    if to.startswith("s3://"):
        uri, address = put_report(page, file_name, place, endpoint_url)
    else:
        uri, address = write_report(page, file_name, Path(place), logbook)
    if base:
        address = f"{base.rstrip('/')}/{file_name}"
    report = Report(name, title, tuple(entry.run_id for entry in entries), redact_text(address), uri)
    if is_for_others(to, base, logbook):
        save_report(logbook, report)
    return report


def is_for_others(to: str, base: str | None, logbook: Path) -> bool:
    """Whether the report goes where others find it: of a path of this machine git shall keep nothing."""
    inside = Path(to).resolve().is_relative_to(logbook.resolve().parent)
    return bool(base) or to.startswith("s3://") or inside


def put_report(page: bytes, file_name: str, to: str, endpoint_url: str | None) -> tuple[str, str]:
    """(s3:// address, web address); a browser can read the latter where the bucket's policy lets it."""
    from lockstep.storage.bucket import open_store

    store = open_store({"uri": to, "endpoint_url": endpoint_url})
    key = f"{store.prefix}{file_name}"
    store.put(key, page, content_type="text/html; charset=utf-8")
    return store.root + key, store.web_root + key


def write_report(page: bytes, file_name: str, folder: Path, logbook: Path) -> tuple[str, str]:
    """The place twice, as a page of the logbook links it: relative where it stays within the same repository."""
    path = (folder / file_name).resolve()
    try:
        write_atomically(path, lambda file: file.write(page), binary=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): give another folder or s3://….") from None
    inside = path.is_relative_to(logbook.resolve().parent)
    place = os.path.relpath(path, logbook.resolve()) if inside else str(path)
    return place, place


def saved_reports(logbook: Path) -> list[Report]:
    """In alphabetical order of their names."""
    found = []
    for path in sorted((logbook / "reports").glob("*.json")):
        try:
            held = mapping(read_json(path))
        except (OSError, ValueError):
            continue
        runs = tuple(run for run in items(held.get("runs")) if isinstance(run, str))
        if address := as_text(held.get("address")):
            title = as_text(held.get("title")) or path.stem
            found.append(Report(path.stem, title, runs, address, as_text(held.get("uri"))))
    return found


def listed_reports(logbook: Path) -> list[Report]:
    """Without those of older versions that lie somewhere on the machine that wrote them."""
    return [report for report in saved_reports(logbook) if not report.address.startswith("/")]


def save_report(logbook: Path, report: Report) -> None:
    held = {key: value for key, value in asdict(report).items() if key != "name"}
    write_if_changed(logbook / "reports" / f"{report.name}.json", json.dumps(held, indent=1) + "\n")


def report_links(reports: Sequence[Report]) -> dict[str, list[str]]:
    """Run id to the links of its reports."""
    links: dict[str, list[str]] = {}
    for report in reports:
        for run_id in report.runs:
            links.setdefault(run_id, []).append(report.link)
    return links
