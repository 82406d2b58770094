"""Which lines a picture has: none left out without a word, devices and nodes paired by time."""

import re

import pytest

from example_runs import example_record
from lockstep.pages.comparison_page import comparison_page
from lockstep.pages.curves import hardware_curves, mean_over_time
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.figures import comparison_figure, utilisation_panel
from lockstep.pages.html_report import hardware_means


def run_of(nodes: int, gpus: int) -> RunFacts:
    """GPU i of node n is busy for 10·n + i percent at both moments."""
    hardware = {
        str(n): {"series": {f"gpu{i}/utilisation_percent": [[0, 60], [10 * n + i] * 2] for i in range(gpus)}}
        for n in range(nodes)
    }
    return RunFacts({"run_id": "r", "record": {}, "hardware": hardware})


def lines_of(run: RunFacts) -> dict[str, list[float]]:
    return {series.label: list(series.y) for series in utilisation_panel(run).series}


def test_up_to_eight_devices_have_a_line_each():
    assert lines_of(run_of(1, 2)) == {"GPU 0": [0, 0], "GPU 1": [1, 1]}
    assert list(lines_of(run_of(2, 4)))[:5] == [*(f"node 0 GPU {i}" for i in range(4)), "node 1 GPU 0"]


@pytest.mark.parametrize("nodes, gpus", [(2, 8), (1, 16), (8, 4)])
def test_more_devices_have_a_line_a_node(nodes, gpus):
    wanted = {f"node {n}, mean of {gpus} GPUs": [10 * n + (gpus - 1) / 2] * 2 for n in range(nodes)}
    assert lines_of(run_of(nodes, gpus)) == wanted


def test_more_nodes_have_their_mean_and_the_least_and_most_busy():
    assert lines_of(run_of(9, 2)) == {
        "all 9 nodes, mean of 18 GPUs": [40.5, 40.5],
        "node 0, the least busy": [0.5, 0.5], "node 8, the most busy": [80.5, 80.5],
    }  # fmt: skip


def test_a_mean_pairs_samples_by_time():
    assert mean_over_time([([0, 10, 20], [0, 10, 20]), ([5, 15], [100, 100])]) == ([0, 10, 20], [0, 55, 20])
    assert mean_over_time([([0, 10], [1, 3]), ([30, 40, 45], [5, 5, 5])]) == ([0, 10, 30, 40, 45], [1, 3, 5, 5, 5])


def test_nodes_are_sampled_on_one_clock(tmp_path):
    """Node 1 came ten seconds later: what was sampled at one moment is averaged, not what came as the n-th."""
    for node, start, busy in ((0, 0, (0, 0, 100, 100)), (1, 10, (100, 100, 100))):
        rows = [f"2026-11-20T20:00:{start + 5 * i:02d}Z,{value}" for i, value in enumerate(busy)]
        path = tmp_path / f"hardware-node{node}.csv"
        path.write_text("time,gpu0/utilisation_percent\n" + "\n".join(rows) + "\n")
    nodes = hardware_curves([[tmp_path / f"hardware-node{node}.csv"] for node in range(2)])
    assert [node["series"]["gpu0/utilisation_percent"][0] for node in nodes] == [[0, 5, 10, 15], [10, 15, 20]]
    run = RunFacts({"run_id": "r", "record": {}, "hardware": dict(zip("01", nodes))})
    assert hardware_means(run)["gpu"] == ([0, 5, 10, 15, 20], [0, 0, 100, 100, 100])


@pytest.mark.parametrize("num, drawn", [(10, 10), (16, 16), (20, 16)])
def test_a_comparison_draws_its_runs_or_says_how_many(num, drawn):
    curves = {"train/loss": [[1, 2], [2.0, 1.0]]}
    runs = [RunFacts({"run_id": f"r{i}", "record": example_record(f"r{i}"), "curves": curves}) for i in range(num)]
    labels = [f"label {i}" for i in range(num)]
    picture = comparison_figure(runs, labels)
    loss = picture.split("<g transform")[1]
    styles = re.findall(r'class="l (c\d(?: d)?)" d="M\d+ \d+h20"', loss)
    assert len(styles) == len(set(styles)) == drawn and f"label {drawn - 1}<" in loss
    page = comparison_page("t", [Entry(run) for run in runs], labels, "x.svg")
    assert ("The picture shows the first 16 of the 20 runs." in page) == (num == 20)
