"""What a fair comparison holds fixed, and where these runs do not."""

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.markdown import plain

LOAD_DIFFERENCE = 0.5  # of a core, between two runs
PEAK_DIFFERENCE = 0.1  # between the peaks that two runs measured of a device


def caution(entries: Sequence[Entry]) -> str:
    """Says in what the runs are not alike."""
    held: list[tuple[str, Callable[[RunFacts], Any]]] = [
        ("the data", lambda run: run.record.data_hash or run.record.data),
        ("the number of test images", lambda run: run.tested_images),
        ("the model", lambda run: run.record.model),
        ("the number of epochs", lambda run: run.record.epochs),
        ("the precision", lambda run: run.record.precision),
        ("the seed", lambda run: run.record.seed),
        ("the hardware", hardware_name),
        ("the code", lambda run: run.record.code.tree_hash or run.record.code.commit),
    ]
    unlike = [name for name, read in held if len({read(entry.facts) for entry in entries}) > 1]
    commits = dict.fromkeys((entry.facts.record.code.commit or "unknown")[:7] for entry in entries)
    if "the code" in unlike and len(commits) > 1:
        unlike[-1] += f" (commits {', '.join(map(plain, commits))})"
    return f"**Not held fixed between these runs:** {', '.join(unlike)}." if unlike else ""


def load_caution(entries: Sequence[Entry], labels: Sequence[str]) -> str:
    """Says where other work slowed a run, or some runs more than others."""
    loads = [(label, found) for label, entry in zip(labels, entries, strict=True) if (found := loads_of(entry.facts))]
    per_core = [max(load / cores for load, cores in found) for _, found in loads]
    if len(entries) < 2 or not loads:
        return ""
    is_busy = any(load > cores + 1 for _, found in loads for load, cores in found)
    if not is_busy and max(per_core) - min(per_core) <= LOAD_DIFFERENCE:
        return ""
    each = ", ".join(f"{plain(label)} {load:.1f}" for (label, _), load in zip(loads, per_core, strict=True))
    return (
        f"**The machine had more to do than these runs, or more in one than in another:** load per core {each}. "
        "Ratios of times and speeds are not of these runs alone."
    )


def loads_of(run: RunFacts) -> list[tuple[float, float]]:
    """(load, cores) of each node whose record holds both; the load is the median of the run's samples."""
    stats = {rank: stats.get("p50") for rank, name, stats in run.device_stats if name == "machine/load_1min"}
    found: list[tuple[float, float]] = []
    for place, node in enumerate(run.nodes):
        load = stats.get(str(place if node.node_rank is None else node.node_rank))
        if load is not None and node.cores:
            found.append((load, node.cores))
    return found


def same_peak(run: RunFacts, base: RunFacts) -> bool:
    """False where MFUs are shares of peaks that were measured too differently to be one device's."""
    peaks = [side.record.throughput.peak_tflops or 0.0 for side in (run, base)]
    return max(peaks) - min(peaks) <= PEAK_DIFFERENCE * max(peaks)


def hardware_name(run: RunFacts) -> str:
    names = {", ".join(gpu.name or "" for gpu in node.gpus) or node.cpu or "" for node in run.nodes}
    return ", ".join(sorted(names))
