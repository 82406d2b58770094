"""`logbook/<experiment>.md`: every run of one experiment with its numbers, curves, differences and hardware."""

from collections import Counter
from collections.abc import Sequence

from lockstep.pages import formats as f
from lockstep.pages.entry import Entry
from lockstep.pages.index_page import GENERATED, runs_table, status_cell
from lockstep.pages.markdown import blocks, code, code_block, details, plain, quote, table
from lockstep.pages.publish import HOW_TO_OPEN, is_shown_as_source
from lockstep.pages.run_details import (
    changes_block,
    checkpoint_text,
    classes_block,
    commit_words,
    diff_block,
    hardware_block,
    restarts_block,
)
from lockstep.runs.record import RankSpeed

RUNS_PER_PAGE = 20


def experiment_page(
    title: str,
    entries: Sequence[Entry],
    before: dict[str, Entry],
    preface: str,
    older_pages: Sequence[str],
    repeats: str = "",
) -> str:
    """
    Args:
        entries: the runs that this page describes, newest first.
        before: the run before each run, by run id.
        preface: a person's own words.
        repeats: means over folds and seeds.
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
            repeats,
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
            code_block(run.commands or "# the command is not in the record", "sh", 3000),
            repeat_text(entry),
            table(("", ""), summary_rows(entry)),
            f"![Curves of {run.run_id}]({entry.curves_file})" if entry.has_curves else "",
            f"![Confusion matrix of {run.run_id}]({entry.confusion_file})" if entry.has_confusion else "",
            f"![Calibration of {run.run_id}]({entry.calibration_file})" if run.calibration else "",
            classes_block(entry),
            changes_block(entry, before),
            hardware_block(entry),
            restarts_block(entry),
            details("All metrics of the record", table(("metric", "value"), metric_rows(entry), "lr")),
            diff_block(entry),
        ]
    )


def repeat_text(entry: Entry) -> str:
    """The commands that repeat the run with its own code; empty where the record names no commit."""
    record = entry.facts.record
    if record.task_name != "train" or not record.code.commit:
        return ""
    lines = [f"git worktree add ../{entry.run_id} {record.code.commit} && cd ../{entry.run_id}"]
    if record.code.dirty:
        lines.append("git apply code.diff  # the uncommitted changes, shown below and in the run folder")
    commands = "\n".join([*lines, record.command or ""])
    return f"With the code of then:\n\n{code_block(commands, 'sh', 3000)}"


def headline(entry: Entry) -> str:
    run = entry.facts
    parts = [
        f"**{status_cell(entry)}**",
        f"{plain(run.date)} UTC" if run.date else "",
        f"run {code(run.run_id)}" if entry.title != run.run_id else "",
        " ".join(code(tag, 60) for tag in entry.tags[:20]),
        commit_words(run.record.code) if run.record.code.commit else "",
    ]
    return " · ".join(part for part in parts if part)


def error_block(entry: Entry) -> str:
    run, error = entry.facts, entry.facts.record.error
    if not run.error:
        return ""
    where = [
        f"rank {error.rank}" if error.rank is not None else "",
        f"on {code(error.host)}" if error.host else "",
        f"in {plain(error.phase)}" if error.phase else "",
        f"exit code {run.record.exit_code}" if run.record.exit_code is not None else "",
    ]
    place = " ".join(part for part in where if part)
    return f"**What ended it**{f' ({place})' if place else ''}:\n\n{code_block(run.error, 'text', 3000)}"


def summary_rows(entry: Entry) -> list[list[str]]:
    """(what, value) for what is known; unknown rows are left out."""
    run = entry.facts
    rows = {
        "Test accuracy": test_text(entry),
        "Metrics of the config": chosen_text(entry),
        "Test scores": scores_text(entry),
        "Best validation accuracy": f.percent(run.best_val_acc) if run.best_val_acc is not None else "",
        "Training": training_text(entry),
        "Model": model_text(entry),
        "Data": data_text(entry),
        "Strategy": strategy_text(entry),
        "Global batch": batch_text(entry),
        "Swarm": swarm_text(entry),
        "Largest batch": largest_batch_text(entry),
        "Throughput": throughput_text(entry),
        "Ranks": ranks_text(entry),
        "Goodput": goodput_text(entry),
        "Peak memory": f.gib(run.peak_memory_gib) if run.peak_memory_gib is not None else "",
        "Cost": cost_text(entry),
        "Best checkpoint": checkpoint_text(entry),
        "Started from the weights of": weights_text(entry),
        "Resumed from": code(run.record.resumed_from),
        "TensorBoard": tensorboard_text(entry),
        "Report": report_text(entry),
        "Started on": hosts_text(entry),
    }
    return [[name, value] for name, value in rows.items() if value]


def tensorboard_text(entry: Entry) -> str:
    """Where the run was made, and where only the logbook is."""
    here = code(f"tensorboard --logdir {entry.folder}/tensorboard") if entry.has_tensorboard else ""
    return " · ".join(filter(None, [here, f"from git: {code(f'python src/logbook.py tensorboard {entry.run_id}')}"]))


def test_text(entry: Entry) -> str:
    run = entry.facts
    correct, images = run.metrics.get("test/correct"), run.metrics.get("test/images")
    counted = f" ({f.whole(correct)} of {f.whole(images)} images)" if correct is not None and images is not None else ""
    part = f", a part of the {f.whole(run.record.num_test)} test images" if run.tested_images is not None else ""
    return f"**{f.percent(run.test_acc)}**{counted}{part}" if run.test_acc is not None else ""


def scores_text(entry: Entry) -> str:
    """Of as many images as the accuracy, which stands above."""
    shown = {"test/f1_macro": "F1 {}, mean of the classes", "test/balanced_acc": "balanced accuracy {}",
             "test/ece": "calibration error {}"}  # fmt: skip
    known = entry.facts.metrics
    return joined(*(form.format(f.percent(known[name])) for name, form in shown.items() if name in known))


def chosen_text(entry: Entry) -> str:
    return joined(*(f"{plain(name, 60)} {f.figure(value)}" for name, value in entry.facts.chosen_metrics.items()))


def data_text(entry: Entry) -> str:
    run = entry.facts
    return joined(
        plain(run.record.data),
        unit(run.record.num_train, " training", f.whole),
        "none to validate" if run.record.num_val == 0 else unit(run.record.num_val, " validation", f.whole),
        unit(run.record.num_test, " test images", f.whole),
        f"hash {code(run.record.data_hash[:12])}" if run.record.data_hash else "",
        f"fold {fold} (counted from 0) of {run.config.get('data.num_folds')} validates"
        if isinstance(fold := run.config.get("data.fold"), int)
        else "",
    )


def weights_text(entry: Entry) -> str:
    record = entry.facts.record
    path, sha256 = record.initial_weights or entry.facts.config.get("model.weights"), record.initial_weights_sha256
    return joined(code(path) if path else "", f"sha256 {code(sha256, 80)}" if sha256 else "")


def joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def unit(value: float | None, suffix: str, form=f.rate) -> str:
    return "" if value is None else f"{form(value)}{suffix.removesuffix('s') if value == 1 else suffix}"


def training_text(entry: Entry) -> str:
    run = entry.facts
    return joined(
        f.duration(run.seconds) if run.seconds is not None else "",
        unit(run.record.epochs, " epochs"),
        unit(run.record.steps, " steps", f.whole),
        f"ended by trainer.max_time ({f.duration(run.record.max_time_s)})" if run.record.ended_by == "max_time" else "",
    )


def model_text(entry: Entry) -> str:
    run = entry.facts
    trained = run.record.num_trained_parameters
    return joined(
        plain(run.record.model),
        unit(run.record.num_parameters, " parameters", f.whole),
        f"{f.whole(trained)} of them trained" if trained not in (None, run.record.num_parameters) else "",
    )


def strategy_text(entry: Entry) -> str:
    run = entry.facts
    return joined(
        plain(run.strategy),
        f"world size {plain(run.world)}" if run.world else "",
        f"precision {plain(run.record.precision)}" if run.record.precision else "",
        f"seed {run.record.seed}" if run.record.seed is not None else "",
    )


def batch_text(entry: Entry) -> str:
    """With what no whole batch holds, where epochs are whole."""
    run, left_out = entry.facts, entry.facts.record.left_out_per_epoch
    is_whole = run.config.get("trainer.limit_train_batches", 1.0) in (1.0, None) and not run.is_peer
    said = f"; each epoch leaves out {unit(left_out, ' images', f.whole)} that fill no batch, others each time"
    return plain(run.batch_formula) + (said if left_out and is_whole else "")


def swarm_text(entry: Entry) -> str:
    run = entry.facts
    return joined(
        plain(run.record.swarm.name),
        unit(run.record.swarm.peers, " peers in its last step", f.whole),
        unit(run.record.swarm.steps, " steps of all peers together", f.whole),
    )


def largest_batch_text(entry: Entry) -> str:
    largest = entry.facts.record.largest_batch
    if largest.per_device is None:
        return ""
    at = f"at {f.gib(largest.peak_memory_gib)}" if largest.peak_memory_gib is not None else ""
    bound = largest.bounded_by
    return joined(
        f"**{largest.per_device}** per device",
        unit(largest.global_, " global", f.whole),
        f"{at} of {f.gib(largest.limit_gib)}" if at and largest.limit_gib is not None else at,
        "all the data there is: more would fit into memory" if bound == "data set" else "",
        f"limited by {plain(bound)}" if bound and bound != "data set" else "",
        f"found in {f.duration(largest.seconds)}" if largest.seconds is not None else "",
        unit(largest.probes, " probes", f.whole),
    )


def throughput_text(entry: Entry) -> str:
    run, measured = entry.facts, entry.facts.record.throughput
    p50, p95 = measured.step_seconds.p50, measured.step_seconds.p95
    wait, mfu = measured.data_wait_share, run.mfu
    return joined(
        unit(run.images_per_s, " images/s (mean)"),
        unit(measured.images_per_s_per_device, " per device"),
        f"step {f.milliseconds(p50)} (p50)" if p50 is not None else "",
        f"{f.milliseconds(p95)} (p95)" if p95 is not None else "",
        f"{f.percent(wait, 1)} of the time waiting for data" if wait is not None else "",
        f"MFU {f.percent(mfu, 1)}" if mfu is not None else "",
    )


def ranks_text(entry: Entry) -> str:
    """The slowest and the fastest, by what each does in a step before it waits for the others."""
    run = entry.facts
    if (run.record.world_size or 1) <= 1:
        return ""
    slowest, fastest = run.record.throughput.slowest_rank, run.record.throughput.fastest_rank
    slow = rank_text("slowest", slowest, named=True)
    fast = rank_text("fastest", fastest, named=slowest.host != fastest.host)
    return f"{slow}, {fast}, of own work in a step" if slow and fast else ""


def rank_text(which: str, rank: RankSpeed, *, named: bool) -> str:
    if rank.own_seconds is None:
        return ""
    host = f" on {plain(rank.host)}" if named and rank.host else ""
    return f"{which} rank {plain(rank.rank)}{host} {f.milliseconds(rank.own_seconds)}"


def goodput_text(entry: Entry) -> str:
    run = entry.facts
    steps, wall = run.record.goodput.steps, run.record.goodput.wall
    return joined(
        f"{f.percent(steps, 1)} of the steps kept" if steps is not None else "",
        f"{f.percent(wall, 1)} of the time spent on them" if wall is not None else "",
    )


def report_text(entry: Entry) -> str:
    opened = f" ({HOW_TO_OPEN})" if any(is_shown_as_source(link) for link in entry.reports) else ""
    return ", ".join(entry.reports) + opened


def cost_text(entry: Entry) -> str:
    cost = entry.facts.record.cost
    if cost.usd is None:
        return ""
    price = f"{f.dollars(cost.price_per_hour)} an hour" if cost.price_per_hour is not None else ""
    return joined(
        f.dollars(cost.usd),
        f"{f.dollars(cost.usd_per_epoch)} an epoch" if cost.usd_per_epoch is not None else "",
        " at ".join(filter(None, (plain(cost.instance), price))),
    )


def hosts_text(entry: Entry) -> str:
    run = entry.facts.record
    versions = joined(
        *(f"{name} {plain(run.versions[name])}" for name in ("python", "torch", "lightning", "cuda")
          if run.versions.get(name))
    )  # fmt: skip
    hosts = Counter(host.host for host in run.hosts if host.host)
    named = ", ".join(host if count == 1 else f"{host} ({count} nodes)" for host, count in hosts.items())
    return joined(
        code(named), f"launched by {plain(run.launcher)}" if run.launcher not in (None, "none") else "", versions
    )


def metric_rows(entry: Entry) -> list[list[str]]:
    return [[code(name, 80), f"{value:.6g}"] for name, value in entry.facts.metrics.items()]
