"""Runs side by side: what was measured, with ratios to the first run, and what differs between them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.logbook.figures import compare_panels, write_figure
from lockstep.logbook.folders import Run, split_stage
from lockstep.logbook.render import aligned, dollars, duration, is_share, metric, number, percent, render
from lockstep.runs.config import differences
from lockstep.runs.files import write_atomically

Row = tuple[str, list[str]]
Show = Callable[[Any], str]

# A row's name, the value's name in run.json, how it is shown, and whether its ratio to the first run means something
MEASURED: tuple[tuple[str, str, Show, bool], ...] = (
    ("Training time, with validation", "fit_seconds", duration, True),
    ("Epochs", "epochs", number, False),
    ("Steps", "steps", number, False),
    ("Images/s, mean", "images_per_s", number, True),
    ("Images/s per device", "throughput.images_per_s_per_device", number, True),
    ("Time per step, median", "throughput.step_seconds.p50", lambda value: number(value * 1000, "ms"), True),
    ("Waiting for data", "throughput.data_wait_share", lambda value: percent(value, 1), False),
    ("GPU utilisation", "gpu_percent", lambda value: number(value, "%"), False),
    ("Peak memory", "peak_memory_gib", lambda value: number(value, "GiB"), True),
    ("Global batch", "global_batch_size", number, True),
    ("Per-device batch", "per_device_batch_size", number, True),
    ("Largest batch per device", "largest_batch.per_device", number, True),
    ("Largest global batch", "largest_batch.global", number, True),
    ("Memory at the largest batch", "largest_batch.peak_memory_gib", lambda value: number(value, "GiB"), False),
    ("Memory limit of the search", "largest_batch.limit_gib", lambda value: number(value, "GiB"), False),
    ("Lost steps", "lost_steps", number, False),
    ("Cost", "cost.usd", dollars, True),
)
HELD_FIXED: dict[str, Callable[[Run], Any]] = {
    "the data": lambda run: run.record.data_hash or run.record.data,
    "the number of test images": lambda run: run.record.metrics.get("test/images", run.record.num_test),
    "the model": lambda run: run.record.model,
    "the number of epochs": lambda run: run.record.epochs,
    "the precision": lambda run: run.record.precision,
    "the seed": lambda run: run.record.seed,
    "the hardware": lambda run: [
        (node.get("cpu"), node.get("cores"), str(node.get("gpus"))) for node in run.record.hardware.get("nodes") or []
    ],
    "the code": lambda run: run.record.code.get("tree_hash") or run.record.code.get("commit"),
}


def not_held_fixed(runs: Sequence[Run]) -> str:
    """Name what a fair comparison holds fixed and these runs do not; empty if there is nothing."""
    found = [name for name, read in HELD_FIXED.items() if any(read(run) != read(runs[0]) for run in runs)]
    return f"Not held fixed between these runs: {', '.join(found)}." if found else ""


def number_rows(runs: Sequence[Run]) -> list[Row]:
    """Return (name, one cell for each run), for what at least one run has."""
    texts = {"Status": "status", "Model": "model", "Data": "data", "Strategy": "trainer", "Processes": "world_size"}
    rows = [(name, [str(run.value(field) or "") for run in runs]) for name, field in texts.items()]
    best, tested = [run.record.summary.get("best", {}) for run in runs], [run.record.metrics for run in runs]
    metrics = [(f"Best {name}", name, best) for name in dict.fromkeys(run.record.monitor for run in runs)]
    for name in sorted({name for held in tested for name in held}):
        if split_stage(name)[0] == "test" and not name.endswith(("/images", "/correct")):
            metrics.append((name, name, tested))
    for title, name, held in metrics:
        cells = [metric(values.get(name), name) for values in held]
        rows += _row(title, [values.get(name) for values in held], cells, "points" if is_share(name) else "")
    for title, field, show, has_ratio in MEASURED:
        values = [run.value(field) for run in runs]
        cells = [show(value) if isinstance(value, int | float) else "–" for value in values]
        rows += _row(title, values, cells, "ratio" if has_ratio else "")
    return rows


def _row(title: str, values: list[Any], cells: list[str], against: str) -> list[Row]:
    """Add the ratio to the first run, or the difference in points, to the cells; no row without a value."""
    first, *others = [value if isinstance(value, int | float) else None for value in values] or [None]
    for i, value in enumerate(others, 1):
        if first is not None and value is not None and against == "points":
            cells[i] += f" ({(value - first) * 100:+.2f})"
        elif first and value is not None and against:
            cells[i] += f" (×{value / first:.2f})"
    return [(title, cells)] if set(cells) != {"–"} else []


def setting_rows(runs: Sequence[Run]) -> list[Row]:
    """Return (option, its value in each run), for the options in which the runs differ."""
    found = differences([run.config for run in runs])
    return [(key, ["–" if value is None else str(value) for value in values]) for key, values in found.items()]


def as_text(runs: Sequence[Run]) -> str:
    """Return the comparison as aligned columns for a terminal."""
    rows = [("", [run.title for run in runs]), *number_rows(runs), ("", [""] * len(runs)), *setting_rows(runs)]
    return f"{aligned([[name, *cells] for name, cells in rows])}\n\n{not_held_fixed(runs)}".rstrip()


def write_comparison(path: Path, runs: Sequence[Run], title: str) -> None:
    """Write the comparison as markdown, with a picture beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    has_picture = write_figure(path.with_suffix(".svg"), compare_panels(runs))
    text = render(
        "compare.md.j2", title=title, runs=runs, numbers=number_rows(runs), settings=setting_rows(runs),
        caution=not_held_fixed(runs), picture=path.with_suffix(".svg").name if has_picture else "",
    )  # fmt: skip
    write_atomically(path, lambda file: file.write(text))
