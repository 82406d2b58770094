"""The logbook as a static site: every link in it leads somewhere, also offline, and nothing of a run takes effect."""

import posixpath
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from example_runs import write_run
from lockstep.pages.build import build, keep_run
from lockstep.pages.html_page import page_html
from lockstep.pages.page_set import load_entries
from lockstep.pages.publish import publish_report
from lockstep.pages.site import put_site, relative, site_files, write_site
from lockstep.runs.errors import UserError
from object_store import shared_store


class Links(HTMLParser):
    """What a page links to, which pictures it shows, which places it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links, self.pictures, self.places, self.scripts = [], [], set(), 0
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        held = dict(attributes)
        self.places.add(held.get("id"))
        self.scripts += tag == "script"
        if tag == "a" and "href" in held:
            self.links.append(held["href"])
        if tag == "img":
            self.pictures.append(held["src"])


@pytest.fixture
def whole(logbook, tmp_path):
    """The logbook of three runs with a report, a measurement, a note with links, and links that lead out of it."""
    publish_report(logbook, load_entries(logbook)[:2], str(logbook.parent / "reports"), title="Two ways")
    measured = logbook / "measurements" / "speed.md"
    measured.parent.mkdir()
    measured.write_text("# Speed & cost\n\n[back](../README.md#logbook) [code](../../src/train.py) [raw](speed.csv)\n")
    (measured.parent / "speed.csv").write_text("a,b\n")
    build(logbook, [], "2026-11-21T00:00:00Z")
    return logbook


def broken_links(files: dict[str, bytes]) -> list[tuple[str, str]]:
    parsed = {name: Links(data.decode()) for name, data in files.items() if name.endswith(".html")}
    broken = []
    for name, page in parsed.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
            target = target if parts.path else name
            if target not in files or (parts.fragment and parts.fragment not in parsed[target].places):
                broken.append((name, link))
    return broken


def test_every_link_of_the_site_leads_somewhere(whole):
    files = site_files(whole, relative)
    assert broken_links(files) == []
    assert {
        "index.html", "vit_ddp.html", "vit_fsdp.html", "compare-ddp-beside-fsdp.html", "measurements/speed.html",
        "measurements/speed.csv", "reports/two-ways.html", "curves/vit_ddp.html", "curves/vit_fsdp.html",
        "curves/compare-ddp-beside-fsdp.html",
    } == files.keys()  # fmt: skip
    links = Links(files["index.html"].decode()).links
    assert {"vit_ddp.html#run-2026-11-20_20-15-00_aa11bb", "compare-ddp-beside-fsdp.html", "reports/two-ways.html",
            "measurements/speed.html"} <= set(links)  # fmt: skip
    page = Links(files["measurements/speed.html"].decode())
    assert page.links == ["../index.html", "../index.html#logbook", "speed.csv"]  # what is not in the site is text


def test_the_check_of_links_sees_a_broken_one(whole):
    files = site_files(whole, relative)
    del files["vit_fsdp.html"]
    assert ("index.html", "vit_fsdp.html#run-2026-11-20_21-40-00_cc22dd") in broken_links(files)


def test_the_committed_logbook_has_no_broken_link():
    from lockstep.runs.provenance import REPOSITORY

    files = site_files(REPOSITORY / "logbook", relative)
    assert broken_links(files) == [] and len(files) > 40


def test_pages_stand_by_themselves(whole):
    page = site_files(whole, relative)["vit_ddp.html"].decode()
    found = Links(page)
    assert found.scripts == 0 and "default-src 'none'" in page
    assert len(found.pictures) == 3 and all(
        src.startswith("data:image/svg+xml;base64,PHN2Zy") for src in found.pictures
    )
    assert "<table>" in page and "<details><summary>" in page
    assert found.links[:2] == ["index.html", "curves/vit_ddp.html"]


def test_a_folder_for_github_pages(whole, tmp_path):
    index = write_site(whole, tmp_path / "site")
    assert index == tmp_path / "site" / "index.html" and (tmp_path / "site" / ".nojekyll").read_bytes() == b""
    assert (tmp_path / "site" / "measurements" / "speed.html").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_site(whole, tmp_path / "file")


@pytest.mark.slow
def test_a_private_bucket_is_read_by_signed_links_from_page_to_page(whole, monkeypatch):
    import urllib.error
    import urllib.request

    store = shared_store()
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    bucket = store.new_bucket()
    places = dict(put_site(whole, f"s3://{bucket}/lab book", store.endpoint_url, 1.0))
    assert next(iter(places)) == "index.html" and set(places) >= {"vit_ddp.html", "curves/vit_ddp.html"}
    assert "X-Amz-Expires=86400" in places["index.html"] and "X-Amz-Signature=" in places["index.html"]
    index = urllib.request.urlopen(places["index.html"])
    assert index.headers["Content-Type"] == "text/html; charset=utf-8"
    links = [link for link in Links(index.read().decode()).links if "vit_fsdp.html" in link]
    address, _, place = links[0].partition("#")
    assert place.startswith("run-") and b"Interactive curves" in urllib.request.urlopen(address).read()
    plain = put_site(whole, f"s3://{bucket}/b", store.endpoint_url, None)
    assert plain[0] == ("index.html", f"{store.endpoint_url}/{bucket}/b/index.html")
    with pytest.raises(UserError, match="--signed 8: a signature holds up to 7 days"):
        put_site(whole, f"s3://{bucket}/b", store.endpoint_url, 8)


def test_a_report_elsewhere_on_this_machine_is_not_published(whole, tmp_path):
    (tmp_path.parent / "secret.html").write_text("secret")
    link = whole / "reports" / "two-ways.json"
    link.write_text(link.read_text().replace("../reports/two-ways.html", "../../secret.html"))
    assert not any(data == b"secret" for data in site_files(whole, relative).values())


def test_nothing_of_a_run_or_note_takes_effect(tmp_path):
    evil = "<script>alert(1)</script>"
    folder = write_run(tmp_path / "runs", "r", experiment=evil, tags=[f"<img src=x onerror=y>{evil}"], command=evil)
    page = keep_run(folder, tmp_path / "logbook")
    page.write_text(page.read_text() + f'\n{evil}\n\na {evil} <a id="x" onclick="y">z</a> [l](javascript:alert(1))\n')
    for name, data in site_files(tmp_path / "logbook", relative).items():
        if not name.startswith("curves/"):
            found = Links(data.decode())
            assert found.scripts == 0 and b'onclick="y">z' not in data.replace(b"&quot;", b"'")
            assert not [link for link in found.links if link.startswith("javascript")]


@pytest.mark.parametrize(
    "text", ["<details open onToggle=x>", "<a href=x>", '<a id="a b">', "<style>", "<b/onclick=x>"]
)
def test_other_tags_than_ours_are_text(text):
    page = page_html(f"# T\n\n{text} and in {text} a line", [], lambda _: None, lambda _: None)
    assert text not in page.split("<main>")[1] and "T</h1>" in page


def test_headings_have_the_names_that_github_gives_them():
    page = page_html("# A b, c!\n\n## A b c\n\n[to](#a-b-c-1)", [], lambda _: None, lambda _: None)
    assert '<h1 id="a-b-c">' in page and '<h2 id="a-b-c-1">' in page and 'href="#a-b-c-1"' in page


def test_a_logbook_without_pages_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="has no pages yet"):
        site_files(tmp_path, relative)
