"""The published report: its size, what it holds, and how it behaves in a real browser."""

import json
import re
from pathlib import Path

import pytest

from example_runs import write_run
from lockstep.pages.build import import_folder
from lockstep.pages.facts import RunFacts
from lockstep.pages.html_report import PARTS, report_data, report_html
from lockstep.pages.json_values import mapping
from lockstep.pages.notes import Note, add_note, read_note, run_note_path
from lockstep.pages.page_set import load_entries
from lockstep.pages.publish import publish_report
from lockstep.pages.terminal import comparison_text
from object_store import shared_store

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture
def report(logbook, tmp_path) -> Path:
    entries = load_entries(logbook)
    path = tmp_path / "report.html"
    path.write_text(report_html("Three <runs>", entries, ["ddp", "fsdp", "out of </script> memory"]))
    return path


def test_at_most_150_kb_before_data():
    assert len(report_html("", [], []).encode()) < 150_000


def test_no_address_of_the_outside(report):
    ours = re.sub(r"/\*!.*?\*/", "", report_html("", [], []))
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", ours) == []
    assert "default-src 'none'" in ours


def test_the_licence_of_uplot_is_there():
    assert "Permission is hereby granted" in (PARTS / "uPlot.LICENSE").read_text()


def test_data_of_three_runs(logbook):
    data = report_data(load_entries(logbook), ["a", "b", "c"])
    assert [panel["key"] for panel in data["panels"]] == [
        "train/loss", "val/loss", "val/acc", "lr", "gpu", "memory", "cpu",
    ]  # fmt: skip
    assert [run["headline"] for run in data["runs"]][0].startswith("86.43")
    rows = {row[0]: row[1:] for row in data["numbers"]["rows"]}
    assert [re.sub(r"\s", " ", cell) for cell in rows["Training time"]] == [
        "7 min 11 s", "7 min 46 s (×1.08)", "7 min 11 s (×1.00)",
    ]  # fmt: skip
    assert data["settings"]["rows"] == [
        ["choices.trainer", "ddp", "fsdp", "ddp"],
        ["data.global_batch_size", "256", "256", "2048"],
    ]
    memory = data["runs"][0]["hardware"]["memory"]
    assert memory[1][0] == 0 and memory[1][-1] == pytest.approx(4.5)


def test_the_cautions_of_compare_and_the_notes_are_in_it(logbook):
    entries = load_entries(logbook)
    source = entries[0].facts.source
    source["record"]["code"]["commit"] = "<b>_a@STYLE@"
    entries[0].facts = RunFacts(source)
    add_note(run_note_path(logbook, entries[1].run_id), "</script><b>Two</b> *runs*.")
    entries[1].note = read_note(run_note_path(logbook, entries[1].run_id))
    page = report_html("", entries, ["a", "b", "c"])
    held = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert held["cautions"] == [
        "Not held fixed between these runs: the number of epochs, the code (commits <b>_a@S, 3b18e51)."
    ]
    assert held["cautions"][0] in comparison_text(entries, ["a", "b", "c"])
    assert [run["note"] for run in held["runs"]] == ["Baseline of the *report*.", "</script><b>Two</b> *runs*.", ""]
    assert "<b>" not in page


def test_what_is_one_number_all_along_has_no_panel(logbook):
    entries = load_entries(logbook)
    curves = entries[0].facts.source["curves"]
    curves["val/images"], curves["val/mine"] = [[1, 2], [640, 640]], [[1, 2], [0.5, 0.75]]
    keys = {panel["key"] for panel in report_data(entries, ["a", "b", "c"])["panels"]}
    assert "val/mine" in keys and "val/images" not in keys


def test_a_run_without_anything_is_in_the_report(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "bare.json").write_text('{"record": {}}')
    data = report_data(load_entries(tmp_path), ["bare"])
    assert data["panels"] == [] and data["runs"][0]["curves"] == {} and mapping(data["runs"][0]["confusion"]) == {}


