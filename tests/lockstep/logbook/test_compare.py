"""Runs side by side: on the screen, as a page, and as the interactive report in a real browser."""

import json
import re
from pathlib import Path

import pytest

from example_runs import write_run
from lockstep.logbook.build import keep_run, summarise, write_page
from lockstep.logbook.compare import (
    caution_about_runs,
    comparison_text,
    result_rows,
    setting_rows,
    title_of,
    write_comparison,
)
from lockstep.logbook.figures import compare_panels, write_figure
from lockstep.logbook.folders import NOTE_MARKS, read_run
from lockstep.logbook.report import STATIC, page_data, report_html
from lockstep.records.record import JsonObject

HARDWARE = ["hardware/gpu_percent", "hardware/gpu_memory_gib", "hardware/cpu_percent"]
CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture
def runs(folders):
    return [summarise(folder) for folder in folders]


def test_numbers_have_their_ratio_to_the_first_run(
    runs,
):
    numbers = result_rows(runs)
    rows = {
        name: [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in values]
        for name, values in numbers
    }
    assert rows["Training time, with validation"] == [
        "7 min 11 s",
        "14 min 22 s (×2.00)",
        "7 min 11 s (×1.00)",
    ]
    assert rows["test/acc"] == ["86.43 % ± 0.34 %", "86.51 % ± 0.34 % (+0.08)", "–"]
    assert rows["Epochs"] == ["12", "24", "12"] and rows["Largest batch per device"][0] == "412"
    assert rows["Status"] == ["finished", "finished", "out of memory"]
    assert (
        caution_about_runs(runs[:2]) == "Not held fixed between these runs: the number of epochs."
    )
    assert caution_about_runs(runs[:1]) == ""
    runs[1].record.compiled, runs[1].record.seed, runs[1].record.code["tree_hash"] = (
        True,
        7,
        "other",
    )
    assert caution_about_runs(runs[:2]).endswith(
        "the number of epochs, torch.compile, the seed, the code."
    )


def test_the_screen_has_aligned_columns_and_the_options_that_differ(runs):
    lines = comparison_text(runs[:2]).splitlines()
    table = {name: rest for name, *rest in (re.split("  +", line) for line in lines)}
    assert lines[0].split() == ["ddp", "fsdp"] and table["choices.trainer"] == ["ddp", "fsdp"]
    assert lines[1].index("finished") == lines[0].index("ddp")
    assert lines[-1].startswith("Not held fixed")


def test_a_comparison_with_errors_says_what_they_mean(runs, tmp_path):
    meaning = "±: standard error of a share"
    write_comparison(tmp_path / "c.md", runs, "c")
    assert meaning in comparison_text(runs) and meaning in (tmp_path / "c.md").read_text()
    for run in runs:
        run.record.summary.pop("errors", None)
    assert "±" not in comparison_text(runs)


def test_one_legend_stands_below_the_panels_of_a_comparison(runs, tmp_path):
    write_comparison(tmp_path / "c.md", runs[:2], "c")
    picture = (tmp_path / "c.svg").read_text()
    assert picture.count(">fsdp</text>") == 1
    texts = re.findall(r' y="(\S+)"[^>]*>([^<]+)</text>', picture)
    height_of = {label: float(height) for height, label in texts}
    assert height_of["fsdp"] > height_of["epoch"]


def test_a_run_has_one_colour_in_all_panels(runs, tmp_path):
    runs[0].metrics.pop("train/loss")
    panels = [panel for panel in compare_panels(runs[:2]) if panel.lines]
    write_figure(tmp_path / "c.svg", panels, has_one_legend=True)
    colours = re.findall(
        "stroke: (#[0-9a-f]{6}); stroke-width: 1.4", (tmp_path / "c.svg").read_text()
    )
    assert colours[0] == colours[2] != colours[1]


def test_other_initial_weights_are_a_difference(runs):
    for run in runs:
        run.record.initial_weights = f"{run.run_id}.ckpt"
        run.record.initial_weights_sha256 = "ab" * 32
    assert "initial_weights" not in dict(setting_rows(runs)), "the same bytes at two places"
    runs[1].record.initial_weights_sha256 = "cd" * 32
    runs[2].record.initial_weights = runs[2].record.initial_weights_sha256 = None
    assert dict(setting_rows(runs))["initial_weights"] == [
        f"ddp.ckpt, sha256 {'ab' * 8}",
        f"fsdp.ckpt, sha256 {'cd' * 8}",
        "–",
    ]
    assert "the initial weights" in caution_about_runs(runs[:2])
    runs[2].config["model.weights"] = "mine.pth"
    assert dict(setting_rows(runs))["initial_weights"][2] == "mine.pth"


