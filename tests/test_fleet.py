"""benchmarks/fleet: the simulation by hand, against Young's and Daly's formulas, and a history on a real process."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.runs.record import read_json

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "benchmarks"))

import fleet  # noqa: E402 the line above puts it on the path
import fleet_model  # noqa: E402
from fleet_model import HOUR, BadHistory, History, Run, daly, daly_seconds, simulate, young  # noqa: E402

RUN = Run(work_s=100, checkpoint_s=2, restart_s=10, interval_s=20)


def test_a_run_by_hand():
    assert simulate(RUN, History(())).hours * HOUR == 100 + 4 * 2, "the last part needs no checkpoint"
    outcome = simulate(RUN, History((50.0,), ((0.0, 3.6), (100.0, 7.2))), nodes=2)  # 2 × (20 + 2), and 6 s lost
    assert (outcome.interruptions, outcome.lost_s) == (1, 6)
    assert outcome.hours * HOUR == 50 + 10 + 60 + 2 * 2 and outcome.goodput == 100 / 124
    assert outcome.usd == pytest.approx(2 * (100 * 0.001 + 24 * 0.002))
    outcome = simulate(RUN, History((50.0, 55.0)))  # the second meets the restart of the first
    assert outcome.hours * HOUR == 55 + 10 + 60 + 2 * 2 and outcome.lost_s == 6
    noticed = simulate(replace(RUN, saves_on_notice=True), History((50.0,)))
    assert noticed.hours * HOUR == pytest.approx(50 + 10 + 54 + 2 * 2) and noticed.lost_s == 0
    assert simulate(RUN, History((43.0,))).lost_s == 20, "a checkpoint that is not whole holds nothing"
    assert simulate(replace(RUN, start_s=5, end_s=7), History(())).hours * HOUR == 120
    assert simulate(replace(RUN, end_s=7), History((112.0,))).hours * HOUR == 112 + 10 + 20 + 7, (
        "to its last checkpoint"
    )


def test_a_history_begins_anew_after_its_end_and_is_begun_anywhere():
    history = History((10.0, 30.0), ((0.0, 1.0), (20.0, 3.0)), 40.0)
    coming = history.interruptions()
    assert [next(coming) for _ in range(4)] == [10, 30, 50, 70] and history.mean_s == 20
    assert history.usd(60.0) * HOUR == 20 * 1 + 20 * 3 + 20 * 1
    later = history.begun_at(0.5)
    assert later.taken_s == (10.0, 30.0) and later.prices == ((0.0, 3.0), (20.0, 1.0))
    with pytest.raises(BadHistory, match="not done"):
        simulate(RUN, History((15.0,), length_s=20.0))


def poisson(seed, mean_s, until_s):
    chance, at, taken = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(1 / mean_s)) < until_s:
        taken.append(at)
    return History(tuple(taken))


@pytest.mark.parametrize(("checkpoint_s", "restart_s"), [(10.0, 0.0), (60.0, 300.0)])
def test_best_interval_and_expectation_are_youngs_and_dalys_where_these_hold(checkpoint_s, restart_s):
    """Poisson interruptions, a checkpoint short beside the time between them, a run long beside both."""
    mean_s = 6 * HOUR
    run = Run(400 * HOUR, checkpoint_s, restart_s, daly(checkpoint_s, mean_s))
    histories = [poisson(seed, mean_s, 800 * HOUR) for seed in range(60)]
    for share in (0.3, 1.0, 3.0):
        each = replace(run, interval_s=share * run.interval_s)
        expected = run.work_s / daly_seconds(each, mean_s)
        assert fleet_model.mean_goodput(each, histories) == pytest.approx(expected, rel=0.004)
    candidates = [share * run.interval_s for share in (0.25, 0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.5, 4.0)]
    best = fleet_model.best_interval(run, histories, candidates)
    for formula in (young, daly):
        assert best == pytest.approx(formula(checkpoint_s, mean_s), rel=0.27)
    found = {each: fleet_model.mean_goodput(replace(run, interval_s=each), histories) for each in candidates}
    assert found[run.interval_s] > 0.999 * found[best] and found[candidates[0]] < found[best] > found[candidates[-1]]


def test_seeds_are_histories_of_their_mean_and_say_the_same_again():
    made = [fleet_model.drawn(seed, 8, 200.0, 1.5, 1000.0) for seed in range(20)]
    assert made == [fleet_model.drawn(seed, 8, 200.0, 1.5, 1000.0) for seed in range(20)]
    assert sum(len(each.taken_s) for each in made) / 20 == pytest.approx(1000 * 8 / 200, rel=0.1)
    assert sum(each.usd(1000 * HOUR) for each in made) / 20_000 == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize(
    ("taken", "prices", "said"),
    [
        ("hour\n1\n", None, "give a first line at_h"),
        ("at_h\none\n", None, "numbers below it"),
        ("at_h\n-1\n", None, "negative or no number"),
        ("at_h\n0\n", None, "no interruption after"),
        ("at_h\n", "at_h,usd_per_hour\n0,2\n9,1\n", "no interruption after"),
        ("at_h\n5\n", "at_h,usd_per_hour\n1,2\n", "the first price has to be that at at_h = 0"),
        (None, None, "No such file"),
    ],
)
def test_a_history_that_cannot_be_read_is_refused_in_one_sentence(tmp_path, capsys, taken, prices, said):
    for name, text in (("taken.csv", taken), ("prices.csv", prices)):
        if text:
            (tmp_path / name).write_text(text)
    words = ["--prices", str(tmp_path / "prices.csv")] if prices else []
    assert fleet.main(["--interruptions", str(tmp_path / "taken.csv"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_history_of_files(tmp_path):
    (tmp_path / "taken.csv").write_text("at_h\n3\n1\n")
    (tmp_path / "prices.csv").write_text("at_h,usd_per_hour\n0,1.5\n4,2\n")
    found = fleet_model.read_history(tmp_path / "taken.csv", tmp_path / "prices.csv", 0.0)
    assert found == History((HOUR, 3 * HOUR), ((0.0, 1.5), (4 * HOUR, 2.0)), 4 * HOUR)


def test_the_times_of_a_runs_record(tmp_path):
    """100 s of steps in 200 s of wall clock, 10 s done again, 10 checkpoints of 0.8 s: 82 s for two starts."""
    record = {"steps": 1000, "epochs": 10, "throughput": {"step_seconds": {"mean": 0.1}}, "goodput": {"wall": 0.5},
              "checkpoint_stall_s": 4.0, "restarts": [{"resumed_step": 500, "lost_steps": 100}]}  # fmt: skip
    path = tmp_path / "run.json"
    path.write_text(json.dumps(record))
    found = fleet.run_of_record(path, epochs=90, wait_s=60)
    assert (found.work_s, found.checkpoint_s, found.start_s) == pytest.approx((900, 0.8, 41))
    assert found.restart_s == pytest.approx(101)
    path.write_text(json.dumps({**record, "goodput": {}}))
    with pytest.raises(BadHistory, match="name a run that trained"):
        fleet.run_of_record(path, 90, 0)
    with pytest.raises(BadHistory, match="no run folder"):
        fleet.run_of_record(tmp_path / "none" / "run.json", 90, 0)


@pytest.mark.slow
def test_a_real_training_is_killed_at_a_historys_times_and_ends(tmp_path):
    import fleet_replay

    seconds, kills = fleet_replay.played(tmp_path / "run", 1500, History((3.5, 6.0, 600.0)))
    assert kills == 2 and 6 < seconds < 600
    record = read_json(tmp_path / "run/train/runs/fleet/run.json")
    assert (record["status"], record["steps"]) == ("finished", 1500)
