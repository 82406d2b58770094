"""Render markdown from the templates in templates/.

Texts of a run are escaped, and numbers are written as a reader expects them.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from markupsafe import Markup

from lockstep.process import output
from lockstep.records import metric_names

# Characters with a meaning in markdown or HTML, at the places where they have it.
SPECIAL = re.compile(
    r"[&<>$\\`*\[\]~|#!@]"
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    r"|(?<=www)\.|:(?=//)",
    re.IGNORECASE,
)
SHARES = {
    "acc": "accuracy",
    "acc_top5": "accuracy, top 5",
    "f1_macro": "F1, mean of the classes",
    "balanced_acc": "balanced accuracy",
    "ece": "calibration error",
}
# This character keeps a number and its unit on one line.
NB = "\N{NO-BREAK SPACE}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SAFE_IN_ADDRESS = ":/%@?=&+,;~-._#"


def escape_markdown(text: object, limit: int = 300) -> Markup:
    """Return one line that shows exactly this text, also in a table cell.

    Markup, links and HTML in the text have no effect.
    """
    line = _one_line(text, limit)
    return Markup(SPECIAL.sub(lambda match: f"&#{ord(match.group())};", line))


def code(text: object, limit: int = 300) -> Markup:
    """Return one line in the font of code; "" for an empty text."""
    line = _one_line(text, limit)
    if not line:
        return Markup("")
    # These characters cannot stand between backticks.
    if re.search(r"[`|\\]", line):
        return Markup(f"<code>{escape_markdown(line, limit)}</code>")
    return Markup(f"`{line}`")


def _one_line(text: object, limit: int) -> str:
    printable = output.UNPRINTABLE.sub(REPLACEMENT, str(text))
    line = re.sub(r"\s*[ \t\r\n]\s*", " ", printable).strip(" ")
    if len(line) > limit:
        return line[: limit - 1] + "…"
    return line


def block(text: object, language: str = "", limit: int = 20_000) -> Markup:
    """Return a fenced block of code. A text that is longer than `limit` is cut."""
    body = output.UNPRINTABLE.sub(REPLACEMENT, str(text)).strip("\n")
    if len(body) > limit:
        body = f"{body[:limit]}\n… {len(body) - limit:,} more characters"

    # The fence is longer than any row of backticks inside.
    longest = max(map(len, re.findall("`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{body}\n{fence}")


def quote(text: str) -> Markup:
    """Return a quotation. Each line of the text keeps its markdown."""
    return Markup("\n".join(f"> {line}".rstrip() for line in text.splitlines()))


def first_sentence(note: str) -> str:
    """Return the first sentence of a note, without the mark of a list or a quotation before it."""
    paragraph = " ".join(note.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) ", paragraph)[0]
    return re.sub(r"^(?:[-*+>]|#+) ", "", sentence)


def address(url: str) -> Markup:
    return Markup(quote_url(url, safe=SAFE_IN_ADDRESS))


def label(name: str) -> str:
    """Return the words for a metric."""
    return SHARES.get(name, name)


def metric(value: Any, name: str) -> str:
    """Return the text of a metric: a share in percent, others with four digits, None as a dash."""
    if not isinstance(value, int | float):
        return str(value or "–")
    if is_share(name):
        return percent(value)
    return f"{value:.4g}"


def is_share(name: str) -> bool:
    return metric_names.split_stage(name)[1] in SHARES


def percent(share: float | None, digits: int = 2) -> str:
    if not isinstance(share, int | float):
        return "–"
    return f"{share * 100:.{digits}f}{NB}%"


def number(value: float | None, unit: str = "") -> str:
    """Return 12,345 or 98.1 or 9.81, and its unit."""
    if not isinstance(value, int | float):
        return "–"
    is_whole = abs(value) >= 100 or value == int(value)
    text = f"{value:,.0f}" if is_whole else f"{value:.3g}"
    return f"{text}{NB}{unit}".strip(NB)


def dollars(value: float | None) -> str:
    if not isinstance(value, int | float):
        return "–"
    if value >= 0.1 or value == 0:
        return f"${value:.2f}"
    return f"${value:.2g}"


def duration(seconds: float | None) -> str:
    if not isinstance(seconds, int | float):
        return "–"
    return output.format_duration(seconds).replace(" ", NB)


def fold_command(command: str, width: int = 96) -> str:
    """Return a shell command, folded into lines of about `width` characters."""
    # A command with an open quote, or without any word, stays as it is.
    try:
        lines, *arguments = map(shlex.quote, shlex.split(command))
    except ValueError:
        return command

    for word in arguments:
        last_line = lines.rpartition("\n")[2]
        if len(last_line) + len(word) > width:
            lines += f" \\\n  {word}"
        else:
            lines += f" {word}"
    return lines


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, which all have the same number of cells, as text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


FILTERS: tuple[Callable[..., Any], ...] = (
    code,
    block,
    quote,
    first_sentence,
    address,
    label,
    metric,
    percent,
    number,
    dollars,
    duration,
    fold_command,
)


@cache
def template_environment() -> Environment:
    """Return the environment of the templates, with the functions above as filters."""
    env = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        undefined=ChainableUndefined,
        finalize=_escape,
    )
    env.filters |= {function.__name__: function for function in FILTERS}
    env.filters |= {"markdown": Markup, "shell": shlex.join}
    return env


def _escape(value: Any) -> Markup:
    """Return the text that a template shows for a value; "" for None."""
    if isinstance(value, Markup):
        return value
    return escape_markdown("" if value is None else value)


def render(template: str, **values: Any) -> str:
    """Return the text of a template. Several empty lines in a row become one."""
    text = template_environment().get_template(template).render(**values).replace("| \n", "|\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
