"""The CSV files of a run folder as curves: metrics over steps, and what the hardware did over seconds."""

import csv
import math
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Curve = tuple[Array, Array]


def read_columns(path: Path) -> dict[str, Array]:
    """Return the columns of a CSV file by name, nan for an unreadable cell, and `time` in seconds."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.reader(line.replace("\0", "") for line in file))
    names = rows[0] if rows else []
    cells = [[row[i] if i < len(row) else "" for row in rows[1:]] for i in range(len(names))]
    return {name: np.array([_number(cell, name) for cell in cells[i]]) for i, name in enumerate(names) if name}


def _number(cell: str, name: str) -> float:
    try:
        return datetime.fromisoformat(cell).timestamp() if name == "time" else float(cell)
    except (ValueError, OverflowError):
        return math.nan


def metrics(folder: Path) -> dict[str, Curve]:
    """Return {metric: (steps, values)} of metrics.csv, `epoch` and `time_s` among them."""
    columns = read_columns(folder / "metrics.csv")
    steps = columns.pop("step", np.array([]))
    return {name: curve for name, values in columns.items() if len((curve := _without_gaps(steps, values))[0])}


def hardware(folder: Path) -> dict[str, Curve]:
    """Return {"node0/gpu0/memory_gib": (seconds since the first sample, values)} over all starts of a run."""
    files = sorted(folder.glob("hardware-node*.csv"), key=lambda path: (path.stem.count(".") == 0, path.stem))
    parts = [(path.stem.partition(".")[0].removeprefix("hardware-"), read_columns(path)) for path in files]
    begin = min((float(np.nanmin(columns["time"])) for _, columns in parts if len(columns.get("time", []))), default=0)
    found: dict[str, Curve] = {}
    for node, columns in parts:
        seconds = columns.pop("time", np.array([])) - begin
        for name, values in columns.items():
            x, y = _without_gaps(seconds, values)
            before = found.get(f"{node}/{name}", (x[:0], y[:0]))
            found[f"{node}/{name}"] = np.append(before[0], x), np.append(before[1], y)
    return found


def _without_gaps(x: Array, y: Array) -> Curve:
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], y[known]


def mean(samples: Iterable[Curve]) -> Curve | None:
    """Return the mean over devices, at the moments of the longest curve; None without any."""
    found = [curve for curve in samples if len(curve[0])]
    if not found:
        return None
    x = max((curve[0] for curve in found), key=len)
    return x, np.mean([np.interp(x, *curve) for curve in found], axis=0)


def thin(curve: Curve, limit: int) -> Curve:
    """Return at most `limit` evenly chosen points, the last one among them."""
    chosen = np.unique(np.linspace(0, len(curve[0]) - 1, limit).round().astype(int))
    return curve if len(curve[0]) <= limit else (curve[0][chosen], curve[1][chosen])


def slim_copy(source: Path, target: Path, limit: int = 300) -> None:
    """Copy a CSV file with at most `limit` evenly chosen rows, and those rows that hold a validation or a test."""
    lines = source.read_text(errors="replace").splitlines()
    names = lines[0].split(",") if lines else []
    evaluated = [i for i, name in enumerate(names) if name.startswith(("val/", "test/"))]
    every = math.ceil(len(lines) / limit)
    chosen = [
        line
        for number, line in enumerate(lines)
        if number % every == 0
        or number == len(lines) - 1
        or any(map((line.split(",") + [""] * len(names)).__getitem__, evaluated))
    ]
    target.write_text("\n".join(chosen) + "\n")
