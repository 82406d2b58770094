"""Pictures: where a value is drawn, and that nothing can break the file."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from lockstep.pages.confusion_svg import confusion_svg
from lockstep.pages.svg import LIGHT, Axis, Panel, Series, document, figure, round_step, tick_text


def test_axis_places_values_between_round_ticks():
    axis = Axis([0.13, 0.87], 200, 0)
    assert [round(tick, 6) for tick in axis.ticks] == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert (axis.place(0), axis.place(0.5), axis.place(1)) == (200, 100, 0)


def test_a_logarithmic_axis_has_powers_of_ten():
    axis = Axis([0.002, 30], 300, 0, log=True)
    assert [f"{tick:g}" for tick in axis.ticks] == ["0.001", "0.01", "0.1", "1", "10", "100"]
    assert axis.place(1) == pytest.approx(120)


def test_a_share_is_never_drawn_above_one():
    axis = Axis([0.4, 0.99], 100, 0, ceiling=1.0)
    assert max(axis.ticks) == pytest.approx(1) and axis.place(1.3) == 0


@pytest.mark.parametrize("value", [0, 1, -5, 1e-320, 1e17, 0.1])
def test_a_constant_curve_has_an_axis(value):
    axis = Axis([value, value], 100, 0)
    assert 0 <= axis.place(value) <= 100 and len(axis.ticks) >= 2


@pytest.mark.parametrize("steps, ticks", [([11], ["11"]), ([10, 11], ["10", "11"]), ([1, 4], ["1", "2", "3", "4"])])
def test_steps_have_whole_ticks(steps, ticks):
    picture = figure("T", [Panel("Loss", [Series("training", steps, [1.0] * len(steps), 0)])])
    assert re.findall(r'<text class="m" x="[\d.]+" y="242">([^<]*)</text>', picture) == ticks


def test_values_closer_than_a_float_can_divide_have_an_axis():
    axis = Axis([0.0, 2.225073858507203e-309], 0, 100, whole=True)
    assert axis.low < axis.high and axis.place(0.0) == 50.0


@pytest.mark.parametrize("rough, step", [(0.9, 1), (1.1, 2), (3, 5), (5.1, 10), (0.023, 0.05)])
def test_round_steps(rough, step):
    assert round_step(rough) == pytest.approx(step)


def test_tick_texts():
    assert tick_text(0.25, Axis([0, 1], 0, 1), "%") == "25 %"
    assert tick_text(2000, Axis([0, 10_000], 0, 1), "") == "2k"
    assert tick_text(0.00002, Axis([0, 0.0001], 0, 1), "") == "2e-5"


def test_a_figure_draws_every_curve_in_light_and_dark():
    panels = [
        Panel("Loss", [Series("training", [0, 10], [2.0, 1.0], 0), Series("validation", [10], [1.1], 1, dashed=True)]),
        Panel("Accuracy", []),
    ]
    root = ElementTree.fromstring(figure("T <&>", panels))
    text = "".join(root.itertext())
    assert root.get("aria-label") == "T <&>" and "nothing logged" in text and "prefers-color-scheme:dark" in text
    drawn = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if "L" in path.get("d", "")]
    assert len(drawn) == 1 and re.fullmatch(r"M52 [\d.]+L456 [\d.]+", drawn[0].get("d"))


@pytest.mark.parametrize("num", [1, 2, 10, 20, 21, 100])
def test_a_confusion_matrix_has_a_cell_for_every_count(num):
    counts = [[5 if i == j else 1 for j in range(num)] for i in range(num)]
    root = ElementTree.fromstring(confusion_svg("t", [f"<c{i}>" for i in range(num)], counts))
    cells = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("fill-opacity")]
    assert len(cells) == num * num


def test_a_viewer_that_knows_no_variables_sees_colours():
    """Literal colours stand before what depends on the reader's setting; every class that is drawn has one."""
    text = document(10, 10, "x", "")
    first = text.split("@media")[0]
    assert "var(" not in text and ".bg{fill:#fff}" in first
    assert all(f".c{i}{{stroke:{color}}}" in first for i, color in enumerate(LIGHT))