# --- in Debian's chromium ---


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip("there is no /usr/bin/chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page with what it said and asked for."""

    def __init__(self, browser, report: Path | str, **context):
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = report if isinstance(report, str) else report.as_uri()
        self.page.goto(self.address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def chart(self, key: str, what: str):
        return self.page.evaluate(
            f"(() => {{ const c = report.charts.find(c => c.panel.key === '{key}'); return {what}; }})()"
        )

    def colours(self, key: str) -> int:
        """How many pixels of a chart are no shade of grey: the curves."""
        return self.chart(
            key,
            """(() => { const d = c.plot.ctx.getImageData(0, 0, c.plot.ctx.canvas.width, c.plot.ctx.canvas.height).data;
            let n = 0; for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 99 &&
            Math.max(d[i], d[i+1], d[i+2]) - Math.min(d[i], d[i+1], d[i+2]) > 60) n++; return n; })()""",
        )

    def drag(self, key: str, start: float, stop: float) -> None:
        index = self.page.evaluate(f"report.charts.findIndex(c => c.panel.key === '{key}')")
        over = self.page.locator(".chart .u-over").nth(index)
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + box["width"] * start, y)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] * (start + stop) / 2, y, steps=4)
        self.page.mouse.move(box["x"] + box["width"] * stop, y, steps=4)
        self.page.mouse.up()

    def assert_quiet(self) -> None:
        assert self.errors == []
        assert self.requests == [self.address]


def test_cautions_and_notes_are_shown_as_text(browser, logbook, tmp_path):
    entries, path = load_entries(logbook), tmp_path / "report.html"
    entries[1].note = Note(text="<b>Two</b> *runs*.")
    path.write_text(report_html("", entries, ["a", "b", "c"]))
    with Opened(browser, path) as opened:
        assert opened.page.locator("#cautions p").all_inner_texts() == report_data(entries, ["a", "b", "c"])["cautions"]
        assert opened.page.locator("#notes pre").all_inner_texts() == [
            "Baseline of the *report*.",
            "<b>Two</b> *runs*.",
        ]
        opened.assert_quiet()
    path.write_text(report_html("", entries[2:], ["c"]))
    with Opened(browser, path) as opened:
        assert opened.page.locator("#notes, #cautions p").count() == 0


def test_a_metric_with_the_name_of_what_every_object_has(browser, tmp_path):
    """One run has the curve, the other has not: what the script finds there instead drew nothing after it."""
    odd = ("constructor", "__proto__", "hasOwnProperty", "toString")
    for name in ("one", "two"):
        folder = write_run(tmp_path / "runs", name)
        if name == "one":
            lines = (folder / "metrics.csv").read_text().splitlines()
            head, *rows = [f"{line},{','.join(odd if i == 0 else [f'0.{i}'] * 4)}" for i, line in enumerate(lines)]
            (folder / "metrics.csv").write_text("\n".join([head, *rows]) + "\n")
        import_folder(folder, tmp_path / "logbook")
    path = tmp_path / "report.html"
    path.write_text(report_html("Odd", load_entries(tmp_path / "logbook"), ["one", "two"]))
    with Opened(browser, path) as opened:
        assert opened.page.evaluate("document.querySelectorAll('#numbers tbody tr').length") > 10
        assert {opened.chart(key, "c.curves.length") for key in odd} == {1}
        opened.assert_quiet()


RANGE = "[c.plot.scales.x.min, c.plot.scales.x.max]"


def test_curves_are_drawn_zoomed_and_shown_whole_again(browser, report):
    with Opened(browser, report, viewport={"width": 1400, "height": 900}) as opened:
        assert opened.page.evaluate("report.charts.length") == 7
        assert all(opened.colours(key) > 200 for key in ("train/loss", "val/acc", "gpu"))
        whole = opened.chart("train/loss", RANGE)
        assert whole == [25, 2100]
        opened.drag("train/loss", 0.25, 0.5)
        low, high = opened.chart("train/loss", RANGE)
        assert low == pytest.approx(25 + 0.25 * 2075, abs=25) and high == pytest.approx(25 + 0.5 * 2075, abs=25)
        assert opened.chart("val/acc", RANGE) == [low, high], "the other curves follow"
        assert opened.chart("gpu", RANGE) != [low, high], "but not those over another axis"
        opened.page.get_by_role("button", name="Show all").click()
        assert opened.chart("train/loss", RANGE) == whole
        opened.assert_quiet()


@pytest.mark.slow
def test_it_opens_from_s3(browser, logbook, monkeypatch):
    """As a page and not as a download, by a link that its owner has signed."""
    store = shared_store()
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    bucket = store.new_bucket()
    published = publish_report(
        logbook, load_entries(logbook), f"s3://{bucket}/reports", endpoint_url=store.endpoint_url
    )
    key = published.uri.removeprefix(f"s3://{bucket}/")
    link = store.client().generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=600)
    with Opened(browser, link) as opened:
        assert opened.page.evaluate("report.charts.length") == 7
        assert opened.colours("train/loss") > 200
        opened.assert_quiet()


