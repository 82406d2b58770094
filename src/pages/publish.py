"""Which reports were published, and the link to each: `logbook/reports/<name>.json`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from pages.facts import as_text, items, mapping
from pages.markdown import code, plain
from pages.redact import redact_text
from pages.source import write_if_changed


@dataclass(frozen=True)
class Report:
    """One published report.

    Args:
        address: where a browser finds it: https://…, or a path from the logbook.
        uri: where it was written: s3://…, or the same path.
    """

    title: str
    runs: tuple[str, ...]
    address: str
    uri: str

    @property
    def link(self) -> str:
        """Markdown; an address that no page can link to stands there as text."""
        if self.address.startswith("/"):
            return f"{plain(self.title)}: {code(self.address)}"
        return f"[{plain(self.title)}]({quote(redact_text(self.address), safe=':/%@?=&+,;~-._')})"


def saved_reports(logbook: Path) -> list[Report]:
    """In alphabetical order of their names."""
    found = []
    for path in sorted((logbook / "reports").glob("*.json")):
        try:
            held = mapping(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
        runs = tuple(run for run in items(held.get("runs")) if isinstance(run, str))
        if address := as_text(held.get("address")):
            found.append(Report(as_text(held.get("title")) or path.stem, runs, address, as_text(held.get("uri"))))
    return found


def save_report(logbook: Path, name: str, report: Report) -> None:
    text = json.dumps(asdict(report), indent=1)
    write_if_changed(logbook / "reports" / f"{name}.json", text + "\n")


def report_links(reports: Sequence[Report]) -> dict[str, list[str]]:
    """Run id to the links of its reports."""
    links: dict[str, list[str]] = {}
    for report in reports:
        for run_id in report.runs:
            links.setdefault(run_id, []).append(report.link)
    return links
