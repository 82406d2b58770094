"""Compare runs side by side: measurements, with ratios to the first run, and differing options."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.changes import differences
from lockstep.logbook.figures import compare_panels, write_figure
from lockstep.logbook.folders import Run, split_stage
from lockstep.logbook.render import aligned, dollars, duration, is_share, metric, number, percent, render
from lockstep.runs.files import write_atomically

Row = tuple[str, list[str]]
Show = Callable[[Any], str]

GIB = partial(number, unit="GiB")
# A row's name, the value's name in run.json, how it is shown, and whether it has a ratio to the first run
MEASURED: tuple[tuple[str, str, Show, str], ...] = (
    ("Training time, with validation", "fit_seconds", duration, "ratio"),
    ("Epochs", "epochs", number, ""),
    ("Steps", "steps", number, ""),
    ("Images/s, mean", "images_per_s", number, "ratio"),
    ("Images/s per device", "throughput.images_per_s_per_device", number, "ratio"),
    ("Time per step, median", "throughput.step_seconds.p50", lambda s: number(s and s * 1000, "ms"), "ratio"),
    ("Waiting for data", "throughput.data_wait_share", partial(percent, digits=1), ""),
    ("GPU utilisation", "gpu_percent", partial(number, unit="%"), ""),
    ("Peak memory", "peak_memory_gib", GIB, "ratio"),
    ("Global batch", "global_batch_size", number, "ratio"),
    ("Per-device batch", "per_device_batch_size", number, "ratio"),
    ("Largest batch per device", "largest_batch.per_device", number, "ratio"),
    ("Largest global batch", "largest_batch.global", number, "ratio"),
    ("Memory at the largest batch", "largest_batch.peak_memory_gib", GIB, ""),
    ("Memory limit of the search", "largest_batch.limit_gib", GIB, ""),
    ("Lost steps", "lost_steps", number, ""),
    ("Cost", "cost.usd", dollars, "ratio"),
)
HELD_FIXED: dict[str, Callable[[Run], Any]] = {
    "the data": lambda run: run.record.data_hash or run.record.data,
    "the number of test images": lambda run: run.record.metrics.get("test/images", run.record.num_test),
    "the model": lambda run: run.record.model,
    "the number of epochs": lambda run: run.record.epochs,
    "the precision": lambda run: run.record.precision,
    "torch.compile": lambda run: bool(run.record.compiled),
    "the seed": lambda run: run.record.seed,
    "the hardware": lambda run: [
        (node.get("cpu"), node.get("cores"), str(node.get("gpus"))) for node in run.record.hardware.get("nodes") or []
    ],
    "the code": lambda run: run.record.code.get("tree_hash") or run.record.code.get("commit"),
}


def not_held_fixed(runs: Sequence[Run]) -> str:
    """Name what differs between these runs but not in a fair comparison; empty if nothing does."""
    found = [name for name, read in HELD_FIXED.items() if any(read(run) != read(runs[0]) for run in runs)]
    return f"Not held fixed between these runs: {', '.join(found)}." if found else ""


def number_rows(runs: Sequence[Run]) -> list[Row]:
    """Return (name, one cell for each run), for what at least one run has."""
    texts = {"Status": "status", "Model": "model", "Data": "data", "Strategy": "trainer", "Processes": "world_size"}
    rows = [(title, [str(run.value(field) or "") for run in runs]) for title, field in texts.items()]
    best, tested = [run.record.summary.get("best", {}) for run in runs], [run.record.metrics for run in runs]
    metrics = [(f"Best {name}", name, best) for name in dict.fromkeys(run.record.monitor for run in runs)]
    for name in sorted({name for held in tested for name in held}):
        if split_stage(name)[0] == "test" and not name.endswith(("/images", "/correct")):
            metrics.append((name, name, tested))
    for title, name, held in metrics:
        against = "points" if is_share(name) else ""
        rows += _row(title, [values.get(name) for values in held], partial(metric, name=name), against)
    for title, field, show, against in MEASURED:
        rows += _row(title, [run.value(field) for run in runs], show, against)
    return rows


def _row(title: str, values: list[Any], show: Show, against: str) -> list[Row]:
    """Return the cells with the ratio to the first run, or the difference in points; no row without a value."""
    cells, first = [show(value) for value in values], values[0] if values else None
    for i, value in enumerate(values):
        if i and isinstance(first, int | float) and isinstance(value, int | float):
            if against == "points":
                cells[i] += f" ({(value - first) * 100:+.2f})"
            elif against and first:
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
