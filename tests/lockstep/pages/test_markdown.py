"""Text of a run shows as it is and does nothing else: in a cell, a code span, a block."""

import html
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lockstep.pages.markdown import clean, code, code_block, details, one_line, plain, quote, slug, table

MARKS = st.sampled_from("|`<>&[]()*_\\~#!$@:/w.-\n \r\tab")
ANY_TEXT = st.text(st.characters(), max_size=80) | st.text(MARKS, max_size=60)
RENDER = MarkdownIt("commonmark", {"html": True}).enable("table").enable("strikethrough")


def cells(page: str) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", RENDER.render(page), re.DOTALL)


def text_of(rendered: str) -> str:
    return html.unescape(re.sub(r"</?(?:span|code)>", "", rendered))


@settings(deadline=None, database=None, max_examples=150)
@given(ANY_TEXT)
def test_plain_shows_exactly_its_text_in_a_cell(text):
    found = cells(table(("a", "b"), [[plain(text), "next"]]))
    assert len(found) == 2 and found[1] == "next"
    assert text_of(found[0]) == one_line(text)
    assert not re.search(r"<(?!/?span>)", found[0])


@settings(deadline=None, database=None, max_examples=150)
@given(ANY_TEXT)
def test_code_shows_exactly_its_text_in_a_cell(text):
    found = cells(table(("a", "b"), [[code(text), "next"]]))
    assert len(found) == 2 and found[1] == "next"
    assert text_of(found[0]) == one_line(text)


@settings(deadline=None, database=None, max_examples=150)
@given(ANY_TEXT)
def test_a_block_holds_any_text(text):
    rendered = RENDER.render(code_block(text, "diff") + "\nafter\n")
    body = clean(text).strip("\n")
    assert rendered.endswith("</code></pre>\n<p>after</p>\n")
    assert html.unescape(rendered.split("<code", 1)[1].split(">", 1)[1].rsplit("</code>", 1)[0]) == (body + "\n")


def test_mentions_and_web_addresses_are_no_links():
    assert "://" not in plain("see https://evil.example/x") and "www." not in plain("www.evil.example")
    assert plain("@someone #12") == "&#64;someone \\#12"


def test_controls_and_bidirectional_overrides_are_replaced():
    assert clean("a\x1b[31mb\u202ec\ud800d\r\ne") == "a\ufffd[31mb\ufffdc\ufffdd\ne"


def test_long_block_is_cut_at_a_line_and_says_so():
    text = "\n".join(["x" * 99] * 50)
    block = code_block(text, limit=1000)
    assert "… 4,000 more characters left out here" in block and len(block) < 1200
    assert "… 4,000 more characters in code.diff\n" in code_block(text, limit=1000, whole="code.diff")


def test_a_person_s_markdown_stays_inside_its_quote():
    rendered = RENDER.render(quote("**good**\n\n<!-- never closed\n# heading") + "\nafter\n")
    assert rendered.startswith("<blockquote>") and rendered.endswith("</blockquote>\n<p>after</p>\n")


def test_nothing_to_fold_is_nothing():
    assert details("title", " \n") == "" and table(("a",), []) == ""


def test_slug_is_a_file_name():
    assert slug("../../Etc/passwd") == "etc-passwd" and slug("Batch 128 as 8 × 16") == "batch-128-as-8-16"


@pytest.mark.parametrize("one, other", [("訓練一", "訓練二"), ("Größe", "Gräße"), ("///", "..."), ("x" * 61, "x" * 62)])
def test_texts_that_lose_letters_keep_names_of_their_own(one, other):
    assert slug(one) == slug(one) != slug(other)
    assert all(re.fullmatch(r"[a-z0-9_-]{1,60}", slug(text)) for text in (one, other))
