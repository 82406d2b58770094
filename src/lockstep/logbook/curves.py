"""The curves of a run: the columns of its metrics.csv over steps."""

import csv
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Curve = tuple[Array, Array]


def metrics(folder: Path) -> dict[str, Curve]:
    """Return {metric: (steps, values)} of metrics.csv, `epoch` and `time_s` among them, without unreadable cells."""
    path = folder / "metrics.csv"
    text = path.read_text(errors="replace").replace("\0", "") if path.is_file() else ""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in csv.DictReader(text.splitlines(), restkey="", restval=""):
        step = _number(row.pop("step", ""))
        for name, cell in row.items():
            if math.isfinite(value := _number(cell)) and math.isfinite(step):
                points.setdefault(name, []).append((step, value))
    return {name: tuple(np.array(curve).T) for name, curve in points.items()}  # type: ignore[misc]


def _number(cell: object) -> float:
    try:
        return float(str(cell))
    except ValueError:
        return math.nan


def evenly(count: int, limit: int) -> NDArray[np.int64]:
    """Return at most `limit` evenly chosen places of `count`, the last one among them."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int))


def thin(curve: Curve, limit: int) -> Curve:
    """Return at most `limit` evenly chosen points of a curve."""
    chosen = evenly(len(curve[0]), limit)
    return curve[0][chosen], curve[1][chosen]


def slim_copy(source: Path, target: Path, limit: int = 300) -> None:
    """Copy a metrics.csv with at most `limit` evenly chosen rows, and all rows that hold a validation."""
    head, *lines = source.read_text(errors="replace").splitlines() or [""]
    validated = [i for i, name in enumerate(head.split(",")) if name.startswith("val/")]
    chosen = set(evenly(len(lines), limit)) if lines else set()
    kept = [
        n for n, line in enumerate(lines) if n in chosen or any(line.split(",")[i : i + 1] > [""] for i in validated)
    ]
    target.write_text("\n".join([head, *(lines[n] for n in kept)]) + "\n")
