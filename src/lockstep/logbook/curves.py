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
    text = path.read_text(errors="replace").replace("\0", "") if path.is_file() else ""
    names, *rows = list(csv.reader(text.splitlines())) or [[]]
    cells = ([row[i] if i < len(row) else "" for row in rows] for i in range(len(names)))
    return {name: np.array([_number(cell, name) for cell in column]) for name, column in zip(names, cells, strict=True)}


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
    earlier_first = sorted(folder.glob("hardware-node*.csv"), key=lambda path: ("." not in path.stem, path.stem))
    files = [(path.stem.partition(".")[0].removeprefix("hardware-"), read_columns(path)) for path in earlier_first]
    begin = min((np.nanmin(columns["time"]) for _, columns in files if len(columns.get("time", []))), default=0.0)
    found: dict[str, Curve] = {}
    for node, columns in files:
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
    x = max((curve[0] for curve in found), key=len, default=None)
    return None if x is None else (x, np.mean([np.interp(x, *curve) for curve in found], axis=0))


def thin(curve: Curve, limit: int) -> Curve:
    """Return at most `limit` evenly chosen points, the last one among them."""
    chosen = np.unique(np.linspace(0, len(curve[0]) - 1, limit).round().astype(int))
    return curve if len(curve[0]) <= limit else (curve[0][chosen], curve[1][chosen])


def slim_copy(source: Path, target: Path, limit: int = 300) -> None:
    """Copy a CSV file with at most `limit` evenly chosen rows, and all rows that hold a validation or a test."""
    lines = source.read_text(errors="replace").splitlines()
    names = lines[0].split(",") if lines else []
    evaluated = [i for i, name in enumerate(names) if name.startswith(("val/", "test/"))]
    chosen = set(np.linspace(0, len(lines) - 1, limit).round().astype(int))
    kept = [
        line for i, line in enumerate(lines) if i in chosen or any(line.split(",")[k : k + 1] > [""] for k in evaluated)
    ]
    target.write_text("\n".join(kept) + "\n")
