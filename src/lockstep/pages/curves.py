"""Reads the CSV files of a run folder into plain columns, thinned to what a picture can show."""

import csv
import math
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from lockstep.runs.csv_files import limited_lines, unguarded, whole_lines

MAX_CURVE_POINTS = 160
MAX_HARDWARE_NUMBERS = 9_000  # over all devices of all nodes: a page of 64 GPUs stays a few hundred KB

Column = list[float | None]


def read_columns(path: Path) -> dict[str, Column]:
    """The columns of a CSV file by name, in order; None for an empty or unreadable cell, a nan, and beyond 1e18.

    A line that a kill has cut short counts as far as it goes.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(whole_lines(file))
            head = next(rows, [])
            columns: dict[str, Column] = {name: [] for name in head if name}
            places = [(i, columns[name]) for i, name in enumerate(head) if name and head.index(name) == i]
            for row in rows:  # one at a time: a day of a large node is millions of cells
                for i, column in places:
                    column.append(number(row[i]) if i < len(row) else None)
    except (OSError, csv.Error):
        return {}
    return columns


def samples(paths: Sequence[Path]) -> dict[str, Column]:
    """A node's hardware files one after another (a restart begins a new one), `time` in seconds since 1970."""
    joined: dict[str, Column] = {}
    for path in paths:
        columns = {**read_columns(path), "time": _moments(path)}
        before = len(joined.get("time", []))
        for name in {**joined, **columns}:
            column = columns.get(name, [])[: len(columns["time"])]
            missing = len(columns["time"]) - len(column)
            joined.setdefault(name, [None] * before).extend([*column, *[None] * missing])
    return {**joined, "time": joined.get("time", [])}


def _moments(path: Path) -> Column:
    """The column `time` (UTC, as hardware-node0.csv has it) in seconds since 1970."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return [_moment(row.get("time")) for row in csv.DictReader(whole_lines(file))]
    except (OSError, csv.Error):
        return []


def _moment(cell: object) -> float | None:
    try:
        return datetime.fromisoformat(str(cell)).timestamp()
    except (ValueError, OverflowError):
        return None


def number(cell: object) -> float | None:
    try:
        value = float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return value if abs(value) < 1e18 else None  # also not for nan


def shortened(value: float | None, digits: int = 5) -> float | int | None:
    """Five significant digits (integers whole): what a curve needs, in a third of the bytes."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{digits}g}")


def thin(x: Sequence[float], y: Sequence[float], limit: int = MAX_CURVE_POINTS) -> tuple[list, list]:
    """At most `limit` points: first, last, and of each slice its lowest and highest, so no spike is hidden."""
    if len(x) <= limit:
        return list(x), list(y)
    slices = (limit - 2) // 2
    keep = {0, len(x) - 1}
    for k in range(slices):
        start, stop = k * len(x) // slices, (k + 1) * len(x) // slices
        part = range(start, stop)
        keep.update((min(part, key=y.__getitem__), max(part, key=y.__getitem__)))
    order = sorted(keep)
    return [x[i] for i in order], [y[i] for i in order]


def training_curves(path: Path) -> dict[str, list[list]]:
    """metrics.csv as {metric: [steps, values]}, with `epoch` and `time_s` over the step among them."""
    columns = read_columns(path)
    steps = columns.pop("step", None)
    if not steps:
        return {}
    curves = {}
    for name, values in columns.items():
        points = [(s, v) for s, v in zip(steps, values, strict=True) if s is not None and v is not None]
        if points:
            x, y = thin([s for s, _ in points], [v for _, v in points])
            curves[name] = [[shortened(v, 9) for v in x], [shortened(v) for v in y]]
    return curves


