"""`logbook/README.md`: one row a run, newest first, and above it what a reviewer asks for first."""

import math
from collections.abc import Sequence

from lockstep.pages import formats as f
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.markdown import blocks, code, code_block, plain, quote, table
from lockstep.pages.measured import of_tested

HEAD = (
    "Date (UTC)", "Run", "Status", "Test acc", "Best val acc", "Model", "Data", "Strategy", "World", "Global batch",
    "Epochs", "Time", "Images/s", "Peak memory", "Cost", "Restarts", "Experiment", "Tags",
)  # fmt: skip
ALIGN = "lllrrlllrrrrrrrlll"
ROWS_PER_PAGE = 300
UNBROKEN = {ord(" "): "\N{NO-BREAK SPACE}"}  # a plain hyphen: a search for a date finds it
GENERATED = (
    "<!-- Written by `make logbook` from runs/*.json: edits here are lost. Your own words go into notes/ "
    '(`python src/logbook.py note RUN "text"`). -->'
)
WORDS = """*Strategy*: where it ends in `_sim`, ranks are processes on the CPU cores of one machine; what hardware a run
had, GPUs or none, stands on its page. *World*: ranks that train together. *Time*: of training, without the start and
the test. On a run's page, *goodput* is the share of its steps that no restart undid, and of its time that it spent in
them; *MFU* the arithmetic of the model as a share of the device's peak (on a CPU the peak that it reached when the run
began); *own work* of a rank its waiting for data and its forward pass, before ranks wait for one another."""
CHOSEN = (
    "Chosen by the validation accuracy of their best checkpoint; ±: the standard error of a share of so many images, "
    "within which runs are as good as one another. How they were started:"
)
MARKS = {"finished": "✅ finished", "failed": "❌ failed", "interrupted": "⏸ interrupted", "running": "▶ running"}


def index_page(
    entries: Sequence[Entry], shown: Sequence[Entry], preface: str, links: str, older_pages: Sequence[str]
) -> str:
    """
    Args:
        entries: all runs, newest first.
        shown: those whose row stands on this page.
        preface: a person's own words (notes/README.md).
        links: the comparisons and reports.
    """
    older = ", ".join(f"[{page}]({page})" for page in older_pages)
    return blocks(
        [
            "# Logbook",
            GENERATED,
            quote(preface) if preface else "",
            best_runs(entries),
            links,
            "## All runs\n",
            runs_table(shown) or "No runs yet: `python src/train.py` writes the first.",
            f"Older runs: {older}" if older else "",
            WORDS if entries else "",
        ]
    )


def older_page(entries: Sequence[Entry], number: int) -> str:
    return blocks([f"# Logbook, older runs {number}", GENERATED, "[Newest runs](README.md)", runs_table(entries)])


def runs_table(entries: Sequence[Entry]) -> str:
    return table(HEAD, map(run_row, entries), ALIGN)


def run_row(entry: Entry) -> list[str]:
    run = entry.facts
    return [
        plain(run.date).translate(UNBROKEN) or f.NONE,
        entry.link,
        status_cell(entry),
        f.percent(run.test_acc) + of_tested(run),
        f.percent(run.best_val_acc),
        plain(run.record.model, 40),
        plain(run.record.data, 40),
        plain(run.strategy, 30),
        plain(run.world, 30),
        f.whole(run.record.global_batch_size),
        f.rate(run.record.epochs),
        f.duration(run.seconds),
        f.rate(run.images_per_s),
        f.gib(run.peak_memory_gib),
        f.dollars(run.record.cost.usd),
        plain(run.restart_summary),
        plain(run.experiment, 40),
        plain(", ".join(entry.tags), 60),
    ]


def status_cell(entry: Entry) -> str:
    run = entry.facts
    if run.status == "failed" and run.is_out_of_memory:
        return "❌ out of memory"
    return MARKS.get(run.status, "❔ lost")


def best_runs(entries: Sequence[Entry]) -> str:
    """Of each data set the tested run that validation puts first, as it does with a run's epochs."""
    best: dict[str, Entry] = {}
    for entry in entries:
        run = entry.facts
        data = run.record.data or f.NONE
        kept = best.get(data)
        if run.is_tested_training and (kept is None or (run.best_val_acc or 0) > (kept.facts.best_val_acc or 0)):
            best[data] = entry
    if not best:
        return ""
    rows = [best_row(data, entry) for data, entry in sorted(best.items())]
    head = ("Data", "Run", "Model", "Strategy", "Test acc", "Val acc", "Time", "Cost", "Best checkpoint")
    commands = [
        f"{plain(data)}, {entry.link}:\n\n{code_block(entry.facts.commands, 'sh', 2000)}"
        for data, entry in sorted(best.items())
        if entry.facts.commands
    ]
    return blocks(
        [
            "## Best run on each data set",
            table(head, rows, "llllrrrrl"),
            CHOSEN,
            *commands,
        ]
    )


def best_row(data: str, entry: Entry) -> list[str]:
    run = entry.facts
    return [
        plain(data, 40),
        entry.link,
        plain(run.record.model, 40),
        plain(run.strategy, 30),
        f"**{f.percent(run.test_acc)}**",
        validation_text(run),
        f.duration(run.seconds),
        f.dollars(run.record.cost.usd),
        code(checkpoint_place(entry)) or f.NONE,
    ]


def validation_text(run: RunFacts) -> str:
    """`85.80 % ± 0.78 of 2,000`."""
    images = run.metrics.get("val/images") or run.record.num_val
    if run.best_val_acc is None or not images:
        return f.percent(run.best_val_acc)
    error = math.sqrt(max(run.best_val_acc * (1 - run.best_val_acc), 0.0) / images)
    return f"{f.percent(run.best_val_acc)} ± {100 * error:.2f} of {f.whole(images)}"


def checkpoint_place(entry: Entry) -> str:
    """Where the best checkpoint lies: its S3 address, or the path on the machine that trained."""
    best, upload = entry.facts.record.best_checkpoint, entry.facts.record.upload
    path = best.path or ""
    local = f"{entry.folder}/{path}" if path and not path.startswith("/") and entry.folder else path
    sent = upload.uri if upload.step == best.step else ""  # else of an earlier best: this one never arrived
    return best.s3_uri or sent or local
