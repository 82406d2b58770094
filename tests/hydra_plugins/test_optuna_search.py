"""A search: one study over two starts, each trial a run of its own, a failing trial survived."""

import json
import re

from runs import run_door

COMMAND = [
    "-m", "hydra/sweeper=optuna", "hydra.sweeper.study=night", "experiment=quickstart", "trainer=ddp_sim",
    "trainer.max_epochs=1", "optimizer.lr=tag(log,interval(1e-5,1e-1))",
    "classifier.label_smoothing=choice(0.0,0.1,2.0)",
]  # fmt: skip


def test_a_search_survives_a_failing_trial_goes_on_and_finds_better(tmp_path):
    first = run_door("train", *COMMAND, "hydra.sweeper.num_trials=2", logs=tmp_path)
    again = run_door("train", *COMMAND, "hydra.sweeper.num_trials=5", logs=tmp_path)
    records = [json.loads(path.read_text()) for path in tmp_path.glob("train/multiruns/*/*/run.json")]
    output = first.output + again.output
    told = re.findall(r"^trial (\d+): (.*) → (.*)$", output, re.MULTILINE)
    assert [int(number) for number, *_ in told] == list(range(len(records))), output
    statuses = [record["status"] for record in records]
    assert statuses.count("finished") == 5 and {r["world_size"] for r in records} == {2}, output
    assert statuses.count("failed") == sum(value == "failed" for *_, value in told) >= 1, output
    values = [float(value) for *_, value in told if value != "failed"]
    best = re.findall(r"best of (\d+) trials: (\S+) with optimizer.lr=", again.output)
    assert best == [(str(len(records)), f"{max(values):.6g}")] and max(values) > values[0], output


def test_without_a_range_it_says_what_to_type(tmp_path):
    done = run_door("train", "-m", "hydra/sweeper=optuna", "experiment=quickstart", logs=tmp_path)
    assert "tag(log,interval(" in done.output
