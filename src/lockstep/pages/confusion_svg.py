"""The confusion matrix as SVG: a row per true class, right answers blue, mistakes orange."""

from collections.abc import Sequence

from lockstep.pages.svg import document, escaped

MAX_NUMBERED = 20  # with more classes the cells are too small for counts


def confusion_svg(title: str, names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """
    Args:
        counts: square, `counts[true][predicted]`.
    """
    num = len(counts)
    cell = 44 if num <= 12 else 32 if num <= MAX_NUMBERED else max(3, 640 // num)
    named = num <= 60
    longest = max(len(escaped(name, 18)) for name in names) if named else 0
    left, top = (24 + 7 * longest, 44 + (7 * longest if longest > 5 else 14)) if named else (24, 44)
    parts = [f'<text class="t" x="12" y="20">{escaped(title, 80)}</text>']
    for row, line in enumerate(counts):
        parts.append(_row(line, row, left, top + row * cell, cell, num <= MAX_NUMBERED))
    if named:
        parts.append(_names(names, left, top, cell, longest > 5))
    parts.append(
        f'<text x="12" y="{top + num * cell + 22}">rows: true class, columns: predicted; '
        f"{sum(map(sum, counts)):,} images</text>"
    )
    width = max(left + num * cell + (64 if num <= MAX_NUMBERED else 16), 330)
    return document(width, top + num * cell + 36, title, "\n".join(parts) + "\n")


def _row(line: Sequence[int], row: int, left: int, y: int, cell: int, numbered: bool) -> str:
    total = sum(line) or 1
    parts = []
    for column, count in enumerate(line):
        share = count / total
        strength = round(share**0.5, 2)  # a root: a mistake in a hundred is seen too
        x, color = left + column * cell, 0 if row == column else 1
        if count or numbered:
            parts.append(
                f'<rect class="f{color}" x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" '
                f'fill-opacity="{max(strength, 0.04):g}"/>'
            )
        if numbered and count:
            ink = "on" if strength > 0.6 else "ink"
            size = ' style="font-size:10px"' if count > 9999 or cell < 40 else ""
            parts.append(
                f'<text class="m {ink}" x="{x + cell / 2 - 0.5:g}" y="{y + cell / 2 + 4:g}"{size}>{count}</text>'
            )
    if numbered and any(line):
        x = left + len(line) * cell + 8
        parts.append(f'<text x="{x}" y="{y + cell / 2 + 4:g}">{line[row] / total * 100:.1f} %</text>')
    return "".join(parts)


def _names(names: Sequence[str], left: int, top: int, cell: int, turned: bool) -> str:
    parts = []
    for i, name in enumerate(names):
        middle = i * cell + cell / 2
        text = escaped(name, 18)
        size = "" if cell >= 14 else ' style="font-size:9px"'
        parts.append(f'<text class="e" x="{left - 8}" y="{top + middle + 4:g}"{size}>{text}</text>')
        x, y = left + middle, top - 8
        place = f'transform="translate({x + 4:g},{y}) rotate(-90)"' if turned else f'class="m" x="{x:g}" y="{y}"'
        parts.append(f"<text {place}{size}>{text}</text>")
    return "\n".join(parts)
