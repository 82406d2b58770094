"""Compare runs side by side: results and measurements, ratios to the first, other options."""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.changes import differences
from lockstep.logbook.arms import CAUTION_ABOUT_SEVERAL, Arms
from lockstep.logbook.figures import compare_panels, missing_curves, write_figure
from lockstep.logbook.folders import (
    NOTE_MARKS,
    RecordedRun,
    heading_of,
    holds_run,
    labels_of,
    note_of,
    read_text,
)
from lockstep.logbook.render import (
    align_columns,
    dollars,
    duration,
    escape_markdown,
    is_share,
    metric,
    number,
    percent,
    render,
)
from lockstep.process.files import write_atomically
from lockstep.records.metric_names import split_stage
from lockstep.records.record import RunRecord

SHA256_DIGITS = 16
PLUS_MINUS = "±"
MEANING_OF_ERROR = (
    "±: standard error of a share of the images of that run's validation or test; it says nothing "
    "of other seeds."
)
# The name of a row, and a cell for each run.
Row = tuple[str, list[str]]
FormatValue = Callable[[Any], str]

format_gib = partial(number, unit="GiB")


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return number(None)
    return number(seconds * 1000, "ms")


class Measurement(NamedTuple):
    """A row of a comparison.

    Attributes:
        title: the name of the row.
        field: the value's name in run.json.
        format_value: a function that returns the text of the value.
        has_ratio: each other run also shows its ratio to the first run.
    """

    title: str
    field: str
    format_value: FormatValue
    has_ratio: bool = False


MEASURED = (
    Measurement("Training time, with validation", "fit_seconds", duration, has_ratio=True),
    Measurement("Epochs", "epochs", number),
    Measurement("Steps", "steps", number),
    Measurement("Images/s, mean", "images_per_s", number, has_ratio=True),
    Measurement(
        "Images/s per device", "throughput.images_per_s_per_device", number, has_ratio=True
    ),
    Measurement(
        "Time per step, median", "throughput.step_seconds.p50", milliseconds, has_ratio=True
    ),
    Measurement("Waiting for data", "throughput.data_wait_share", partial(percent, digits=1)),
    Measurement("GPU utilisation", "gpu_percent", partial(number, unit="%")),
    Measurement("Peak memory", "peak_memory_gib", format_gib, has_ratio=True),
    Measurement("Global batch", "global_batch_size", number, has_ratio=True),
    Measurement("Per-device batch", "per_device_batch_size", number, has_ratio=True),
    Measurement("Largest batch per device", "largest_batch.per_device", number, has_ratio=True),
    Measurement("Largest global batch", "largest_batch.global", number, has_ratio=True),
    Measurement("Memory at the largest batch", "largest_batch.peak_memory_gib", format_gib),
    Measurement("Memory limit of the search", "largest_batch.limit_gib", format_gib),
    Measurement("Lost steps", "lost_steps", number),
    Measurement("Cost", "cost.usd", dollars, has_ratio=True),
)
TEXT_FIELDS = {
    "Status": "status",
    "Model": "model",
    "Data": "data",
    "Strategy": "trainer",
    "Processes": "world_size",
}


def _hardware(run: RecordedRun) -> list[tuple[Any, ...]]:
    """Return processor, cores and GPUs of each node."""
    nodes = run.record.hardware.get("nodes") or []
    return [(node.get("cpu"), node.get("cores"), str(node.get("gpus"))) for node in nodes]


SHOULD_MATCH: dict[str, Callable[[RecordedRun], Any]] = {
    "the data": lambda run: run.record.data_hash or run.record.data,
    "the number of test images": lambda run: run.record.metrics.get(
        "test/images", run.record.num_test
    ),
    "the model": lambda run: run.record.model,
    "the number of epochs": lambda run: run.record.epochs,
    "the precision": lambda run: run.record.precision,
    "torch.compile": lambda run: bool(run.record.compiled),
    "the seed": lambda run: run.record.seed,
    "the hardware": _hardware,
    "the code": lambda run: _codes(run.record),
}


def _codes(record: RunRecord) -> list[Any]:
    """Return what tells the code of a run, and then that of each restart with other code."""
    codes = [record.code, *(restart.code for restart in record.restarts if restart.code)]
    return [code.get("tree_hash") or code.get("commit") for code in codes]