def test_the_page_has_both_tables_a_picture_and_the_commands(runs, tmp_path):
    page = tmp_path / "logbook" / "two.md"
    write_comparison(page, runs[:2], "Two <ways>", caution=caution_about_runs(runs[:2]))
    text = page.read_text()
    head = f"# Two &#60;ways&#62;\n\n{NOTE_MARKS[0]}\n\n{NOTE_MARKS[1]}\n\n**Not held fixed between these runs:"
    assert text.startswith(head)
    assert "|  | ddp | fsdp |\n|---|---|---|\n| Status | finished | finished |\n" in text
    assert "| `choices.trainer` | `ddp` | `fsdp` |" in text and "](two.svg)" in text
    assert "\nddp:\n\n```sh\npython src/train.py" in text
    svg = page.with_suffix(".svg").read_text()
    assert all(title in svg for title in ("Training loss", "val/acc", "minutes of training"))


@pytest.mark.parametrize("length", [5, 200])
def test_an_automatic_title_follows_the_runs(runs, tmp_path, length):
    """A page shows 300 characters of it."""
    for run in runs:
        (run.folder / "page.md").write_text(f"# {run.run_id} | {'w' * length}\n")
    page = tmp_path / "c.md"
    write_comparison(page, runs[:2], title_of(runs[:2], page))
    assert title_of(runs[1:], page) == " beside ".join(run.title for run in runs[1:])
    page.write_text(page.read_text().replace("# ddp", "# Which of ddp", 1))
    assert title_of(runs[1:], page).startswith("Which of ddp ")


def test_a_comparison_links_the_pages_that_are_kept(runs, tmp_path):
    page = tmp_path / "logbook" / "two.md"
    keep_run(runs[0].folder, page.parent)
    write_comparison(page, runs[:2], "Two")
    assert "\n[ddp](ddp/page.md):\n" in page.read_text() and "\nfsdp:\n" in page.read_text()


def test_a_comparison_says_which_curves_are_missing(runs, tmp_path):
    (runs[1].folder / "metrics.csv").unlink()
    rows = "".join(f"{step},{1 / step:.3f}\n" for step in range(1, 9))
    (runs[2].folder / "metrics.csv").write_text(f"step,train/loss\n{rows}")
    write_comparison(tmp_path / "c.md", runs, "c")
    text = (tmp_path / "c.md").read_text()
    assert "\nNo curves of fsdp: there is no metrics.csv.\n" in text
    assert "\nmetrics.csv of failed has no val/acc.\n" in text
    write_comparison(tmp_path / "c.md", runs[:1], "c")
    assert "metrics.csv" not in (tmp_path / "c.md").read_text()


def test_runs_of_one_title_have_a_curve_each(runs):
    for run in runs[:2]:
        (run.folder / "page.md").write_text("# the same\n")
    loss, *_ = compare_panels(runs)
    assert list(loss.lines) == ["the same (ddp)", "the same (fsdp)", "failed"]


def test_each_monitored_metric_has_its_panels(runs):
    runs[1].record.monitor = "val/loss"
    panels = compare_panels(runs)
    assert [panel.title for panel in panels] == [
        "Training loss",
        *["val/acc"] * 2,
        *["val/loss"] * 2,
    ]
    assert all(len(panel.lines) == 3 for panel in panels)


# --- the interactive report ---


def test_code_that_changed_at_a_restart_is_named(runs):
    ddp, fsdp = runs[:2]
    assert "the code" not in caution_about_runs([ddp, fsdp])
    text = comparison_text([ddp, fsdp])
    assert "since the last restart" not in text
    code = JsonObject(commit="0123456789abcdef", tree_hash="2", dirty=True)
    restart = JsonObject(at="2026-11-20T22:45:00Z", resumed_step=100, code=code, world_size=2)
    fsdp.record.restarts = [restart]
    assert "the code" in caution_about_runs([ddp, fsdp])
    assert "Speed, memory and GPU use of fsdp: since the last" in comparison_text([ddp, fsdp])
    page = write_page(fsdp).read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "| `0123456789ab` with changes that are not kept |" in page
    assert "| Measured | speed, memory and use of the hardware since the last restart |" in page


