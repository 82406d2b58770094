"""Line charts as SVG text that GitHub shows inside a page: light and dark by the reader's own setting, no script.

A figure is a grid of panels; the same input gives the same bytes.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.pages.markdown import one_line

LIGHT = ("#2271d1", "#c4530f", "#15805a", "#a2389a", "#806400", "#5a4fcf", "#c22745", "#3d7489")
DARK = ("#6cb2f7", "#f2995a", "#4fcb9c", "#e18ad6", "#d9bb4a", "#aaa1f8", "#f7849a", "#8fc3d7")
PANEL_WIDTH, PANEL_HEIGHT, GAP = 468, 244, 24
LEFT, RIGHT, BELOW = 52, 12, 36
LEGEND_LINE = 17


@dataclass(frozen=True)
class Series:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """unit: "" for plain numbers, "%" for shares from 0 to 1, "log" for a logarithmic axis, "100" for 0 to 100 %."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    x_label: str = "step"
    empty: str = "nothing logged"

    @property
    def is_plain(self) -> bool:
        """One line that the title names: a legend would only repeat it."""
        return len(self.series) == 1 and self.series[0].label.lower() == self.title.lower()


STYLE_BEGINS, OLD_STYLE_BEGINS = "<style>text{font:", "svg{--bg:"


def style() -> str:
    """Literal colours first: not every viewer knows the reader's setting."""
    return (
        f"{STYLE_BEGINS}12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}}"
        ".t{font-size:13px;font-weight:600}.e{text-anchor:end}.m{text-anchor:middle}.g{stroke-width:1}"
        ".l{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}.d{stroke-dasharray:6 4}"
        f"{_colors(LIGHT, paper='#fff', ink='#1f2328', muted='#59636e', grid='#dfe4e9')}"
        "@media (prefers-color-scheme:dark){"
        f"{_colors(DARK, paper='#0d1117', ink='#e6edf3', muted='#9198a1', grid='#2b323b')}}}</style>"
    )


def _colors(lines: Sequence[str], *, paper: str, ink: str, muted: str, grid: str) -> str:
    """Of the classes: c0 and f0 are the first line's stroke and fill, `on` is text on a filled field."""
    numbered = "".join(f".c{i}{{stroke:{color}}}.f{i}{{fill:{color}}}" for i, color in enumerate(lines))
    return (
        f".bg{{fill:{paper}}}text{{fill:{muted}}}.t,.ink{{fill:{ink}}}.on{{fill:{paper}}}.g{{stroke:{grid}}}{numbered}"
    )


def document(width: float, height: float, title: str, body: str) -> str:
    name = escaped(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{name}"><title>{name}</title>{style()}\n'
        f'<rect class="bg" width="{width:g}" height="{height:g}" rx="6"/>\n{body}</svg>\n'
    )


def escaped(text: object, limit: int = 60) -> str:
    return html.escape(one_line(text, limit))


