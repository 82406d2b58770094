"""The whole logbook as one static site: index, pages, measurements, and interactive curves for every page of runs.

Each file opens by itself, from a disk too: pictures and styles are within it, links are relative.
"""

import os
import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from lockstep.pages.comparison_page import labels_for, saved_comparisons
from lockstep.pages.entry import Entry, experiment_slug
from lockstep.pages.html_page import page_html
from lockstep.pages.html_report import report_html
from lockstep.pages.page_set import load_entries, place_on_pages
from lockstep.pages.publish import saved_reports
from lockstep.runs.errors import UserError

INDEX = "index.html"
CONTENT_TYPES = {".html": "text/html; charset=utf-8", ".json": "application/json"}
MAX_DAYS = 7.0  # that a signed link can hold

Address = Callable[[str, str], str]  # (page, other file of the site) → what the link on that page says


def site_files(logbook: Path, address: Address) -> dict[str, bytes]:
    """{path in the site: content}.

    Raises:
        UserError: the logbook has no index.
    """
    if not (logbook / "README.md").exists():
        raise UserError(f"{logbook} has no pages yet: python src/logbook.py build writes them.")
    sources = [*sorted(logbook.glob("*.md")), *sorted((logbook / "measurements").glob("*.md"))]
    pages = {path.relative_to(logbook).as_posix(): path for path in sources}
    home = logbook.resolve()
    reports = {(home / report.uri).resolve(): f"reports/{report.name}.html" for report in saved_reports(logbook)}
    files = {name: path.read_bytes() for path, name in reports.items() if _is_report(path, home.parent)}
    curves = curves_of_pages(logbook)
    files |= {_curves_name(name): report_html(*held).encode() for name, held in curves.items()}
    for name, path in pages.items():
        own = html_name(name)

        def place(said: str, name: str = name, own: str = own) -> str | None:
            return _link(said, name, own, home, pages, reports, files, address)

        def picture(said: str, path: Path = path) -> Path | None:
            found = (path.parent / said).resolve()
            return found if found.is_file() and found.is_relative_to(home) else None

        nav = [("Logbook", address(own, INDEX))]
        if name in curves:
            nav.append(("Interactive curves of these runs", address(own, _curves_name(name))))
        files[own] = page_html(path.read_text(encoding="utf-8", errors="replace"), nav, place, picture).encode()
    return files


def _is_report(path: Path, repository: Path) -> bool:
    """A link's file may say anything: no other file of this machine is published."""
    return path.suffix == ".html" and path.is_relative_to(repository) and path.is_file()


def html_name(page: str) -> str:
    return INDEX if page == "README.md" else f"{page.removesuffix('.md')}.html"


def _curves_name(page: str) -> str:
    return f"curves/{html_name(page)}"


def _link(
    said: str, name: str, own: str, home: Path, pages: dict[str, Path], reports: dict[Path, str],
    files: dict[str, bytes], address: Address,
) -> str | None:  # fmt: skip
    """A relative link of the page `name` as the site has it; a file of the logbook comes along."""
    target, _, fragment = said.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(target)))
    path = (home / target).resolve()
    if target in pages:
        found = html_name(target)
    elif path in reports and reports[path] in files:
        found = reports[path]
    elif path.is_file() and path.is_relative_to(home):
        found = path.relative_to(home).as_posix()
        files[found] = path.read_bytes()
    else:
        return None
    return address(own, found) + (f"#{fragment}" if fragment else "")


def curves_of_pages(logbook: Path) -> dict[str, tuple[str, Sequence[Entry], Sequence[str]]]:
    """{page: (title, its runs, their labels)}, newest run first."""
    entries = load_entries(logbook)
    by_experiment: dict[str, list[Entry]] = {}
    for entry in entries:
        by_experiment.setdefault(experiment_slug(entry.facts), []).append(entry)
    by_page: dict[str, list[Entry]] = {}
    for name, members in by_experiment.items():
        place_on_pages(name, members)
        for entry in reversed(members):
            by_page.setdefault(entry.page, []).append(entry)
    found = {page: (members[0].facts.experiment, members) for page, members in by_page.items()}
    known = {entry.run_id: entry for entry in entries}
    for name, held in saved_comparisons(logbook).items():
        if members := [known[run_id] for run_id in held.runs if run_id in known]:
            found[f"compare-{name}.md"] = (held.title, members)
    return {page: (title, members, labels_for(members)) for page, (title, members) in found.items()}


def relative(page: str, other: str) -> str:
    return quote(os.path.relpath(other, os.path.dirname(page) or "."))


def write_site(logbook: Path, folder: Path) -> Path:
    """Into a folder, which GitHub Pages takes as it is (.nojekyll); returns the index.

    Raises:
        UserError: it cannot be written.
    """
    files = site_files(logbook, relative) | {".nojekyll": b""}
    try:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): give another folder or s3://….") from None
    return folder / INDEX


def put_site(logbook: Path, to: str, endpoint_url: str | None, days: float | None) -> list[tuple[str, str]]:
    """Into a bucket.

    Args:
        days: links are signed and hold so long, for a bucket that nobody may read without; None: plain ones.
    Returns:
        (path in the site, address) of the index and of every other page.
    Raises:
        UserError, StoreError: the bucket cannot be written, or `days` are more than a signature holds.
    """
    from lockstep.storage.bucket import open_store

    if days is not None and not 0 < days <= MAX_DAYS:
        raise UserError(f"--signed {days:g}: a signature holds up to {MAX_DAYS:g} days.")
    store = open_store({"uri": to, "endpoint_url": endpoint_url})

    def signed(_page: str, name: str) -> str:
        return store.signed(f"{store.prefix}{name}", (days or 0) * 86400)

    files = site_files(logbook, relative if days is None else signed)
    for name, content in sorted(files.items(), key=lambda item: item[0] == INDEX):  # which leads to the others
        kind = CONTENT_TYPES.get(Path(name).suffix, "application/octet-stream")
        store.put(f"{store.prefix}{name}", content, content_type=kind)
    names = sorted((name for name in files if name.endswith(".html")), key=lambda name: (name != INDEX, name))
    web = f"{store.web_root}{store.prefix}"
    return [(name, signed("", name) if days is not None else web + quote(name)) for name in names]
