"""Whatever stands in a record, a source or a config: every page is built, and no text of it becomes markup."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from example_runs import example_record
from lockstep.pages.build import build
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.html_report import report_html
from lockstep.pages.notes import Note
from lockstep.pages.page_set import all_pages
from lockstep.pages.source import dump, flatten, limited
from lockstep.runs.record import SCHEMA_VERSION
from lockstep.runs.redact import redact

RENDER = MarkdownIt("commonmark", {"html": True}).enable("table")
OURS = {
    "h1", "h2", "p", "a", "table", "thead", "tbody", "tr", "th", "td", "code", "pre", "strong", "em", "blockquote",
    "details", "summary", "img", "span", "ul", "li",
}  # fmt: skip
TEXT = st.text(max_size=30) | st.sampled_from(
    ["a|b", "</details><script>alert(1)</script>", "`x` | `y`", "[x](javascript:alert(1))", "line\nbreak", "$x$",
     "\ud800", "| --- |", "```\n# heading", "2026-11-20T10:00:00Z", "finished", "nan", "<!--", "@DATA@",
     "</script>", "\u202e"]
)  # fmt: skip
NUMBER = st.integers() | st.floats() | st.just(10**400)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KEYS = [*example_record("x"), "strategy", "class_names", "throughput"]
RECORD = st.fixed_dictionaries({}, optional={key: ANY for key in KEYS})
NESTED = st.sampled_from(
    [("throughput", "step_seconds"), ("cost", "usd"), ("hardware", "nodes"), ("code", "commit"), ("metrics", "val/acc"),
     ("largest_batch", "per_device"), ("best_checkpoint", "sha256"), ("restarts", "at"), ("error", "message")]
)  # fmt: skip
CURVES = st.dictionaries(st.sampled_from(["train/loss", "val/acc", "lr", "time_s", "x<y"]), ANY, max_size=3)
REAL_CURVE = st.lists(st.floats(allow_nan=False, min_value=-1e17, max_value=1e17), max_size=6).map(
    lambda values: [list(range(len(values))), values]
)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.targets += [value for name, value in attrs if name in ("href", "src")]


def entry_of(record, curves, config, note="") -> Entry:
    """As a run folder with such a run.json would arrive in the logbook."""
    source = {
        "run_id": "run-1", "folder": "logs/run-1", "record": limited(record), "curves": curves, "changed": None,
        "config": limited(flatten(config)), "hardware": curves, "confusion": curves, "code_diff": config,
    }  # fmt: skip
    source = json.loads(json.dumps(redact(source), allow_nan=True))
    source["run_id"] = "run-1"
    return Entry(RunFacts(source, "2026-11-21T00:00:00Z"), Note(text=note))


def check_pages(tmp_path, entries) -> dict[str, str]:
    pages = dict(all_pages(tmp_path, entries, None))
    for name, text in pages.items():
        text.encode()
        if name.endswith(".svg"):
            ElementTree.fromstring(text)
            continue
        tags = Tags()
        tags.feed(RENDER.render(text))
        assert tags.seen <= OURS, (name, tags.seen - OURS)
        assert all(re.fullmatch(r"[\w./#-]+", target) for target in tags.targets), tags.targets
    rows = [line for line in RENDER.render(pages["README.md"]).split("<h2>All runs")[1].split("<tr>")[2:]]
    assert len(rows) == len(entries) and all(row.count("<td") == 18 for row in rows)
    return pages


@settings(deadline=None, database=None, max_examples=100)
@given(RECORD, CURVES, ANY)
def test_any_record_any_source(tmp_path_factory, record, curves, config):
    entries = [entry_of(record, curves, config), entry_of(example_record("run-1"), {}, {})]
    check_pages(tmp_path_factory.getbasetemp() / "none", entries)
    html = report_html("any", entries, ["</script><b>", "x"])
    assert html.count("</script>") == 3
    data = html.split('id="data">')[1].split("</script>")[0]
    assert "<" not in data and json.loads(data)["runs"][0]["label"] == "</script><b>"


@settings(deadline=None, database=None, max_examples=100)
@given(NESTED, ANY, REAL_CURVE)
def test_any_value_deep_in_a_real_record(tmp_path_factory, place, value, curve):
    record = example_record("run-1")
    record[place[0]] = [{place[1]: value}] if place[0] == "restarts" else {place[1]: value}
    entries = [entry_of(record, {"train/loss": curve, "val/acc": curve}, {"a": {"b": value}})]
    check_pages(tmp_path_factory.getbasetemp() / "none", entries)


@pytest.mark.parametrize("version", [None, 0, 1, "x"])
def test_older_and_damaged_schema_versions(tmp_path, version):
    record = example_record("run-1")
    if version is None:
        record = {"run_id": "run-1", "status": "finished"}  # the first records, before there was a version
    else:
        record["schema_version"] = version
    check_pages(tmp_path, [entry_of(record, {}, {})])


def test_a_record_of_a_newer_schema_is_left_out_and_named(logbook, caplog):
    path = next((logbook / "runs").glob("*.json"))
    source = json.loads(path.read_text())
    source["record"]["schema_version"] = SCHEMA_VERSION + 1
    path.write_text(dump(source))
    build(logbook)
    assert path.stem not in (logbook / "README.md").read_text()
    assert f"Left out: {path} has schema version 2 and this program reads up to 1: update this clone." in caplog.text


def test_a_source_is_json_whatever_was_in_the_record():
    record = {"big": 10**400, "nan": float("nan"), "deep": [[[[[[[[[[[[[[[1]]]]]]]]]]]]]]], "long": "x" * 10_000}
    kept = json.loads(dump({"run_id": "r", "record": limited(record)}))["record"]
    assert kept["nan"] == "nan" and kept["big"].startswith("1000") and len(kept["long"]) == 4001