def figure(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """All panels in a grid, with room for the longest legend."""
    legend = max(legend_height(panel) for panel in panels)
    height = PANEL_HEIGHT + legend
    parts = []
    for i, panel in enumerate(panels):
        x, y = 12 + i % columns * (PANEL_WIDTH + GAP), 12 + i // columns * (height + GAP)
        parts.append(f'<g transform="translate({x},{y})">{draw_panel(panel, legend)}</g>\n')
    rows = -(-len(panels) // columns)
    used = min(columns, len(panels))
    return document(
        used * PANEL_WIDTH + (used - 1) * GAP + 24, rows * height + (rows - 1) * GAP + 18, title, "".join(parts)
    )


def legend_entries(panel: Panel) -> list[tuple[int, int, Series]]:
    """(x, line, series), wrapped to the panel's width; a character is taken for 6.6 wide."""
    placed, x, line = [], 0, 0
    for series in panel.series:
        width = 26 + int(6.6 * len(one_line(series.label, 60))) + 14
        if x and x + width > PANEL_WIDTH:
            x, line = 0, line + 1
        placed.append((x, line, series))
        x += width
    return placed


def legend_height(panel: Panel) -> int:
    if panel.is_plain:
        return 0
    entries = legend_entries(panel)
    return (entries[-1][1] + 1) * LEGEND_LINE if entries else 0


def draw_panel(panel: Panel, legend: int) -> str:
    top = 30 + legend
    bottom = PANEL_HEIGHT + legend - BELOW
    parts = [f'<text class="t" x="0" y="12">{escaped(panel.title)}</text>', draw_legend(panel)]
    drawn = [series for series in panel.series if len(series.x)]
    if not drawn:
        middle = (top + bottom) / 2
        parts.append(f'<text class="m" x="{PANEL_WIDTH / 2:g}" y="{middle:g}">{escaped(panel.empty)}</text>')
        return "".join(parts)
    ends = [v for s in drawn for v in (s.x[0], s.x[-1])]
    x_axis = Axis(ends, LEFT, PANEL_WIDTH - RIGHT, fitted=True, whole=panel.x_label == "step")
    y_axis = Axis(
        [v for s in drawn for v in s.y] + ([0, 100] if panel.unit == "100" else []),
        bottom,
        top,
        log=panel.unit == "log",
        ceiling={"%": 1.0, "100": 100.0}.get(panel.unit),
    )
    parts.append(draw_axes(panel, x_axis, y_axis, bottom))
    parts.extend(draw_series(series, x_axis, y_axis) for series in drawn)
    return "".join(parts)


def draw_legend(panel: Panel) -> str:
    parts = []
    for x, line, series in [] if panel.is_plain else legend_entries(panel):
        y = 30 + line * LEGEND_LINE
        dash = " d" if series.dashed else ""
        parts.append(
            f'<path class="l c{series.color % len(LIGHT)}{dash}" d="M{x} {y - 4}h20"/>'
            f'<text x="{x + 26}" y="{y}">{escaped(series.label)}</text>'
        )
    return "".join(parts)


def draw_axes(panel: Panel, x_axis: "Axis", y_axis: "Axis", bottom: float) -> str:
    parts = []
    for value in y_axis.ticks:
        y = y_axis.place(value)
        parts.append(f'<path class="g" d="M{LEFT} {y:g}H{PANEL_WIDTH - RIGHT}"/>')
        parts.append(f'<text class="e" x="{LEFT - 7}" y="{y + 4:g}">{tick_text(value, y_axis, panel.unit)}</text>')
    for value in x_axis.ticks:
        x = x_axis.place(value)
        parts.append(f'<text class="m" x="{x:g}" y="{bottom + 17:g}">{tick_text(value, x_axis, "")}</text>')
    parts.append(f'<text class="e" x="{PANEL_WIDTH - RIGHT}" y="{bottom + 32:g}">{escaped(panel.x_label)}</text>')
    return "".join(parts)


def draw_series(series: Series, x_axis: "Axis", y_axis: "Axis") -> str:
    color = series.color % len(LIGHT)
    spots = [(x_axis.place(x), y_axis.place(y)) for x, y in zip(series.x, series.y, strict=True)]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in spots)
    dots = ""
    if len(spots) <= 12:  # a few points: show where they are
        dots = "".join(f'<circle class="f{color}" cx="{x:g}" cy="{y:g}" r="2.6"/>' for x, y in spots)
    return f'<path class="l c{color}{" d" if series.dashed else ""}" d="{path}"/>{dots}'


class Axis:
    """From values to places, with round ticks.

    Args:
        values: what must lie on it.
        fitted: ends at the values themselves, not at the next round tick.
        whole: a tick at whole numbers only, as steps are.
        ceiling: no value is drawn higher than this.
    """

    def __init__(
        self,
        values: Sequence[float],
        start: float,
        stop: float,
        *,
        fitted: bool = False,
        whole: bool = False,
        log: bool = False,
        ceiling: float | None = None,
    ):
        values = [min(value, ceiling) for value in values] if ceiling is not None else values
        self.log = log and min(values) > 0
        low, high = (math.log10(min(values)), math.log10(max(values))) if self.log else (min(values), max(values))
        if high - low <= max(1e-12 * max(abs(low), abs(high)), 1e-300):
            pad = 0.5 if fitted or self.log or abs(low) < 1e-100 else abs(low) * 0.1
            low, high = low - pad, high + pad
        self.step = (
            max(1.0, round_step((high - low) / 6)) if self.log else round_step((high - low) / (5 if fitted else 4))
        )
        self.step = max(1.0, self.step) if whole else self.step
        if not fitted:
            low, high = math.floor(low / self.step) * self.step, math.ceil(high / self.step - 1e-9) * self.step
        self.low, self.high, self.start, self.stop = low, high, start, stop

    @property
    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        values = [k * self.step for k in range(first, min(last, first + 12) + 1)]
        return [10**value for value in values] if self.log else values

    def place(self, value: float) -> float:
        at = math.log10(max(value, 1e-300)) if self.log else min(value, self.high)
        return round(self.start + (at - self.low) / (self.high - self.low) * (self.stop - self.start), 1)


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below `rough`."""
    if not 1e-300 < rough < 1e300:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def tick_text(value: float, axis: Axis, unit: str) -> str:
    if unit == "%":
        return f"{value * 100:.{decimals(axis.step * 100)}f} %"
    if unit == "100":
        return f"{value:.{decimals(axis.step)}f} %"
    if axis.log or 0 < axis.step < 1e-4 or abs(value) >= 1e7:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if value else "0"
    if axis.step >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:.{decimals(axis.step)}f}"


def decimals(step: float) -> int:
    return max(0, min(6, -math.floor(math.log10(step) + 1e-9))) if step > 0 else 0