@pytest.mark.parametrize(
    ("recorded", "steps", "at_the_end"),
    [
        ({"epochs": 2, "steps": 350}, 350, 2),
        ({"epochs": 3, "steps": 375}, 375, 375 / 175),
        ({"epochs": 0, "steps": 50, "status": "running"}, 50, 50 / 175),
        ({"epochs": 1, "steps": 50}, 50, 50 / 175),
        ({"epochs": 1, "steps": 50, "num_train": None}, 50, 1),
    ],
    ids=["whole", "left early", "live", "left in the first", "of unknown length"],
)
def test_curves_end_at_the_part_of_an_epoch_trained(recorded, steps, at_the_end, tmp_path):
    folder = write_run(tmp_path, "r", **{**recorded, "epochs": 3})
    lines = (folder / "metrics.csv").read_text().splitlines()
    rows = [line for line in lines[1:] if int(line.split(",")[0]) <= steps]
    (folder / "metrics.csv").write_text("\n".join([lines[0], *rows]) + "\n")
    run = read_run(folder)
    run.record.epochs = recorded["epochs"]
    loss, *_ = compare_panels([run])
    assert max(next(iter(loss.lines.values()))[0]) == pytest.approx(at_the_end)


def test_the_report_is_one_small_file_without_network(
    runs,
):
    page = report_html("Three <runs> @DATA@", runs)
    assert (
        "<title>Three &lt;runs&gt; &#64;DATA&#64;</title>" in page and "default-src 'none'" in page
    )
    ours = re.sub(r"/\*!.*?\*/", "", report_html("", []))
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", ours) == [] and len(ours) < 150_000
    assert "Permission is hereby granted" in (STATIC / "uPlot.LICENSE").read_text()
    assert page == report_html("Three <runs> @DATA@", runs)
    data = json.loads(json.dumps(page_data(runs), allow_nan=False))
    keys = [panel["key"] for panel in data["panels"]]
    assert keys == ["train/loss", "val/loss", "val/acc", "lr", *HARDWARE]
    assert (
        data["runs"][0]["headline"].startswith("86.43")
        and data["runs"][2]["headline"] == "out of memory"
    )
    assert data["runs"][0]["curves"]["hardware/gpu_memory_gib"][1][-1] == pytest.approx(4.5)
    assert len(data["runs"][0]["confusion"]["counts"]) == 10
    assert data["settings"]["rows"] == [["choices.trainer", "ddp", "fsdp", "ddp"]]


@pytest.fixture
def opened(runs, tmp_path):
    """The report's page in Debian's chromium, which must stay quiet and ask for nothing else."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip("there is no /usr/bin/chromium: apt-get install chromium")
    (runs[1].folder / "page.md").write_text(
        f"# fsdp\n{NOTE_MARKS[0]}\n<b>Two</b> *runs*.\n{NOTE_MARKS[1]}\n"
    )
    report, said, asked = tmp_path / "report.html", [], []
    report.write_text(report_html("Three <runs>", runs))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(report.as_uri())
        yield page
        browser.close()
    assert said == [] and asked == [report.as_uri()]


def test_in_a_browser_curves_are_drawn_zoomed_and_switched_off(opened):
    def chart(key, what):
        return opened.evaluate(
            f"(() => {{ const c = report.charts.find(c => c.panel.key === '{key}'); return {what}; }})()"
        )

    assert (
        opened.evaluate("report.charts.length") == 7
        and opened.locator("h1").inner_text() == "Three <runs>"
    )
    assert len(chart("train/loss", "c.curves")) == 3
    whole = chart("train/loss", "[c.plot.scales.x.min, c.plot.scales.x.max]")
    box = opened.locator(".chart .u-over").nth(0).bounding_box()
    y = box["y"] + 50
    opened.mouse.move(box["x"] + box["width"] * 0.25, y)
    opened.mouse.down()
    opened.mouse.move(box["x"] + box["width"] * 0.5, y, steps=4)
    opened.mouse.up()
    low, high = chart("val/acc", "[c.plot.scales.x.min, c.plot.scales.x.max]")
    assert whole[0] < low < high < whole[1], "the other curves follow"
    opened.locator("#runs button").nth(0).click()
    assert chart("val/acc", "c.curves.map(curve => curve.label)") == ["fsdp", "failed"]
    opened.locator("#smoothing").fill("0.9")
    assert chart("train/loss", "c.curves.map(curve => !!curve.faint)") == [True, False] * 2
    assert (
        opened.locator("#numbers tbody tr").count() > 15
        and opened.locator("#confusion tr").count() == 11
    )
    assert opened.locator("#notes pre").all_inner_texts() == ["<b>Two</b> *runs*."]