@pytest.mark.slow
def test_a_run_is_switched_off_and_on(browser, report):
    with Opened(browser, report) as opened:
        before = opened.colours("val/acc")
        button = opened.page.locator("#runs button").nth(0)
        button.click()
        assert opened.chart("val/acc", "c.curves.map(curve => curve.label)") == ["fsdp", "out of </script> memory"]
        assert opened.colours("val/acc") < before and button.get_attribute("aria-pressed") == "false"
        button.click()
        assert opened.colours("val/acc") == before and button.get_attribute("aria-pressed") == "true"
        for i in range(3):
            opened.page.locator("#runs button").nth(i).click()
        assert opened.page.evaluate("report.charts.length") == 0
        assert opened.page.get_by_text("no run that is switched on has this curve").count() == 7
        opened.assert_quiet()


def test_hover_shows_the_values_of_every_run(browser, report):
    with Opened(browser, report, viewport={"width": 1400, "height": 900}) as opened:
        opened.page.locator(".chart .u-over").nth(2).hover(position={"x": 300, "y": 80})
        tip = opened.page.locator(".chart .tip").nth(2)
        assert (
            tip.is_visible() and "step " in tip.inner_text() and "ddp" in tip.inner_text() and "%" in tip.inner_text()
        )
        assert not opened.page.locator(".chart .tip").nth(0).is_visible()
        opened.assert_quiet()


def test_smoothing_and_axes(browser, report):
    with Opened(browser, report) as opened:
        assert len(opened.chart("train/loss", "c.curves")) == 3
        opened.page.locator("#smoothing").fill("0.9")
        assert opened.chart("train/loss", "c.curves.map(curve => !!curve.faint)") == [True, False] * 3
        rough, smooth = opened.chart("train/loss", "c.curves.slice(0, 2).map(curve => curve.y)")
        steps = [sum(abs(b - a) for a, b in zip(values, values[1:])) for values in (rough, smooth)]
        assert steps[1] < 0.6 * steps[0] and smooth[0] == rough[0]
        opened.page.get_by_role("button", name="time", exact=True).click()
        assert opened.chart("train/loss", RANGE) == pytest.approx([25 * 0.205, 2100 * 0.205], abs=0.02)
        opened.page.get_by_role("button", name="epoch", exact=True).click()
        assert opened.chart("val/acc", RANGE) == [1, 12], "epochs count from 1 where a person reads"
        opened.page.locator("#log").check()
        assert opened.chart("train/loss", "c.plot.scales.y.distr") == 3
        assert opened.chart("val/acc", "c.plot.scales.y.distr") == 1
        opened.assert_quiet()


def test_tables_and_confusion_matrix(browser, report):
    with Opened(browser, report) as opened:
        page = opened.page
        assert page.locator("#numbers tbody tr").count() > 15
        assert page.locator("h1").inner_text() == "Three <runs>"
        rows = page.locator("#confusion tr")
        assert rows.count() == 11 and rows.nth(1).locator("td").nth(0).inner_text() == str(
            json.loads(page.locator("#data").text_content())["runs"][0]["confusion"]["counts"][0][0]
        )
        page.locator("#confusion-run").select_option(label="fsdp")
        assert rows.nth(1).locator("td").nth(0).inner_text() == str(
            json.loads(page.locator("#data").text_content())["runs"][1]["confusion"]["counts"][0][0]
        )
        opened.assert_quiet()


@pytest.mark.parametrize("scheme, background", [("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")])
def test_on_a_phone_in_light_and_dark(browser, report, scheme, background):
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "color_scheme": scheme}
    with Opened(browser, report, **phone) as opened:
        page = opened.page
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
        assert opened.colours("train/loss") > 200
        swipe(opened, 0, 0.3, 0.7)
        low, high = opened.chart("train/loss", RANGE)
        assert 500 < low < 800 and 1300 < high < 1600
        opened.assert_quiet()


def swipe(opened: Opened, index: int, start: float, stop: float) -> None:
    over = opened.page.locator(".chart .u-over").nth(index)
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    session = opened.context.new_cdp_session(opened.page)
    y = box["y"] + box["height"] / 2
    places = [box["x"] + box["width"] * (start + (stop - start) * i / 8) for i in range(9)]
    for i, x in enumerate(places):
        kind = "touchStart" if i == 0 else "touchMove"
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
