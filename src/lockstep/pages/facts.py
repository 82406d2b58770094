"""What the pages say of one run, read from its source: a value that is missing or wrong is None, never an error."""

from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from typing import Any

from lockstep.pages.json_values import as_text, finite, first, is_pair, items, mapping, numbers, numeric_pair
from lockstep.pages.source import is_same_setting
from lockstep.runs.files import seconds_between
from lockstep.runs.record import Node, RunRecord, status_of
from lockstep.runs.typed_json import from_json

BUSY_LOAD = 1.25  # per core: above it other work had a part of the machine


def rising(seconds: list[float]) -> list[float]:
    """Seconds that began anew with each start of a run, as in older records, one start after the other."""
    before = 0.0
    kept: list[float] = []
    for i, value in enumerate(seconds):
        if i and value < seconds[i - 1]:
            before = kept[-1]
        kept.append(before + value)
    return kept


def commands_of(record: RunRecord) -> list[str]:
    """What it was started with, and what it went on with where that is another command."""
    given = [record.command, *(restart.command for restart in record.restarts)]
    return [command for command, _ in groupby(filter(None, given))]


class RunFacts:
    """One run of the logbook.

    Args:
        source: what `logbook/runs/<run_id>.json` holds.
        now: UTC, as in a record; decides whether a run that says running is lost.
    """

    def __init__(self, source: dict[str, Any], now: str | None = None):
        self.source = source
        self.record = from_json(RunRecord, source.get("record"), tolerant=True)
        self.run_id: str = source["run_id"]
        self.status = status_of(self.record, now)
        self._curves: dict[str, tuple[list[float], list[float]]] = {}

    # --- what it was ---
    @cached_property
    def date(self) -> str:
        return (self.record.started_at or "")[:16].replace("T", " ")

    @cached_property
    def commands(self) -> str:
        """As a block of a shell."""
        return "\n# then:\n".join(commands_of(self.record))

    @cached_property
    def experiment(self) -> str:
        return self.record.experiment or self.record.task_name or "other"

    @cached_property
    def tags(self) -> list[str]:
        return [tag for tag in self.record.tags if tag]

    @cached_property
    def strategy(self) -> str:
        return self.record.trainer or ""

    @cached_property
    def world(self) -> str:
        """`4 = 2 nodes × 2`, or only the world size."""
        size, nodes = self.record.world_size, self.record.num_nodes
        if size is None:
            return ""
        if self.record.num_gpus:  # of one process, under trainer=dp
            return f"1 with {self.record.num_gpus} GPUs"
        return f"{size} = {nodes} nodes × {size // nodes}" if nodes and nodes > 1 else f"{size}"

    @property
    def is_peer(self) -> bool:
        """One of a swarm, whose batches and steps are those of all peers together."""
        return bool(self.record.swarm) or self.record.trainer == "hivemind"

    @cached_property
    def batch_formula(self) -> str:
        """`256 = 64 per device × 2 devices × 2 accumulated`."""
        run = self.record
        if run.global_batch_size is None or run.per_device_batch_size is None:
            return "" if run.global_batch_size is None else str(run.global_batch_size)
        if self.is_peer:
            return f"{run.global_batch_size} = pieces of {run.per_device_batch_size} from all peers of the swarm"
        devices = run.num_gpus or run.world_size or 1
        each = run.per_device_batch_size / (run.num_gpus or 1)
        word = "device" if devices == 1 else "devices"
        accumulated = run.accumulate_grad_batches or 1
        return f"{run.global_batch_size} = {each:g} per device × {devices} {word} × {accumulated} accumulated"

    @cached_property
    def config(self) -> dict[str, Any]:
        return mapping(self.source.get("config"))

    @cached_property
    def changed(self) -> dict[str, tuple[Any, Any]] | None:
        """Config keys that differ from the defaults; None where the run folder did not hold the defaults."""
        if not isinstance(self.source.get("changed"), dict):
            return None
        held = mapping(self.source["changed"]).items()
        pairs = {key: (pair[0], pair[1]) if is_pair(pair) else (None, pair) for key, pair in held}
        return {key: pair for key, pair in pairs.items() if not is_same_setting(key, *pair)}

    # --- what came of it ---
    @cached_property
    def best_val_acc(self) -> float | None:
        """Of the epoch that the monitored metric chose, which is the highest where accuracy itself was monitored."""
        if self.record.monitor != "val/acc":
            return first(self.metrics.get("val/acc_best"), self.metrics.get("val/acc"))
        values = self.curve("val/acc")[1]
        best = self.metrics.get("val/acc_best")
        return max([*values, *([best] if best is not None else [])], default=self.metrics.get("val/acc"))

    @cached_property
    def best_monitored(self) -> float | None:
        """What the best checkpoint reached in the metric that chose it."""
        name = self.record.monitor
        return first(finite(self.record.best_checkpoint.metric.get(name)), self.metrics.get(f"{name}_best"))

    @cached_property
    def test_acc(self) -> float | None:
        return self.metrics.get("test/acc")

    @cached_property
    def tested_images(self) -> float | None:
        """How many test images were counted, where that is only a part of them."""
        images, there = self.metrics.get("test/images"), self.record.num_test
        return images if images is not None and there is not None and images < there else None

    @property
    def is_evaluation(self) -> bool:
        """Of a checkpoint that another run trained."""
        return self.record.task_name == "eval"

    @property
    def is_tested_training(self) -> bool:
        """It trained to its end and was tested on all test images."""
        return (
            self.status == "finished"
            and not self.is_evaluation
            and self.test_acc is not None
            and self.tested_images is None
        )

    @cached_property
    def metrics(self) -> dict[str, float]:
        return {name: value for name, value in sorted(self.record.metrics.items()) if not isinstance(value, str)}

    @cached_property
    def chosen_metrics(self) -> dict[str, float]:
        """What the config's own metrics came to: `test/mcc`; untested, `val/mcc` of the last validation."""
        names = dict.fromkeys(key.split(".")[1] for key in self.config if key.startswith("metrics."))
        stage = "val" if self.test_acc is None else "test"
        return {key: self.metrics[key] for name in names if (key := f"{stage}/{name}") in self.metrics}

    @cached_property
    def seconds(self) -> float | None:
        """Training time; where the record has none, from the first start to the last sign of life."""
        run = self.record
        if run.fit_seconds is not None:
            return run.fit_seconds
        try:
            return seconds_between(run.started_at or "", run.finished_at or run.updated_at or "")
        except (ValueError, TypeError):
            return None

    @cached_property
    def images_per_s(self) -> float | None:
        return first(self.record.throughput.images_per_s, self.record.images_per_s)

    @cached_property
    def load_per_core(self) -> float | None:
        """Of the busiest node, the median of the run's samples; None where no record holds it."""
        stats = {rank: stats.get("p50") for rank, name, stats in self.device_stats if name == "machine/load_1min"}
        found: list[float] = []
        for place, node in enumerate(self.nodes):
            load = stats.get(str(place if node.node_rank is None else node.node_rank))
            if load is not None and node.cores:
                found.append(load / node.cores)
        return max(found, default=None)

    @property
    def had_other_work(self) -> bool:
        """Whether other work on its machine slowed the run."""
        return (self.load_per_core or 0) > BUSY_LOAD

    @cached_property
    def mfu(self) -> float | None:
        """None where the device's peak was measured while others used it: above 1, or beside other work on CPUs."""
        mfu = self.record.throughput.mfu
        is_known = mfu is not None and mfu <= 1 and (self.record.accelerator == "gpu" or not self.had_other_work)
        return mfu if is_known else None

    @cached_property
    def peak_memory_gib(self) -> float | None:
        """Of the fullest GPU; of a run on CPUs, of the largest rank process."""
        known = [*self._recorded_stats(), *(self._sampled_stats() if self.record.restarts else ())]
        for device in ("gpu",) if self.record.accelerator == "gpu" else ("gpu", "rank"):
            named = [entry for _, name, entry in known if name.startswith(device) and name.endswith("/memory_gib")]
            if found := [peak for entry in named if (peak := entry.get("max")) is not None]:
                return max(found)
        return self.record.peak_memory_gib

    @cached_property
    def restart_summary(self) -> str:
        """`2 (37 steps lost, 94 s down)`."""
        restarts = self.record.restarts
        if not restarts:
            return ""
        lost = sum(restart.lost_steps or 0 for restart in restarts)
        down = sum(restart.downtime_s or 0 for restart in restarts)
        return f"{len(restarts)} ({lost} steps lost, {down:.0f} s down)"

    @cached_property
    def is_out_of_memory(self) -> bool:
        message = self.error.lower()
        return "out of memory" in message or "outofmemory" in message or "cannot allocate memory" in message

    @cached_property
    def error(self) -> str:
        return self.record.error.message or ""

    @property
    def nodes(self) -> list[Node]:
        return self.record.hardware.nodes

    @cached_property
    def device_stats(self) -> list[tuple[str, str, dict]]:
        """(node rank, series, {p10, p50, p90, max}): of the record and of the samples, each knows some alone.

        The record's are of its last start only: where there were several, the samples of all of them count.
        """
        recorded, sampled = list(self._recorded_stats()), list(self._sampled_stats())
        preferred, others = (sampled, recorded) if self.record.restarts else (recorded, sampled)
        seen = {entry[:2] for entry in preferred}
        return sorted([*preferred, *(entry for entry in others if entry[:2] not in seen)], key=lambda entry: entry[:2])

    def _recorded_stats(self) -> Iterator[tuple[str, str, dict]]:
        for place, node in enumerate(self.nodes):
            rank = str(place if node.node_rank is None else node.node_rank)
            for name, stats in node.stats.items():
                yield rank, name, stats

    def _sampled_stats(self) -> Iterator[tuple[str, str, dict]]:
        for rank, node in mapping(self.source.get("hardware")).items():
            for name, stats in mapping(mapping(node).get("stats")).items():
                yield rank, name, numbers(stats)

    # --- curves ---
    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """(steps, values) without gaps; two empty lists where there is none."""
        if name not in self._curves:
            x, y = numeric_pair(mapping(self.source.get("curves")).get(name))
            self._curves[name] = (x, rising(y) if name == "time_s" else y)
        return self._curves[name]

    def hardware_series(self) -> Iterator[tuple[str, str, tuple[list[float], list[float]]]]:
        """(node rank, series, (seconds, values))."""
        for rank, node in sorted(mapping(self.source.get("hardware")).items()):
            for name, pair in sorted(mapping(mapping(node).get("series")).items()):
                yield rank, name, numeric_pair(pair)

    @cached_property
    def calibration(self) -> list[tuple[float, float]]:
        """(mean confidence, accuracy) of each bin of the test that holds images; empty where it was not counted."""
        rows = [items(row) for row in items(self.source.get("calibration"))]
        whole = [
            row for row in rows if len(row) == 3 and all(finite(value) is not None for value in row) and row[0] > 0
        ]
        return [(confidence / images, correct / images) for images, correct, confidence in whole]

    @cached_property
    def confusion(self) -> tuple[list[str], list[list[int]]] | None:
        """(class names, counts); the counts are square."""
        held = mapping(self.source.get("confusion"))
        counts = [items(row) for row in items(held.get("counts"))]
        whole = all(len(row) == len(counts) and all(type(cell) is int and cell >= 0 for cell in row) for row in counts)
        if not counts or not whole:
            return None
        names = [as_text(name) for name in items(held.get("names"))]
        return (names if len(names) == len(counts) else [str(i) for i in range(len(counts))]), counts