def caution_about_runs(runs: Sequence[RecordedRun]) -> str:
    """Return the sentence on what differs but should not in a fair comparison, or ""."""
    return caution_about(unfair_differences(runs))


def unfair_differences(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of what differs between runs but should not in a fair comparison."""
    differing = []
    for name, read in SHOULD_MATCH.items():
        values = [read(run) for run in runs]
        if any(value != values[0] for value in values):
            differing.append(name)
    if _differ_in_initial_weights(runs):
        differing.append("the initial weights")
    return differing


def caution_about(differing: Sequence[str]) -> str:
    """Return the sentence that names each difference once, or "" if there is none."""
    if not differing:
        return ""
    return f"Not held fixed between these runs: {', '.join(dict.fromkeys(differing))}."


def result_rows(runs: Sequence[RecordedRun]) -> list[Row]:
    """Return the rows of results: texts, and values that at least one run has."""
    rows = []
    for title, field in TEXT_FIELDS.items():
        rows.append((title, [str(run.value(field) or "") for run in runs]))
    return [*rows, *_best_rows(runs), *_test_rows(runs), *_measured_rows(runs)]


def _best_rows(runs: Sequence[RecordedRun]) -> list[Row]:
    best = [run.record.summary.get("best", {}) for run in runs]
    rows = []
    for name in dict.fromkeys(run.record.monitor for run in runs):
        rows += _metric_row(f"Best {name}", name, best, _errors_of(runs, name))
    return rows


def _test_rows(runs: Sequence[RecordedRun]) -> list[Row]:
    test_metrics = [run.record.metrics for run in runs]
    rows = []
    for name in sorted(set().union(*test_metrics)):
        is_count = name.endswith(("/images", "/correct"))
        if split_stage(name)[0] == "test" and not is_count:
            rows += _metric_row(name, name, test_metrics, _errors_of(runs, name))
    return rows


def _measured_rows(runs: Sequence[RecordedRun]) -> list[Row]:
    rows = []
    for measurement in MEASURED:
        values = [run.value(measurement.field) for run in runs]
        cells = [measurement.format_value(value) for value in values]
        if measurement.has_ratio:
            cells = _add_difference(cells, values, _format_ratio)
        rows += _row_or_nothing(measurement.title, cells)
    return rows


def _errors_of(runs: Sequence[RecordedRun], name: str) -> list[float | None]:
    """Return the standard error of a metric in each run; None if it is no share of images."""
    return [run.record.summary.get("errors", {}).get(name) for run in runs]


def _metric_row(
    title: str,
    name: str,
    metrics: Sequence[Mapping[str, Any]],
    errors: Sequence[float | None],
) -> list[Row]:
    """Return a row with the metric and its standard error in each run.

    For a share each other run also shows its difference to the first run, in points.
    """
    values = [metrics_of_run.get(name) for metrics_of_run in metrics]
    cells = []
    for value, error in zip(values, errors, strict=True):
        cell = metric(value, name)
        if isinstance(value, int | float) and error is not None:
            cell += f" {PLUS_MINUS} {percent(error)}"
        cells.append(cell)
    if is_share(name):
        cells = _add_difference(cells, values, _format_points)
    return _row_or_nothing(title, cells)


def _row_or_nothing(title: str, cells: list[str]) -> list[Row]:
    """Return a row, or nothing if no run has a value."""
    if set(cells) == {"–"}:
        return []
    return [(title, cells)]


def _add_difference(
    cells: list[str], values: Sequence[Any], difference: Callable[[float, float], str]
) -> list[str]:
    """Add to each other cell its difference to the first run."""
    compared = cells[:1]
    for cell, value in zip(cells[1:], values[1:], strict=True):
        if isinstance(values[0], int | float) and isinstance(value, int | float):
            cell += difference(value, values[0])
        compared.append(cell)
    return compared


def _format_ratio(value: float, first: float) -> str:
    return f" (×{value / first:.2f})" if first else ""


def _format_points(value: float, first: float) -> str:
    return f" ({(value - first) * 100:+.2f})"


def setting_rows(runs: Sequence[RecordedRun]) -> list[Row]:
    """Return a row with the value in each run for every option in which the runs differ."""
    rows = []
    for key, values in differences([run.config for run in runs]).items():
        rows.append((key, ["–" if value is None else str(value) for value in values]))
    if _differ_in_initial_weights(runs):
        rows.append(("initial_weights", [_initial_weights(run) for run in runs]))
    return rows


def _differ_in_initial_weights(runs: Sequence[RecordedRun]) -> bool:
    """Return whether runs began with different weights.

    If all runs have the sha256 of their weights, it is compared, otherwise the address.
    """
    weights = [run.record.initial_weights_sha256 for run in runs]
    if not all(weights):
        weights = [_weights_address(run) for run in runs]
    return len(set(weights)) > 1


def _initial_weights(run: RecordedRun) -> str:
    """Return the checkpoint or the file that gave a run its weights, with its sha256."""
    address = _weights_address(run) or "–"
    sha256 = run.record.initial_weights_sha256
    return f"{address}, sha256 {sha256[:SHA256_DIGITS]}" if sha256 else address


def _weights_address(run: RecordedRun) -> str | None:
    config = run.config
    address = run.record.initial_weights or config.get("ckpt_path") or config.get("model.weights")
    return str(address) if address else None


def comparison_text(runs: Sequence[RecordedRun]) -> str:
    """Return the comparison as aligned columns for a terminal."""
    head = ("", labels_of(runs))
    empty = ("", [""] * len(runs))
    rows = [head, *result_rows(runs), empty, *setting_rows(runs)]
    table = align_columns([[name, *cells] for name, cells in rows])
    sentences = [meaning_of_error(rows), measured_since(runs), caution_about_runs(runs)]
    return "\n\n".join(filter(None, [table, *sentences]))


def meaning_of_error(rows: Sequence[Row]) -> str:
    """Return the meaning of ± if a row has one, else ""."""
    has_error = any(PLUS_MINUS in "".join(cells) for _, cells in rows)
    return MEANING_OF_ERROR if has_error else ""


def measured_since(runs: Sequence[RecordedRun]) -> str:
    """Return which part of a restarted run is measured, or ""."""
    pairs = zip(labels_of(runs), runs, strict=True)
    restarted = [label for label, run in pairs if run.record.restarts]
    if not restarted:
        return ""
    return f"Speed, memory and GPU use of {', '.join(restarted)}: since the last restart."


def title_of(runs: Sequence[RecordedRun], page: Path | None) -> str:
    """Return the title of a comparison: the user's heading on its page, or the runs' titles.

    Args:
        page: the page of an earlier comparison, if there is one.
    """
    automatic = _automatic_title(labels_of(runs))
    text = read_text(page) if page else ""
    heading = heading_of(text)
    head_of_table = re.search(r"^\|  \| (.+) \|$", text, re.MULTILINE)
    if not heading or not head_of_table:
        return heading or automatic
    # An automatic heading names the runs in the head of the table. It changes with the runs.
    before = html.unescape(_automatic_title(head_of_table[1].split(" | ")))
    return automatic if heading == html.unescape(escape_markdown(before)) else heading


def _automatic_title(titles: Sequence[str]) -> str:
    return " beside ".join(titles)


def write_comparison(
    path: Path,
    runs: Sequence[RecordedRun],
    title: str,
    *,
    caution: str = "",
    arms: Arms | None = None,
) -> None:
    """Write the comparison as markdown, with a picture beside it.

    If the page exists, the user's words on it stay.

    Args:
        caution: the sentence on what differs but should not in a fair comparison.
        arms: the arms of a comparison of groups.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".svg")
    panels = compare_panels(runs)
    has_picture = write_figure(picture, panels, has_one_legend=True)
    results = result_rows(runs)
    text = render(
        "compare.md.j2",
        title=title,
        caution=caution,
        arms=arms,
        about_several=CAUTION_ABOUT_SEVERAL,
        runs=runs,
        labels=labels_of(runs),
        results=results,
        meaning_of_error=meaning_of_error(results),
        measured_since=measured_since(runs),
        settings=setting_rows(runs),
        picture=picture.name if has_picture else "",
        missing_curves=missing_curves(runs, panels),
        with_page=[run.run_id for run in runs if _has_page(run, path.parent)],
        note=note_of(read_text(path)),
        note_marks=NOTE_MARKS,
    )
    write_atomically(path, lambda file: file.write(text))


def _has_page(run: RecordedRun, logbook: Path) -> bool:
    """Return whether the page of a run, and not that of another run of its id, is in a logbook."""
    folder = logbook / run.run_id
    return (folder / "page.md").exists() and holds_run(folder, run)
