"""What the pages say of one run, read from its source with every field taken for missing or wrong until seen.

Records of older and newer schema versions come through here: a field that is not there is None, never an error.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from lockstep.pages.json_values import as_text, finite, first, is_pair, items, mapping, numbers, numeric_pair
from lockstep.runs.files import seconds_between
from lockstep.runs.record import SCHEMA_VERSION, status_of


def rising(seconds: list[float]) -> list[float]:
    """Seconds that began anew with each start of a run, as in older records, one start after the other."""
    before = 0.0
    kept: list[float] = []
    for i, value in enumerate(seconds):
        if i and value < seconds[i - 1]:
            before = kept[-1]
        kept.append(before + value)
    return kept


class RunFacts:
    """One run of the logbook.

    Args:
        source: what `logbook/runs/<run_id>.json` holds.
        now: UTC, as in a record; decides whether a run that says running is lost.
    """

    def __init__(self, source: dict[str, Any], now: str | None = None):
        self.source = source
        self.record = mapping(source.get("record"))
        self.run_id: str = source["run_id"]
        self.status = status_of(self.record, now)
        self._curves: dict[str, tuple[list[float], list[float]]] = {}

    # --- tolerant readers ---
    def number(self, *path: str) -> float | None:
        """The finite number at a path of the record."""
        return finite(self.at(*path))

    def text(self, *path: str) -> str:
        """The text at a path of the record; a mapping gives its name, a list its items."""
        return as_text(self.at(*path))

    def at(self, *path: str) -> Any:
        value: Any = self.record
        for key in path:
            value = mapping(value).get(key)
        return value

    # --- what it was ---
    @cached_property
    def schema_version(self) -> int:
        version = self.record.get("schema_version")
        return version if isinstance(version, int) and not isinstance(version, bool) else 0

    @property
    def is_newer_than_this_program(self) -> bool:
        return self.schema_version > SCHEMA_VERSION

    @cached_property
    def date(self) -> str:
        return self.text("started_at")[:16].replace("T", " ")

    @cached_property
    def experiment(self) -> str:
        return self.text("experiment") or self.text("task_name") or "other"

    @cached_property
    def tags(self) -> list[str]:
        return [text for text in map(as_text, items(self.at("tags"))) if text]

    @cached_property
    def strategy(self) -> str:
        return self.text("strategy") or self.text("trainer")

    @cached_property
    def world(self) -> str:
        """`4 = 2 nodes × 2`, or only the world size."""
        size, nodes = self.number("world_size"), self.number("num_nodes")
        if size is None:
            return ""
        if self.gpus_of_one_process:
            return f"1 with {self.gpus_of_one_process:.0f} GPUs"
        return f"{size:.0f} = {nodes:.0f} nodes × {size / nodes:.0f}" if nodes and nodes > 1 else f"{size:.0f}"

    @cached_property
    def gpus_of_one_process(self) -> float | None:
        """Under trainer=dp, where they share each batch."""
        return self.number("num_gpus")

    @property
    def is_peer(self) -> bool:
        """One of a swarm, whose batches and steps are those of all peers together."""
        return bool(mapping(self.at("swarm"))) or self.text("trainer") == "hivemind"

    @cached_property
    def batch_formula(self) -> str:
        """`256 = 64 per device × 2 devices × 2 accumulated`."""
        total, each = self.number("global_batch_size"), self.number("per_device_batch_size")
        size = self.gpus_of_one_process or self.number("world_size") or 1
        accumulated = self.number("accumulate_grad_batches") or 1
        if total is None or each is None:
            return "" if total is None else f"{total:.0f}"
        if self.is_peer:
            return f"{total:.0f} = pieces of {each:.0f} from all peers of the swarm"
        devices = "device" if size == 1 else "devices"
        each /= self.gpus_of_one_process or 1
        return f"{total:.0f} = {each:g} per device × {size:.0f} {devices} × {accumulated:.0f} accumulated"

    @cached_property
    def config(self) -> dict[str, Any]:
        return mapping(self.source.get("config"))

    @cached_property
    def changed(self) -> dict[str, tuple[Any, Any]] | None:
        """Config keys that differ from the defaults; None where the run folder did not hold the defaults."""
        if not isinstance(self.source.get("changed"), dict):
            return None
        pairs = mapping(self.source["changed"]).items()
        return {key: (pair[0], pair[1]) if is_pair(pair) else (None, pair) for key, pair in pairs}

    # --- what came of it ---
    @cached_property
    def best_val_acc(self) -> float | None:
        """The highest of all epochs, not the last."""
        values = self.curve("val/acc")[1]
        best = self.number("metrics", "val/acc_best")
        return max([*values, *([best] if best is not None else [])], default=self.number("metrics", "val/acc"))

    @cached_property
    def test_acc(self) -> float | None:
        return self.number("metrics", "test/acc")

    @cached_property
    def tested_images(self) -> float | None:
        """How many test images were counted, where that is only a part of them."""
        images, there = self.number("metrics", "test/images"), self.number("num_test")
        return images if images is not None and there is not None and images < there else None

    @property
    def is_evaluation(self) -> bool:
        """Of a checkpoint that another run trained."""
        return self.text("task_name") == "eval"

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
        found = {key: self.number("metrics", key) for key in mapping(self.at("metrics"))}
        return {key: value for key, value in sorted(found.items()) if value is not None}

    @cached_property
    def seconds(self) -> float | None:
        """Training time; where the record has none, from the first start to the last sign of life."""
        if (fit := self.number("fit_seconds")) is not None:
            return fit
        try:
            return seconds_between(self.text("started_at"), self.text("finished_at") or self.text("updated_at"))
        except (ValueError, TypeError):
            return None

    @cached_property
    def images_per_s(self) -> float | None:
        return first(self.number("throughput", "images_per_s"), self.number("images_per_s"))

    @cached_property
    def mfu(self) -> float | None:
        """None where it is above 1: the device's peak was measured while others used it."""
        mfu = self.number("throughput", "mfu")
        return mfu if mfu is not None and mfu <= 1 else None

    @cached_property
    def peak_memory_gib(self) -> float | None:
        """Of the fullest GPU; of a run on CPUs, of the largest rank process."""
        known = [*self._recorded_stats(), *(self._sampled_stats() if self.restarts else ())]
        for device in ("gpu",) if self.text("accelerator") == "gpu" else ("gpu", "rank"):
            named = [entry for _, name, entry in known if name.startswith(device) and name.endswith("/memory_gib")]
            if found := [peak for entry in named if (peak := entry.get("max")) is not None]:
                return max(found)
        return self.number("peak_memory_gib")

    @cached_property
    def restarts(self) -> list[dict[str, Any]]:
        return [mapping(entry) for entry in items(self.at("restarts"))]

    @cached_property
    def restart_summary(self) -> str:
        """`2 (37 steps lost, 94 s down)`."""
        if not self.restarts:
            return ""
        lost = sum(finite(entry.get("lost_steps")) or 0 for entry in self.restarts)
        down = sum(finite(entry.get("downtime_s")) or 0 for entry in self.restarts)
        return f"{len(self.restarts)} ({lost:.0f} steps lost, {down:.0f} s down)"

    @cached_property
    def is_out_of_memory(self) -> bool:
        message = self.error.lower()
        return "out of memory" in message or "outofmemory" in message or "cannot allocate memory" in message

    @cached_property
    def error(self) -> str:
        return self.text("error", "message") or (self.text("error") if isinstance(self.at("error"), str) else "")

    @cached_property
    def nodes(self) -> list[dict[str, Any]]:
        return [mapping(entry) for entry in items(self.at("hardware", "nodes"))]

    @cached_property
    def device_stats(self) -> list[tuple[str, str, dict]]:
        """(node rank, series, {p10, p50, p90, max}): of the record and of the samples, each knows some alone.

        The record's are of its last start only: where there were several, the samples of all of them count.
        """
        recorded, sampled = list(self._recorded_stats()), list(self._sampled_stats())
        preferred, others = (sampled, recorded) if self.restarts else (recorded, sampled)
        seen = {entry[:2] for entry in preferred}
        return sorted([*preferred, *(entry for entry in others if entry[:2] not in seen)], key=lambda entry: entry[:2])

    def _recorded_stats(self) -> Iterator[tuple[str, str, dict]]:
        for place, node in enumerate(self.nodes):
            rank = as_text(node.get("node_rank")) or str(place)
            for name, stats in mapping(node.get("stats")).items():
                yield rank, name, numbers(stats)

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
    def confusion(self) -> tuple[list[str], list[list[int]]] | None:
        """(class names, counts); the counts are square."""
        held = mapping(self.source.get("confusion"))
        counts = [items(row) for row in items(held.get("counts"))]
        whole = all(len(row) == len(counts) and all(type(cell) is int and cell >= 0 for cell in row) for row in counts)
        if not counts or not whole:
            return None
        names = [as_text(name) for name in items(held.get("names")) or items(self.at("class_names"))]
        return (names if len(names) == len(counts) else [str(i) for i in range(len(counts))]), counts
