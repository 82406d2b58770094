"""The longer parts of a run's section: what was changed, what the hardware did, restarts, uncommitted code."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.pages import formats as f
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.index_page import checkpoint_place
from lockstep.pages.json_values import mapping
from lockstep.pages.markdown import blocks, code, code_block, details, plain, table
from lockstep.pages.source import differences
from lockstep.runs.record import CodeState, Node, Restart
from lockstep.runs.scores import class_scores

MAX_ROWS = 60
FOLDED_FROM = 10
MAX_DEVICE_ROWS = 96


def value_text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def change_rows(changes: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """`choices.model`, as the config has a group's option, is `model`, as it is typed."""
    rows = [
        [code(key.removeprefix("choices."), 100), code(value_text(pair[0]), 80), code(value_text(pair[1]), 80)]
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


def typed_keys(run: RunFacts) -> list[str]:
    """Of what differs from the defaults, what was typed, in that order: the keys, and the options of groups."""
    found: dict[str, None] = {}
    for word in run.record.overrides:
        key = word.partition("=")[0].lstrip("+~").partition("@")[0]
        if f"choices.{key}" in run.config:
            found[f"choices.{key}"] = None
        else:
            found.update(dict.fromkeys(name for name in run.config if f"{name}.".startswith(f"{key}.")))
    return [key for key in found if key in (run.changed or {})]


def defaults_block(changed: Mapping[str, Sequence[Any]], typed: Sequence[str]) -> str:
    head = ("key", "default", "here")
    rest = change_rows({key: pair for key, pair in changed.items() if key not in typed})
    if not typed:
        return folded_if_long("Differs from the defaults", head, rest, "All settings: defaults.")
    shown = table(head, change_rows({key: changed[key] for key in typed}))
    folded = details(f"Came along with these: {len(rest)} key{'s' * (len(rest) != 1)}", table(head, rest))
    return blocks([f"**Differs from the defaults, as typed**\n\n{shown}", folded])


def changes_block(entry: Entry, before: Entry | None) -> str:
    run = entry.facts
    if run.changed is not None:
        defaults = defaults_block(run.changed, typed_keys(run))
    else:
        typed = [[code(text, 160)] for text in run.record.overrides[:MAX_ROWS]]
        defaults = folded_if_long("Overrides", ("given on the command line",), typed, "")
    if before is None or not run.config or not before.facts.config:
        return defaults
    rows = change_rows(differences(before.facts.config, run.config))
    since = folded_if_long("Differs from the run before", ("key", "before", "here"), rows, "")
    return blocks([defaults, f"The run before: {before.link}" + ("" if rows else ", the same settings") + ".", since])


def checkpoint_text(entry: Entry) -> str:
    best, error = entry.facts.record.best_checkpoint, entry.facts.record.upload.error
    place = checkpoint_place(entry)
    if not place:
        return ""
    parts = [
        code(place),
        f.megabytes(best.bytes) if best.bytes is not None else "",
        f"epoch {best.epoch + 1}" if best.epoch is not None else "",
        f"step {best.step}" if best.step is not None else "",
        f"sha256 {code(best.sha256, 80)}" if best.sha256 else "",
        f"**not uploaded**: {plain(error, 200)}" if error else "",
    ]
    return ", ".join(part for part in parts if part)


def classes_block(entry: Entry) -> str:
    """Precision, recall and F1 of each class of the test; of many the MAX_ROWS with the lowest F1."""
    if entry.facts.confusion is None:
        return ""
    names, counts = entry.facts.confusion
    scored = list(zip(names, class_scores(counts), strict=True))
    part = f", the {MAX_ROWS} lowest of {len(scored)}" if len(scored) > MAX_ROWS else ""
    if part:
        scored = sorted(scored, key=lambda pair: pair[1].f1 or 0.0)[:MAX_ROWS]
    rows = [
        [plain(name, 60), f.whole(score.images), *map(f.percent, (score.precision, score.recall, score.f1))]
        for name, score in scored
    ]
    return details(
        f"Test, class by class{part}", table(("class", "images", "precision", "recall", "F1"), rows, "lrrrr")
    )


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


def node_row(node: Node) -> list[str]:
    gpus = ", ".join(filter(None, (plain(gpu.name, 60) for gpu in node.gpus[:16])))
    return [
        plain(node.node_rank, 20),
        code(node.host, 60),
        gpus or "none",
        plain(node.cpu, 80),
        f.whole(node.cores),
        f.gib(node.memory_gib),
    ]


def restarts_block(entry: Entry) -> str:
    shown = entry.facts.record.restarts[:MAX_ROWS]
    head = ["at (UTC)", "went on at step", "steps lost", "down for", "ranks", "by", "with other code"]
    told = [
        True, True, True, True, any(map(changed_size, shown)), any(restart.command for restart in shown),
        any(restart.code for restart in shown),
    ]  # fmt: skip
    kept = [head, *map(restart_row, shown)]
    head, *body = ([cell for cell, is_told in zip(row, told, strict=True) if is_told] for row in kept)
    rows = table(head, body, "lrrrlll")
    return f"**Restarts**\n\n{rows}" if rows else ""


def changed_size(restart: Restart) -> bool:
    return restart.previous_world_size != restart.world_size


def world_words(restart: Restart) -> str:
    """`4 → 2`, with more than one node `2 → 4 on 2 nodes`."""
    now = f.whole(restart.world_size) + (f" on {restart.num_nodes} nodes" if (restart.num_nodes or 1) > 1 else "")
    return f"{f.whole(restart.previous_world_size)} → {now}" if changed_size(restart) else now


def commit_words(state: CodeState) -> str:
    """`commit 1a2b3c4 with uncommitted changes`; nothing where nothing is known."""
    if not state:
        return ""
    commit = code((state.commit or "")[:12]) or "unknown"
    return f"commit {commit}" + (" with uncommitted changes" if state.dirty else "")


def restart_row(restart: Restart) -> list[str]:
    return [
        plain(restart.at, 40),
        f.whole(restart.resumed_step),
        f.whole(restart.lost_steps),
        f.duration(restart.downtime_s),
        world_words(restart),
        code(restart.command, 1000),
        commit_words(restart.code),
    ]


def diff_block(entry: Entry) -> str:
    text = entry.facts.source.get("code_diff")
    if not isinstance(text, str) or not text.strip():
        return ""
    return details(
        "Uncommitted changes of src and configs", code_block(text, "diff", whole="code.diff in the run's folder")
    )
