"""Markdown from the templates in templates/, with text of a run escaped and numbers as a reader expects them."""

import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from markupsafe import Markup

from lockstep.runs import output

SPECIAL = re.compile(r"[&<>$\\`*\[\]~|#!@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=www)\.|:(?=//)", re.IGNORECASE)
SHARES = {
    "acc": "accuracy", "acc_top5": "accuracy, top 5", "f1_macro": "F1, mean of the classes",
    "balanced_acc": "balanced accuracy", "ece": "calibration error",
}  # fmt: skip
NB = "\N{NO-BREAK SPACE}"  # a number and its unit stay on one line


def plain(text: object, limit: int = 300) -> Markup:
    """Return one line that shows exactly this text, also in a table cell: no markup, link or HTML takes effect."""
    return Markup(SPECIAL.sub(lambda match: f"&#{ord(match.group())};", _one_line(text, limit)))


def code(text: object, limit: int = 300) -> Markup:
    line = _one_line(text, limit)
    return Markup(f"<code>{plain(line, limit)}</code>" if re.search(r"[`|\\]", line) else f"`{line}`" if line else "")


def _one_line(text: object, limit: int) -> str:
    line = re.sub(r"\s*[ \t\r\n]\s*", " ", output.UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text))).strip(" ")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def block(text: object, language: str = "", limit: int = 20_000) -> Markup:
    """Return a fenced block; longer text is cut."""
    body = output.UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text)).strip("\n")
    body = body if len(body) <= limit else body[:limit] + f"\n… {len(body) - limit:,} more characters"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return Markup(f"{fence}{language}\n{body}\n{fence}")


def metric(value: Any, name: str) -> str:
    """Return a metric's value: shares in percent, others with four digits, a dash without one."""
    if not isinstance(value, int | float):
        return str(value or "–")
    return percent(value) if is_share(name) else f"{value:.4g}"


def is_share(name: str) -> bool:
    return re.sub("^(train|val|test)[/_]", "", name) in SHARES


def percent(share: float | None, digits: int = 2) -> str:
    return f"{share * 100:.{digits}f}{NB}%" if isinstance(share, int | float) else "–"


def number(value: float | None, unit: str = "") -> str:
    """Return 12,345 or 98.1 or 9.81, and its unit."""
    if not isinstance(value, int | float):
        return "–"
    shown = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{shown}{NB}{unit}".strip(NB)


def dollars(value: float | None) -> str:
    if not isinstance(value, int | float):
        return "–"
    return f"${value:.2f}" if value >= 0.1 or value == 0 else f"${value:.2g}"


def duration(seconds: float | None) -> str:
    return output.duration(seconds).replace(" ", NB) if isinstance(seconds, int | float) else "–"


def folded(command: str, width: int = 96) -> str:
    """Return a shell command over as many lines as it takes."""
    try:
        lines, *words = map(shlex.quote, shlex.split(command))
    except ValueError:  # an open quote, or nothing
        return command
    for word in words:
        last = lines.rpartition("\n")[2]
        lines += f" \\\n  {word}" if len(last) + len(word) > width else f" {word}"
    return lines


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of equally many cells as text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@cache
def environment() -> Environment:
    """Return the environment of the templates, with the functions above as filters."""
    env = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), trim_blocks=True, lstrip_blocks=True,
        autoescape=True, undefined=ChainableUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else plain("" if value is None else value),
    )  # fmt: skip
    filters: dict[str, Any] = {
        "label": lambda name: SHARES.get(name, name), "markdown": Markup, "shell": shlex.join,
        "quote": lambda text: Markup("\n".join(f"> {line}".rstrip() for line in text.splitlines())),
        "address": lambda url: Markup(quote_url(url, safe=":/%@?=&+,;~-._#")),
    }  # fmt: skip
    own = (code, block, metric, percent, number, dollars, duration, folded)
    env.filters |= filters | {function.__name__: function for function in own}
    return env


def render(template: str, **values: Any) -> str:
    """Return the text of a template, without several empty lines in a row."""
    text = environment().get_template(template).render(**values).replace("| \n", "|\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
