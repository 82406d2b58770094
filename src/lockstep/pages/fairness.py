"""What a fair comparison holds fixed, and where these runs do not."""

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.markdown import one_line, plain

LOAD_DIFFERENCE = 0.5  # of a core, between two runs
PEAK_DIFFERENCE = 0.1  # between the peaks that two runs measured of a device

Shown = Callable[[object], str]  # text from outside, as the place that shows it wants it


def cautions(entries: Sequence[Entry], labels: Sequence[str]) -> list[str]:
    """Both, without markup: for a terminal, and for HTML that is escaped where it is shown."""
    said = (caution(entries, one_line), load_caution(entries, labels, one_line))
    return [text.replace("**", "", 2) for text in said if text]


def caution(entries: Sequence[Entry], shown: Shown = plain) -> str:
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
        unlike[-1] += f" (commits {', '.join(map(shown, commits))})"
    return f"**Not held fixed between these runs:** {', '.join(unlike)}." if unlike else ""


def load_caution(entries: Sequence[Entry], labels: Sequence[str], shown: Shown = plain) -> str:
    """Says where other work slowed a run, or some runs more than others."""
    if len(entries) < 2 or all(same_load(entry.facts, entries[0].facts) for entry in entries):
        return ""
    loads = [(label, entry.facts.load_per_core) for label, entry in zip(labels, entries, strict=True)]
    each = ", ".join(f"{shown(label)} {load:.1f}" for label, load in loads if load is not None)
    return (
        f"**The machine had more to do than these runs, or more in one than in another:** load per core {each}. "
        "Where it had, times and speeds stand without a ratio."
    )


def same_load(run: RunFacts, base: RunFacts) -> bool:
    """False where times and speeds of the two are not of them alone."""
    loads = [side.load_per_core for side in (run, base) if side.load_per_core is not None]
    alike = not loads or max(loads) - min(loads) <= LOAD_DIFFERENCE
    return alike and not (run.had_other_work or base.had_other_work)


def same_peak(run: RunFacts, base: RunFacts) -> bool:
    """False where MFUs are shares of peaks that were measured too differently to be one device's."""
    peaks = [side.record.throughput.peak_tflops or 0.0 for side in (run, base)]
    return max(peaks) - min(peaks) <= PEAK_DIFFERENCE * max(peaks)


def hardware_name(run: RunFacts) -> str:
    names = {", ".join(gpu.name or "" for gpu in node.gpus) or node.cpu or "" for node in run.nodes}
    return ", ".join(sorted(names))
