"""A page of the logbook from markdown to HTML that stands by itself: styles and pictures are within it.

What text of a run says is escaped in the markdown already; of raw HTML only the tags that our pages write pass.
"""

import base64
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from lockstep.pages.html_report import part

# Where a link leads, given as the page says it; None: nowhere within the site, so that its text alone stays.
FindLink = Callable[[str], str | None]
FindFile = Callable[[str], Path | None]

OUR_TAG = re.compile(r'</?(?:details|summary|code|span|sub|sup|br)>|<a id="[\w.-]+">|</a>')
PIECE = re.compile(r"<!--.*?-->|</?[A-Za-z][^>]*>|[^<]+|<", re.DOTALL)
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|//|#")
PICTURES = {".svg": "image/svg+xml", ".png": "image/png"}


def page_html(text: str, nav: Sequence[tuple[str, str]], link: FindLink, file: FindFile) -> str:
    """
    Args:
        text: markdown.
        nav: (words, address) of the links at the top.
        link: for relative links.
        file: the picture of that address.
    """
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = reader.parse(text)
    _name_headings(tokens)
    for token in tokens:
        for each in [token, *(token.children or ())]:
            _place(each, link, file)
    title = next((words.content for mark, words in zip(tokens, tokens[1:]) if mark.type == "heading_open"), "Logbook")
    parts = {
        "@TITLE@": html.escape(title),
        "@STYLE@": part("site.css"),
        "@NAV@": " ".join(f'<a href="{html.escape(address)}">{html.escape(words)}</a>' for words, address in nav),
    }
    page = part("site.html")
    for mark, words in parts.items():
        page = page.replace(mark, words)
    before, after = page.split("@BODY@")
    return before + reader.renderer.render(tokens, reader.options, {}) + after


def _place(token: Token, link: FindLink, file: FindFile) -> None:
    """Links to where the site has them, pictures into the page, other HTML than ours as text."""
    if token.type in ("html_block", "html_inline"):
        token.content = "".join(map(_only_ours, PIECE.findall(token.content)))
    elif token.type == "link_open":
        address = str(token.attrs.get("href", ""))
        if not SCHEME.match(address):
            found = link(address)
            token.attrs = {} if found is None else {"href": found}  # an <a> without an address is plain text
    elif token.type == "image":
        token.attrs["src"] = _data_address(file(unquote(str(token.attrs.get("src", "")))))


def _only_ours(piece: str) -> str:
    if piece.startswith("<!--"):
        return ""
    return piece if not piece.startswith("<") or OUR_TAG.fullmatch(piece) else html.escape(piece)


def _data_address(path: Path | None) -> str:
    if path is None or path.suffix not in PICTURES:
        return "data:,"
    return f"data:{PICTURES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _name_headings(tokens: list[Any]) -> None:
    """As GitHub does, so that links to a heading hold."""
    seen: dict[str, int] = {}
    for mark, words in zip(tokens, tokens[1:]):
        if mark.type == "heading_open":
            name = re.sub(r"[^\w\- ]", "", words.content.lower()).strip().replace(" ", "-")
            count = seen[name] = seen.get(name, -1) + 1
            mark.attrs["id"] = f"{name}-{count}" if count else name