def average_in_slices(x: Sequence[float], y: Sequence[float], limit: int) -> tuple[list, list]:
    """At most `limit` points, each the mean of a slice: utilisation is a mean by nature."""
    if len(x) <= limit:
        return list(x), list(y)
    bounds = [(k * len(x) // limit, (k + 1) * len(x) // limit) for k in range(limit)]
    return (
        [sum(x[a:b]) / (b - a) for a, b in bounds],
        [sum(y[a:b]) / (b - a) for a, b in bounds],
    )


def mean_over_time(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    """(x, mean), at each place over those curves that reach there.

    Args:
        curves: (x, y) with rising x, none empty.
    """
    longest = max((x for x, _ in curves), key=lambda x: x[-1] - x[0])
    places = sorted({*longest, *(at for x, _ in curves for at in x if not longest[0] <= at <= longest[-1])})
    found = [(at, [interpolated(at, x, y) for x, y in curves if x[0] <= at <= x[-1]]) for at in places]
    kept = [(at, sum(values) / len(values)) for at, values in found if values]
    return [at for at, _ in kept], [value for _, value in kept]


def interpolated(x: float, known: Sequence[float], values: Sequence[float]) -> float:
    """Linear between the known places, which rise, flat outside."""
    i = bisect_left(known, x)
    if i == len(known):
        return values[-1]
    if i == 0 or known[i] == x:
        return values[i]
    share = (x - known[i - 1]) / (known[i] - known[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


def hardware_curves(nodes: Sequence[Sequence[Path]]) -> list[dict]:
    """One entry per node's files: {"series": {name: [seconds, values]}, "stats": {name: {p10, p50, p90, max}}}.

    The seconds of all nodes count from the first row of any.
    """
    read = [samples(paths) for paths in nodes]
    first = min((moment for columns in read for moment in columns["time"] if moment is not None), default=0.0)
    for columns in read:
        columns["time"] = [None if moment is None else moment - first for moment in columns["time"]]
    num_series = sum(max(0, len(columns) - 1) for columns in read) or 1
    limit = max(12, min(120, MAX_HARDWARE_NUMBERS // num_series))
    return [_one_node(columns, limit) for columns in read]


def _one_node(columns: dict[str, Column], limit: int) -> dict:
    times = columns.pop("time")
    series, stats = {}, {}
    for name, values in columns.items():
        points = [(t, v) for t, v in zip(times, values, strict=False) if t is not None and v is not None]
        if points:
            x, y = average_in_slices([t for t, _ in points], [v for _, v in points], limit)
            series[name] = [[shortened(v) for v in x], [shortened(v, 4) for v in y]]
            stats[name] = percentiles([v for _, v in points])
    return {"series": series, "stats": stats}


def percentiles(values: list[float]) -> dict[str, float | int | None]:
    ordered = sorted(values)
    at = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
    return {name: shortened(ordered[round(share * (len(ordered) - 1))]) for name, share in at.items()}


def calibration_bins(path: Path, max_bins: int = 100) -> list[list[float]] | None:
    """[images, correct, sum of confidences] of each bin of calibration.csv; None where there is none."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [row[2:] for row in csv.reader(line.replace("\0", "") for line in file) if row][1:]
    except (OSError, csv.Error):
        return None
    bins = [[value for cell in row if (value := number(cell)) is not None and 0 <= value < 1e15] for row in rows]
    return bins if 0 < len(bins) <= max_bins and all(len(row) == 3 for row in bins) else None


def confusion_matrix(path: Path, max_classes: int = 200) -> dict | None:
    """{"names": [...], "counts": [[...]]}, a row per true class; None where there is none or it is not square.

    A head row and a first column of class names may be there or not; without a head the names are empty.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row in csv.reader(line.replace("\0", "") for line in limited_lines(file)) if row]
    except (OSError, csv.Error):
        return None
    names: list[str] = []
    if rows and (len(rows) == len(rows[0]) + 1 or any(number(cell) is None for cell in rows[0])):
        names, rows = rows[0], rows[1:]
    if rows and len(rows[0]) == len(rows) + 1:
        rows = [row[1:] for row in rows]
    counts = [[number(cell) for cell in row] for row in rows]
    if not 0 < len(counts) <= max_classes or any(len(row) != len(counts) for row in counts):
        return None
    if any(cell is None or not 0 <= cell < 1e15 for row in counts for cell in row):
        return None
    return {
        "names": list(map(unguarded, names[-len(counts) :])),
        "counts": [[int(cell or 0) for cell in row] for row in counts],
    }
