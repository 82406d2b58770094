"""What runs are compared in: each number beside its ratio to the first run's, where the two can be compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.pages import formats as f
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.fairness import same_load, same_peak
from lockstep.pages.markdown import one_line

Reader = Callable[[RunFacts], float | None]


@dataclass(frozen=True)
class Row:
    """
    Args:
        show: the value as a reader wants it.
        against: how it stands to the first run's; None: not at all.
        alike: False where two runs' values mean different things.
        after: what stands behind a run's value.
    """

    name: str
    read: Reader
    show: Callable[[float | None], str]
    against: Callable[[float | None, float | None], str] | None = None
    alike: Callable[[RunFacts, RunFacts], bool] = lambda run, base: True
    after: Callable[[RunFacts], str] = lambda run: ""

    def cell(self, run: RunFacts, base: RunFacts | None) -> str:
        value = self.read(run)
        shown = self.show(value) + (self.after(run) if value is not None else "")
        if base is None or self.against is None or not self.alike(run, base):
            return shown
        compared = self.against(value, self.read(base))
        return f"{shown} ({compared})" if compared else shown


def measured_rows() -> list[Row]:
    def one_digit(value: float | None) -> str:
        return f.percent(value, 1)

    return [
        Row("Training time", lambda run: run.seconds, f.duration, f.ratio, same_load),
        Row("Epochs", lambda run: run.record.epochs, f.rate),
        Row("Steps", lambda run: run.record.steps, f.whole),
        Row("Images/s", lambda run: run.images_per_s, f.rate, f.ratio, same_load),
        Row(
            "Images/s per device", lambda run: run.record.throughput.images_per_s_per_device, f.rate, f.ratio, same_load
        ),
        Row("Step, p50", lambda run: run.record.throughput.step_seconds.p50, f.milliseconds, f.ratio, same_load),
        Row("Step, p95", lambda run: run.record.throughput.step_seconds.p95, f.milliseconds, f.ratio, same_load),
        Row("Waiting for data", lambda run: run.record.throughput.data_wait_share, one_digit),
        Row("MFU", lambda run: run.mfu, one_digit, f.ratio, same_peak),
        Row("Peak memory", lambda run: run.peak_memory_gib, f.gib, f.ratio),
        Row("Global batch", lambda run: run.record.global_batch_size, f.whole, f.ratio),
        Row("Per-device batch", lambda run: run.record.per_device_batch_size, f.whole, f.ratio),
        Row(
            "Largest batch per device",
            lambda run: run.record.largest_batch.per_device,
            f.whole,
            f.ratio,
            same_bound,
            of_all_data,
        ),
        Row("Largest global batch", lambda run: run.record.largest_batch.global_, f.whole, f.ratio, same_bound),
        Row("Peak memory at the largest batch", lambda run: run.record.largest_batch.peak_memory_gib, f.gib, f.ratio),
        Row("Best validation accuracy", lambda run: run.best_val_acc, f.percent, f.points),
        Row("Test accuracy", lambda run: run.test_acc, f.percent, f.points, same_test, of_tested),
        Row("Test F1", lambda run: run.metrics.get("test/f1_macro"), f.percent, f.points, same_test, of_tested),
        Row("Test calibration error", lambda run: run.metrics.get("test/ece"), f.percent, None, same_test, of_tested),
        Row("Test loss", lambda run: run.metrics.get("test/loss"), f.decimal, f.ratio, same_test),
        Row("Cost", lambda run: run.record.cost.usd, f.dollars, f.ratio),
    ]


def chosen_row(name: str) -> Row:
    """A metric of the config, on a scale of its own: no ratio."""
    return Row(one_line(name, 60), lambda run: run.metrics.get(name), f.figure)


def same_bound(run: RunFacts, base: RunFacts) -> bool:
    return run.record.largest_batch.bounded_by == base.record.largest_batch.bounded_by


def of_all_data(run: RunFacts) -> str:
    return ", all the data there is" if run.record.largest_batch.bounded_by == "data set" else ""


def same_test(run: RunFacts, base: RunFacts) -> bool:
    return run.tested_images == base.tested_images


def of_tested(run: RunFacts) -> str:
    """Behind a test accuracy: ` of 400` where only so many test images were counted."""
    return f" of {f.whole(run.tested_images)}" if run.tested_images is not None and run.test_acc is not None else ""


def measured_values(entries: Sequence[Entry]) -> list[tuple[str, list[str]]]:
    """(what, one cell a run) for what at least one run has measured."""
    runs = [entry.facts for entry in entries]
    bases: list[RunFacts | None] = [None, *runs[:1] * (len(runs) - 1)]
    chosen = dict.fromkeys(name for run in runs for name in run.chosen_metrics)
    rows = [*measured_rows(), *map(chosen_row, chosen)]
    return [
        (row.name, [row.cell(run, base) for run, base in zip(runs, bases, strict=True)])
        for row in rows
        if any(row.read(run) is not None for run in runs)
    ]
