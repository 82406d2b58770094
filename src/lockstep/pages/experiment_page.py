"""`logbook/<experiment>.md`: every run of one experiment with its numbers, curves, differences and hardware."""

from collections import Counter
from collections.abc import Sequence

from lockstep.pages import formats as f
from lockstep.pages.entry import Entry
from lockstep.pages.index_page import GENERATED, runs_table, status_cell
from lockstep.pages.json_values import as_text, items
from lockstep.pages.markdown import blocks, code, code_block, details, plain, quote, table
from lockstep.pages.publish import HOW_TO_OPEN, is_shown_as_source
from lockstep.pages.run_details import changes_block, checkpoint_text, diff_block, hardware_block, restarts_block

RUNS_PER_PAGE = 20


def experiment_page(
    title: str, entries: Sequence[Entry], before: dict[str, Entry], preface: str, older_pages: Sequence[str]
) -> str:
    """
    Args:
        entries: the runs that this page describes, newest first.
        before: the run before each run, by run id.
        preface: a person's own words.
    """
    older = ", ".join(f"[{page}]({page})" for page in older_pages)
    return blocks(
        [
            f"# {plain(title)}",
            GENERATED,
            "[← all runs](README.md)",
            quote(preface) if preface else "",
            runs_table(entries),
            f"Older runs of this experiment: {older}" if older else "",
            *(run_section(entry, before.get(entry.run_id)) for entry in entries),
        ]
    )


def run_section(entry: Entry, before: Entry | None) -> str:
    run = entry.facts
    return blocks(
        [
            f'<a id="{entry.anchor}"></a>\n\n## {plain(entry.title)}',
            headline(entry),
            quote(entry.note.text) if entry.note.text else "",
            error_block(entry),
            code_block(run.text("command") or "# the command is not in the record", "sh", 3000),
            table(("", ""), summary_rows(entry)),
            f"![Curves of {run.run_id}]({entry.curves_file})" if entry.has_curves else "",
            f"![Confusion matrix of {run.run_id}]({entry.confusion_file})" if entry.has_confusion else "",
            changes_block(entry, before),
            hardware_block(entry),
            restarts_block(entry),
            details("All metrics of the record", table(("metric", "value"), metric_rows(entry), "lr")),
            diff_block(entry),
        ]
    )


def headline(entry: Entry) -> str:
    run = entry.facts
    parts = [
        f"**{status_cell(entry)}**",
        f"{plain(run.date)} UTC" if run.date else "",
        f"run {code(run.run_id)}" if entry.title != run.run_id else "",
        " ".join(code(tag, 60) for tag in entry.tags[:20]),
        commit_text(entry),
        f"record of a newer version (schema {run.schema_version}): fields unknown here are left out"
        if run.is_newer_than_this_program
        else "",
    ]
    return " · ".join(part for part in parts if part)


def commit_text(entry: Entry) -> str:
    run = entry.facts
    commit = run.text("code", "commit")
    if not commit:
        return ""
    return f"commit {code(commit[:12])}" + (" with uncommitted changes" if run.at("code", "dirty") is True else "")


def error_block(entry: Entry) -> str:
    run = entry.facts
    if not run.error:
        return ""
    where = [
        f"rank {plain(run.text('error', 'rank'))}" if run.text("error", "rank") else "",
        f"on {code(run.text('error', 'host'))}" if run.text("error", "host") else "",
        f"in {plain(run.text('error', 'phase'))}" if run.text("error", "phase") else "",
        f"exit code {plain(run.text('exit_code'))}" if run.text("exit_code") else "",
    ]
    place = " ".join(part for part in where if part)
    return f"**What ended it**{f' ({place})' if place else ''}:\n\n{code_block(run.error, 'text', 3000)}"


def summary_rows(entry: Entry) -> list[list[str]]:
    """(what, value) for what is known; unknown rows are left out."""
    run = entry.facts
    rows = {
        "Test accuracy": test_text(entry),
        "Best validation accuracy": f.percent(run.best_val_acc) if run.best_val_acc is not None else "",
        "Training": training_text(entry),
        "Model": model_text(entry),
        "Data": data_text(entry),
        "Strategy": strategy_text(entry),
        "Global batch": plain(run.batch_formula),
        "Swarm": swarm_text(entry),
        "Largest batch": largest_batch_text(entry),
        "Throughput": throughput_text(entry),
        "Ranks": ranks_text(entry),
        "Goodput": goodput_text(entry),
        "Peak memory": f.gib(run.peak_memory_gib) if run.peak_memory_gib is not None else "",
        "Cost": cost_text(entry),
        "Best checkpoint": checkpoint_text(entry),
        "Started from the weights of": code(run.text("initial_weights")),
        "Resumed from": code(run.text("resumed_from")),
        "TensorBoard": code(f"tensorboard --logdir {entry.folder}/tensorboard") if entry.has_tensorboard else "",
        "Report": report_text(entry),
        "Started on": hosts_text(entry),
    }
    return [[name, value] for name, value in rows.items() if value]


def test_text(entry: Entry) -> str:
    run = entry.facts
    correct, images = run.number("metrics", "test/correct"), run.number("metrics", "test/images")
    counted = f" ({f.whole(correct)} of {f.whole(images)} images)" if correct is not None and images is not None else ""
    part = f", a part of the {f.whole(run.number('num_test'))} test images" if run.tested_images is not None else ""
    return f"**{f.percent(run.test_acc)}**{counted}{part}" if run.test_acc is not None else ""


def data_text(entry: Entry) -> str:
    run = entry.facts
    return joined(
        plain(run.text("data")),
        unit(run.number("num_train"), " training", f.whole),
        unit(run.number("num_val"), " validation", f.whole),
        unit(run.number("num_test"), " test images", f.whole),
        f"hash {code(run.text('data_hash')[:12])}" if run.text("data_hash") else "",
    )


def joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def unit(value: float | None, suffix: str, form=f.rate) -> str:
    return "" if value is None else f"{form(value)}{suffix.removesuffix('s') if value == 1 else suffix}"


def training_text(entry: Entry) -> str:
    run = entry.facts
    return joined(
        f.duration(run.seconds) if run.seconds is not None else "",
        unit(run.number("epochs"), " epochs"),
        unit(run.number("steps"), " steps", f.whole),
    )


def model_text(entry: Entry) -> str:
    run = entry.facts
    return joined(plain(run.text("model")), unit(run.number("num_parameters"), " parameters", f.whole))


def strategy_text(entry: Entry) -> str:
    run = entry.facts
    return joined(
        plain(run.strategy),
        f"world size {plain(run.world)}" if run.world else "",
        f"precision {plain(run.text('precision'))}" if run.text("precision") else "",
        f"seed {plain(run.text('seed'))}" if run.text("seed") else "",
    )


def swarm_text(entry: Entry) -> str:
    run = entry.facts
    return joined(
        plain(run.text("swarm", "name")),
        unit(run.number("swarm", "peers"), " peers in its last step", f.whole),
        unit(run.number("swarm", "steps"), " steps of all peers together", f.whole),
    )


def largest_batch_text(entry: Entry) -> str:
    run = entry.facts
    each = run.number("largest_batch", "per_device")
    if each is None:
        return ""
    peak, limit, seconds = (run.number("largest_batch", key) for key in ("peak_memory_gib", "limit_gib", "seconds"))
    at = f"at {f.gib(peak)}" if peak is not None else ""
    bound = run.text("largest_batch", "bounded_by")
    return joined(
        f"**{each:.0f}** per device",
        unit(run.number("largest_batch", "global"), " global", f.whole),
        f"{at} of {f.gib(limit)}" if at and limit is not None else at,
        "all the data there is: more would fit into memory" if bound == "data set" else "",
        f"limited by {plain(bound)}" if bound and bound != "data set" else "",
        f"found in {f.duration(seconds)}" if seconds is not None else "",
        unit(run.number("largest_batch", "probes"), " probes", f.whole),
    )


def throughput_text(entry: Entry) -> str:
    run = entry.facts
    p50, p95 = run.number("throughput", "step_seconds", "p50"), run.number("throughput", "step_seconds", "p95")
    wait, mfu = run.number("throughput", "data_wait_share"), run.mfu
    return joined(
        unit(run.images_per_s, " images/s"),
        unit(run.number("throughput", "images_per_s_per_device"), " per device"),
        f"step {f.milliseconds(p50)} (p50)" if p50 is not None else "",
        f"{f.milliseconds(p95)} (p95)" if p95 is not None else "",
        f"{f.percent(wait, 1)} of the time waiting for data" if wait is not None else "",
        f"MFU {f.percent(mfu, 1)}" if mfu is not None else "",
    )


def ranks_text(entry: Entry) -> str:
    """The slowest and the fastest, by what each does in a step before it waits for the others."""
    run = entry.facts
    if (run.number("world_size") or 1) <= 1:
        return ""
    hosts = [run.text("throughput", which, "host") for which in ("slowest_rank", "fastest_rank")]
    slow, fast = (
        f"{which} rank {plain(run.text('throughput', f'{which}_rank', 'rank'))}"
        + (f" on {plain(host)}" if host and (which == "slowest" or host != hosts[0]) else "")
        + f" {f.milliseconds(own)}"
        if (own := run.number("throughput", f"{which}_rank", "own_seconds")) is not None
        else ""
        for which, host in zip(("slowest", "fastest"), hosts, strict=True)
    )
    return f"{slow}, {fast}, of own work in a step" if slow and fast else ""


def goodput_text(entry: Entry) -> str:
    run = entry.facts
    steps, wall = run.number("goodput", "steps"), run.number("goodput", "wall")
    return joined(
        f"{f.percent(steps, 1)} of the steps kept" if steps is not None else "",
        f"{f.percent(wall, 1)} of the time spent on them" if wall is not None else "",
    )


def report_text(entry: Entry) -> str:
    opened = f" ({HOW_TO_OPEN})" if any(is_shown_as_source(link) for link in entry.reports) else ""
    return ", ".join(entry.reports) + opened


def cost_text(entry: Entry) -> str:
    run = entry.facts
    usd, epoch, price = (run.number("cost", key) for key in ("usd", "usd_per_epoch", "price_per_hour"))
    if usd is None:
        return ""
    instance = plain(run.text("cost", "instance"))
    return joined(
        f.dollars(usd),
        f"{f.dollars(epoch)} an epoch" if epoch is not None else "",
        (f"{instance} at {f.dollars(price)} an hour" if instance else f"{f.dollars(price)} an hour")
        if price is not None
        else instance,
    )


def hosts_text(entry: Entry) -> str:
    run = entry.facts
    launcher = run.text("launcher")
    versions = joined(
        *(f"{plain(name)} {plain(run.text('versions', name))}" for name in ("python", "torch", "lightning", "cuda")
          if run.text("versions", name))
    )  # fmt: skip
    hosts = Counter(filter(None, map(as_text, items(run.at("hosts")))))
    named = ", ".join(host if count == 1 else f"{host} ({count} nodes)" for host, count in hosts.items())
    return joined(code(named), f"launched by {plain(launcher)}" if launcher not in ("", "none") else "", versions)


def metric_rows(entry: Entry) -> list[list[str]]:
    return [[code(name, 80), f"{value:.6g}"] for name, value in entry.facts.metrics.items()]
