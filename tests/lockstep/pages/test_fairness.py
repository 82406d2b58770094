"""What a comparison says of runs that cannot be set side by side."""

import pytest

from example_runs import example_record
from lockstep.pages.comparison_page import comparison_page
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.fairness import caution, cautions, load_caution
from lockstep.pages.measured import measured_values


def entry_of(load=None, cores=2, **throughput) -> Entry:
    record = example_record("r", throughput=throughput)
    stats = {"machine/load_1min": {"p50": load, "max": 40.0}} if load is not None else {}
    record["hardware"] = {"nodes": [{"node_rank": 0, "cpu": "Xeon", "cores": cores, "stats": stats}]}
    return Entry(RunFacts({"run_id": "r", "record": record}))


@pytest.mark.parametrize(
    "one, other, said",
    [
        ((2.0, 2), (2.2, 2), ""),
        ((0.6, 2), (2.2, 2), "load per core a 0.3, b 1.1."),
        ((12.0, 2), (12.2, 2), "load per core a 6.0, b 6.1."),
        ((6.0, 64), (30.0, 64), ""),
        ((None, 2), (2.0, 2), ""),
        ((None, 2), (2.4, 2), ""),
        ((None, 2), (2.6, 2), "load per core b 1.3."),
        ((None, 2), (3.5, 2), "load per core b 1.8."),
        ((1.0, 0), (9.0, 0), ""),
    ],
)
def test_an_unequal_or_heavy_load_is_said(one, other, said):
    text = load_caution([entry_of(*one), entry_of(*other)], ["a", "b"])
    assert said in text and bool(text) == bool(said)
    assert caution([entry_of(*one), entry_of(*other)]) == ""
    assert cautions([entry_of(*one), entry_of(*other)], ["a", "b"]) == ([text.replace("**", "")] if said else [])
    assert said in comparison_page("t", [entry_of(*one), entry_of(*other)], ["a", "b"], "")


@pytest.mark.parametrize(
    "one, other, cell", [(2.0, 2.2, "20 s (×2.00)"), (2.0, 2.6, "20 s"), (2.6, 2.0, "20 s"), (0.6, 2.2, "20 s")]
)
def test_times_beside_other_work_have_no_ratio(one, other, cell):
    entries = [entry_of(one), entry_of(other)]
    for entry, seconds in zip(entries, (10.0, 20.0), strict=True):
        entry.facts.record.fit_seconds = seconds
    values = dict(measured_values(entries))
    assert values["Training time"][1].replace("\N{NO-BREAK SPACE}", " ") == cell
    assert "×" in values["Global batch"][1]  # what load does not change keeps its ratio


@pytest.mark.parametrize("accelerator, load, mfu", [("cpu", 2.4, 0.3), ("cpu", 2.6, None), ("gpu", 2.6, 0.3)])
def test_an_mfu_of_a_peak_measured_beside_other_work_is_not_shown(accelerator, load, mfu):
    run = entry_of(load, mfu=0.3).facts
    run.record.accelerator = accelerator
    assert run.mfu == mfu


@pytest.mark.parametrize("peak, cell", [(0.10, "30.0 % (×1.50)"), (0.109, "30.0 % (×1.50)"), (0.12, "30.0 %")])
def test_mfus_of_peaks_that_differ_have_no_ratio(peak, cell):
    entries = [entry_of(mfu=0.2, peak_tflops=0.1), entry_of(mfu=0.3, peak_tflops=peak)]
    cells = dict(measured_values(entries))["MFU"]
    assert [text.replace("\N{NO-BREAK SPACE}", " ") for text in cells] == ["20.0 %", cell]
