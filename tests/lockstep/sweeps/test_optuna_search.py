"""A search: one study over two starts, each trial a run of its own, a failing trial survived."""

import json
import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.sweeps.search import suggest
from runs import run_door

COMMAND = [
    "experiment=quickstart", "-m", "hydra/sweeper=optuna", "trainer=ddp_sim",
    "trainer.max_epochs=1", "optimizer.lr=tag(log,interval(1e-5,1e-1))",
    "task.label_smoothing=choice(0.0,0.1,2.0)",
]  # fmt: skip


@pytest.mark.slow
def test_a_search_survives_a_failing_trial_goes_on_and_finds_better(tmp_path):
    first = run_door("train", *COMMAND, "hydra.sweeper.num_trials=2", logs=tmp_path)
    again = run_door("train", *COMMAND, "hydra.sweeper.num_trials=5", logs=tmp_path)
    records = [
        json.loads(path.read_text()) for path in tmp_path.glob("train/multiruns/*/*/run.json")
    ]
    output = first.output + again.output
    told = re.findall(r"^trial (\d+): (.*) → (.*)$", output, re.MULTILINE)
    assert [int(number) for number, *_ in told] == list(range(len(told))), output
    assert [record["status"] for record in records] == ["finished"] * 5, (
        "what is refused leaves no folder"
    )
    assert {r["world_size"] for r in records} == {2}, output
    assert sum(value == "failed" for *_, value in told) == len(told) - 5 >= 1, output
    values = [float(value) for *_, value in told if value != "failed"]
    best = re.findall(r"best of (\d+) trials: (\S+) with optimizer.lr=", again.output)
    assert best == [(str(len(told)), f"{max(values):.6g}")] and max(values) > values[0], output


@pytest.mark.slow
def test_another_search_has_another_study_and_a_named_one_is_refused(tmp_path):
    words = ["-m", "hydra/sweeper=optuna", "experiment=quickstart", "trainer.max_epochs=1", "test=false",
             "hydra.sweeper.num_trials=1", "trainer.limit_train_batches=1"]  # fmt: skip
    one, other = "optimizer.lr=interval(1e-4,1e-1)", "optimizer.lr=interval(1e-4,1)"
    for search in (one, other):
        done = run_door("train", *words, search, logs=tmp_path)
        assert (
            done.code == 0
            and "0 trials so far" in done.output
            and "best of 1 trials" in done.output
        ), done.output
    assert len(list((tmp_path / "searches").glob("*.journal"))) == 2
    again = run_door("train", *words, one, logs=tmp_path)
    assert "1 trials so far" in again.output and "\ntrial" not in again.output
    named = "hydra.sweeper.study=night"
    assert run_door("train", *words, one, named, logs=tmp_path).code == 0
    for search in ([other], [one, "hydra.sweeper.direction=minimize"]):
        done = run_door("train", *words, *search, named, logs=tmp_path)
        assert done.code == 2 and "is another search" in done.output, done.output


def test_without_a_range_it_says_what_to_type_wherever_the_flag_stands(tmp_path):
    done = run_door("train", "experiment=quickstart", "hydra/sweeper=optuna", "-m", logs=tmp_path)
    assert done.code == 2 and "tag(log,interval(" in done.output and "Traceback" not in done.output


class Trial:
    def suggest_categorical(self, key, choices):
        return choices


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("a=choice(1.0,true,[1,2])", ["1.0", "True", "[1,2]"]),
        ("a=choice('x y',z)", ["x\\ y", "z"]),
        ("a=range(1,7,2)", ["1", "3", "5"]),
    ],
)
def test_values_are_given_as_hydra_reads_them(word, wanted):
    assert suggest(Trial(), OverridesParser.create().parse_override(word)) == wanted
