"""Markdown that GitHub renders, out of text that nobody vouches for: a tag, an error, a host name, a diff.

`plain` and `code` are safe anywhere inside a line, also in a table cell; `code_block` and `table` are whole blocks.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

# C0 and C1 controls but tab and newline, bidirectional overrides, line separators, lone surrogates, non-characters
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb\ufffe\uffff]"
)
ESCAPES = {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    "$": "<span>$</span>",  # GitHub would typeset what stands between two
    **{mark: "\\" + mark for mark in "\\`*[]~|#!"},
}
SPECIAL = re.compile(r"[&<>$\\`*\[\]~|#!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=www)\.|:(?=//)|@", re.IGNORECASE)


def clean(text: object) -> str:
    """Without control characters and with Unix line ends; nothing of None."""
    text = "" if text is None else str(text)
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n").replace("\r", "\n"))


def one_line(text: object, limit: int = 300) -> str:
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def plain(text: object, limit: int = 300) -> str:
    """One line that shows exactly this text: no markup, no link, no HTML of it takes effect."""
    return SPECIAL.sub(_escape, one_line(text, limit))


def _escape(match: re.Match) -> str:
    mark = match.group()
    return ESCAPES.get(mark) or ("\\_" if mark == "_" else f"&#{ord(mark)};")


def code(text: object, limit: int = 300) -> str:
    """A code span, in a table cell too (a pipe must be escaped there, and is shown bare everywhere on GitHub)."""
    line = one_line(text, limit)
    if not line:
        return ""
    if "|" in line or "\\" in line:  # a backslash before a pipe cannot be written in a span within a table
        inner = "".join(f"&#{ord(c)};" if SPECIAL.match(c) or c == "_" else c for c in line)
        return f"<code>{inner}</code>"
    fence = "`" * (_longest_ticks(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def code_block(text: object, language: str = "", limit: int = 20_000, whole: str = "") -> str:
    """A fenced block; longer text is cut at a line, and says so, and which file is `whole`."""
    body = clean(text).strip("\n")
    if len(body) > limit:
        kept = body[:limit].rsplit("\n", 1)[0]
        body = f"{kept}\n… {len(body) - len(kept):,} more characters {f'in {whole}' if whole else 'left out here'}"
    fence = "`" * max(3, _longest_ticks(body) + 1)
    return f"{fence}{language}\n{body}\n{fence}\n"


def _longest_ticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> str:
    """A table of cells that are escaped already; an empty string where there are no rows.

    Args:
        right: one letter per column, `r` for right-aligned numbers.
    """
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    rule = ["---:" if right[i : i + 1] == "r" else "---" for i in range(len(head))]
    return "\n".join(["| " + " | ".join(head) + " |", "| " + " | ".join(rule) + " |", *lines]) + "\n"


def details(summary: str, body: str) -> str:
    """A folded part; an empty string where there is nothing to fold."""
    return f"<details><summary>{summary}</summary>\n\n{body.rstrip()}\n\n</details>\n" if body.strip() else ""


def quote(text: str) -> str:
    """A person's own markdown, kept inside a block quote so that it cannot reach the rest of the page."""
    return "\n".join(f"> {line}".rstrip() for line in clean(text).strip().split("\n")) + "\n"


def slug(text: object, limit: int = 60) -> str:
    """A file name: letters, digits and dashes; where letters of the text are lost, its hash keeps two such apart."""
    name = re.sub(r"[^a-z0-9_]+", "-", str(text).lower())
    short = name[:limit].strip("-_")
    if short and len(name) <= limit and not any(c.isalnum() and not c.isascii() for c in str(text)):
        return short
    mark = hashlib.sha256(str(text).encode(errors="replace")).hexdigest()[:6]
    return f"{short[: limit - 7].strip('-_') or 'unnamed'}-{mark}"


def blocks(parts: Iterable[str]) -> str:
    """One page of blocks with one empty line between, and none where a block is empty."""
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"
