"""The longer parts of a run's section: what was changed, what the hardware did, restarts, uncommitted code."""

import json
from typing import Any

from lockstep.pages import formats as f
from lockstep.pages.entry import Entry
from lockstep.pages.index_page import checkpoint_place
from lockstep.pages.json_values import as_text, finite, items, mapping
from lockstep.pages.markdown import blocks, code, code_block, details, plain, table
from lockstep.pages.source import differences

MAX_ROWS = 60
FOLDED_FROM = 10
MAX_DEVICE_ROWS = 96
SHOWN_DIFF = 16_000


def value_text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def change_rows(changes: dict[str, Any]) -> list[list[str]]:
    rows = [
        [code(key, 100), code(value_text(pair[0]), 80), code(value_text(pair[1]), 80)]
        for key, pair in list(changes.items())[:MAX_ROWS]
    ]
    if len(changes) > MAX_ROWS:
        rows.append([f"… and {len(changes) - MAX_ROWS} more", "", ""])
    return rows


def folded_if_long(title: str, head: tuple[str, ...], rows: list[list[str]], none: str) -> str:
    """The title must be our own words: it stands inside HTML."""
    if not rows:
        return none
    body = table(head, rows)
    return details(f"{title}: {len(rows)} keys", body) if len(rows) > FOLDED_FROM else f"**{title}**\n\n{body}"


def changes_block(entry: Entry, before: Entry | None) -> str:
    run = entry.facts
    if run.changed is not None:
        defaults = folded_if_long(
            "Differs from the defaults", ("key", "default", "here"), change_rows(run.changed), "All settings: defaults."
        )
    else:
        typed = [[code(text, 160)] for text in map(as_text, items(run.at("overrides"))[:MAX_ROWS])]
        defaults = folded_if_long("Overrides", ("given on the command line",), typed, "")
    if before is None or not run.config or not before.facts.config:
        return defaults
    rows = change_rows(differences(before.facts.config, run.config))
    since = folded_if_long("Differs from the run before", ("key", "before", "here"), rows, "")
    return blocks([defaults, f"The run before: {before.link}" + ("" if rows else ", the same settings") + ".", since])


def checkpoint_text(entry: Entry) -> str:
    run = entry.facts
    place = checkpoint_place(entry)
    if not place:
        return ""
    epoch, step, size = (run.number("best_checkpoint", key) for key in ("epoch", "step", "bytes"))
    sha256 = run.text("best_checkpoint", "sha256")
    parts = [
        code(place),
        f.megabytes(size) if size is not None else "",
        f"epoch {epoch:.0f}" if epoch is not None else "",
        f"step {step:.0f}" if step is not None else "",
        f"sha256 {code(sha256, 80)}" if sha256 else "",
        f"**not uploaded**: {plain(run.text('upload', 'error'), 200)}" if run.text("upload", "error") else "",
    ]
    return ", ".join(part for part in parts if part)


def hardware_block(entry: Entry) -> str:
    run = entry.facts
    nodes = table(("node", "host", "GPUs", "CPU", "cores", "memory"), map(node_row, run.nodes[:64]), "llllrr")
    stats = [
        [plain(rank), code(name, 60), *(f.rate(stats.get(key)) for key in ("p10", "p50", "p90", "max"))]
        for rank, name, stats in run.device_stats[:MAX_DEVICE_ROWS]
    ]
    left_out = len(run.device_stats) - len(stats)
    measured = table(("node", "measured", "p10", "p50", "p90", "max"), stats, "llrrrr")
    more = f"{left_out} more series are in runs/{run.run_id}.json." if left_out > 0 else ""
    dumps = [
        f"nvidia-smi, {plain(name)}:\n\n{code_block(text, 'text', 8000)}"
        for name, text in sorted(mapping(run.source.get("nvidia_smi")).items())
        if isinstance(text, str) and text.strip()
    ]
    return details("Hardware: what there was and how busy it was", blocks([nodes, measured, more, *dumps]))


def node_row(node: dict[str, Any]) -> list[str]:
    gpus = ", ".join(filter(None, (plain(as_text(gpu), 60) for gpu in items(node.get("gpus"))[:16])))
    return [
        plain(as_text(node.get("node_rank")), 20),
        code(as_text(node.get("host")), 60),
        gpus or "none",
        plain(as_text(node.get("cpu")), 80),
        f.whole(finite(node.get("cores"))),
        f.gib(finite(node.get("memory_gib"))),
    ]


def restarts_block(entry: Entry) -> str:
    shown = entry.facts.restarts[:MAX_ROWS]
    head = ("at (UTC)", "went on at step", "steps lost", "down for", "by", "with other code")
    width = 5 if any(as_text(restart.get("command")) for restart in shown) else 4
    width = 6 if any(mapping(restart.get("code")) for restart in shown) else width
    rows = table(head[:width], (restart_row(restart)[:width] for restart in shown), "lrrrll")
    return f"**Restarts**\n\n{rows}" if rows else ""


def code_words(state: dict[str, Any]) -> str:
    """`commit 1a2b3c4 with uncommitted changes`, of a start that ran other code than the run's first."""
    if not state:
        return ""
    commit = code(as_text(state.get("commit"))[:12]) or "unknown"
    return f"commit {commit}" + (" with uncommitted changes" if state.get("dirty") is True else "")


def restart_row(restart: dict[str, Any]) -> list[str]:
    return [
        plain(as_text(restart.get("at")), 40),
        f.whole(finite(restart.get("resumed_step"))),
        f.whole(finite(restart.get("lost_steps"))),
        f.duration(finite(restart.get("downtime_s"))),
        code(as_text(restart.get("command")), 1000),
        code_words(mapping(restart.get("code"))),
    ]


def diff_block(entry: Entry) -> str:
    text = entry.facts.source.get("code_diff")
    if not isinstance(text, str) or not text.strip():
        return ""
    return details("Uncommitted changes of src and configs", code_block(text, "diff", SHOWN_DIFF))
