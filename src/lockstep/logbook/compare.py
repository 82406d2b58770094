"""Runs side by side: what was measured, with ratios to the first run, and what differs between them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.logbook.figures import compare_panels, write_figure
from lockstep.logbook.folders import Run, differences
from lockstep.logbook.render import SHARES, aligned, dollars, duration, metric, number, percent, render
from lockstep.runs.files import write_atomically

Row = tuple[str, list[str]]
Read = Callable[[Run], Any]


def _milliseconds(seconds: float) -> str:
    return number(seconds * 1000, "ms")


def _gib(value: float) -> str:
    return number(value, "GiB")


def _share(value: float) -> str:
    return percent(value, 1)


# A row's name, the value in run.json and how it is shown; where a ratio to the first run means something
MEASURED: tuple[tuple[str, str, Callable[[Any], str], bool], ...] = (
    ("Training time", "fit_seconds", duration, True),
    ("Epochs", "epochs", number, False),
    ("Steps", "steps", number, False),
    ("Images/s", "images_per_s", number, True),
    ("Images/s per device", "throughput.images_per_s_per_device", number, True),
    ("Time per step, median", "throughput.step_seconds.p50", _milliseconds, True),
    ("Time per step, 95th percentile", "throughput.step_seconds.p95", _milliseconds, True),
    ("Waiting for data", "throughput.data_wait_share", _share, False),
    ("Model FLOPs utilisation", "throughput.mfu", _share, True),
    ("GPU utilisation", "gpu_percent", lambda value: number(value, "%"), False),
    ("Peak memory", "peak_memory_gib", _gib, True),
    ("Global batch", "global_batch_size", number, True),
    ("Per-device batch", "per_device_batch_size", number, True),
    ("Largest batch per device", "largest_batch.per_device", number, True),
    ("Largest global batch", "largest_batch.global", number, True),
    ("Peak memory at the largest batch", "largest_batch.peak_memory_gib", _gib, True),
    ("Lost steps", "lost_steps", number, False),
    ("Cost", "cost.usd", dollars, True),
)
HELD_FIXED: tuple[tuple[str, Read], ...] = (
    ("the data", lambda run: run.record.data_hash or run.record.data),
    ("the number of test images", lambda run: run.record.metrics.get("test/images", run.record.num_test)),
    ("the model", lambda run: run.record.model),
    ("the number of epochs", lambda run: run.record.epochs),
    ("the precision", lambda run: run.record.precision),
    ("the seed", lambda run: run.record.seed),
    ("the hardware", lambda run: hardware_name(run)),
    ("the code", lambda run: run.record.code.tree_hash or run.record.code.commit),
)


def hardware_name(run: Run) -> str:
    """The GPUs of all nodes, or the CPUs that were used."""
    nodes = run.record.hardware.get("nodes") or []
    names = [
        [gpu.get("name") for gpu in node.get("gpus") or []] or [node.get("cpu"), node.get("cores")] for node in nodes
    ]
    return json.dumps(names)


def not_held_fixed(runs: Sequence[Run]) -> str:
    """Name what a fair comparison holds fixed and these runs do not; empty if there is nothing."""
    found = [name for name, read in HELD_FIXED if len({read(run) for run in runs}) > 1]
    return f"Not held fixed between these runs: {', '.join(found)}." if found else ""


def number_rows(runs: Sequence[Run]) -> list[Row]:
    """(name, one cell for each run), for what at least one run has."""
    rows: list[Row] = [
        ("Status", [run.status for run in runs]),
        ("Model", [run.record.model or "" for run in runs]),
        ("Data", [run.record.data or "" for run in runs]),
        ("Strategy", [run.record.trainer or "" for run in runs]),
        ("Processes", [number(run.record.world_size) for run in runs]),
    ]
    for name, field, show, has_ratio in MEASURED:
        rows += _row(name, [run.value(field) for run in runs], show, "ratio" if has_ratio else "")
    monitors = dict.fromkeys(run.record.monitor for run in runs)
    for name in monitors:
        rows += _metric_row(f"Best {name}", name, [run.record.summary.get("best", {}).get(name) for run in runs])
    for name in dict.fromkeys(name for run in runs for name in sorted(run.record.metrics)):
        if name.startswith("test/") and not name.endswith(("/images", "/correct")):
            rows += _metric_row(name, name, [run.record.metrics.get(name) for run in runs])
    return rows


def _metric_row(title: str, name: str, values: list[Any]) -> list[Row]:
    is_share = name.rpartition("/")[2] in SHARES
    return _row(title, values, lambda value: metric(value, name), "points" if is_share else "")


def _row(name: str, values: list[Any], show: Callable[[Any], str], against: str) -> list[Row]:
    known = [value if isinstance(value, int | float) else None for value in values]
    if all(value is None for value in known):
        return []
    return [(name, [_cell(value, known[0] if i else None, show, against) for i, value in enumerate(known)])]


def _cell(value: float | None, first: float | None, show: Callable[[Any], str], against: str) -> str:
    if value is None:
        return "–"
    if first is None or not against or (against == "ratio" and not first):
        return show(value)
    return (
        f"{show(value)} (×{value / first:.2f})"
        if against == "ratio"
        else f"{show(value)} ({(value - first) * 100:+.2f})"
    )


def setting_rows(runs: Sequence[Run]) -> list[Row]:
    """(option, its value in each run), for the options in which the runs differ."""
    found = differences([run.config for run in runs])
    return [(key, ["–" if value is None else str(value) for value in values]) for key, values in found.items()]


def as_text(runs: Sequence[Run]) -> str:
    """Return the comparison as aligned columns for a terminal."""
    rows = [("", [run.title for run in runs]), *number_rows(runs), ("", [""] * len(runs)), *setting_rows(runs)]
    return f"{aligned([[name, *cells] for name, cells in rows])}\n\n{not_held_fixed(runs)}".rstrip()


def write_comparison(path: Path, runs: Sequence[Run], title: str) -> None:
    """Write the comparison as markdown, with a picture beside it."""
    picture = path.with_suffix(".svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    has_picture = write_figure(picture, compare_panels(runs, [run.title for run in runs]))
    text = render(
        "compare.md.j2", title=title, runs=runs, numbers=number_rows(runs), settings=setting_rows(runs),
        caution=not_held_fixed(runs), picture=picture.name if has_picture else "",
    )  # fmt: skip
    write_atomically(path, lambda file: file.write(text))
