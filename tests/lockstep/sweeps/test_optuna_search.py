"""A search: one study over two starts, each trial a run of its own, a failing trial survived."""

import json
import math
import os
import re
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hydra_plugins import lockstep_sweeps
from lockstep.process.errors import UserError
from lockstep.records.record import RunRecord, write_record
from lockstep.records.trial import journal_storage
from lockstep.sweeps import jobs
from lockstep.sweeps.ranking import Job
from lockstep.sweeps.search import Search, suggest_value
from runs import run_script, start_script, succeed

COMMAND = [
    "experiment=quickstart", "-m", "hydra/sweeper=optuna", "trainer=ddp_sim",
    "trainer.max_epochs=1", "optimizer.lr=tag(log,interval(1e-5,1e-1))",
    "task.label_smoothing=choice(0.0,0.1,2.0)",
]  # fmt: skip


@pytest.mark.slow
def test_a_search_survives_a_failing_trial(tmp_path):
    first = run_script("train", *COMMAND, "hydra.sweeper.num_trials=2", logs=tmp_path)
    again = run_script("train", *COMMAND, "hydra.sweeper.num_trials=5", logs=tmp_path)
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
def test_another_search_has_another_study(tmp_path):
    words = ["-m", "hydra/sweeper=optuna", "experiment=quickstart", "trainer.max_epochs=1", "test=false",
             "hydra.sweeper.num_trials=1", "trainer.limit_train_batches=1"]  # fmt: skip
    one, other = "optimizer.lr=interval(1e-4,1e-1)", "optimizer.lr=interval(1e-4,1)"
    for search in (one, other):
        done = run_script("train", *words, search, logs=tmp_path)
        assert (
            done.code == 0
            and "0 trials so far" in done.output
            and "best of 1 trials" in done.output
        ), done.output
    assert len(list((tmp_path / "searches").glob("*.journal"))) == 2
    again = run_script("train", *words, one, logs=tmp_path)
    assert "1 trials so far" in again.output and "\ntrial" not in again.output
    named = "hydra.sweeper.study=night"
    assert run_script("train", *words, one, named, logs=tmp_path).code == 0
    for search in ([other], [one, "hydra.sweeper.direction=minimize"]):
        done = run_script("train", *words, *search, named, logs=tmp_path)
        assert done.code == 2 and "is another search" in done.output, done.output


def test_a_search_without_a_range_says_what_to_type(tmp_path):
    done = run_script("train", "experiment=quickstart", "hydra/sweeper=optuna", "-m", logs=tmp_path)
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
    assert suggest_value(Trial(), OverridesParser.create().parse_override(word)) == wanted


def test_a_search_tries_the_options_that_a_glob_matches(tmp_path, monkeypatch):
    jobs = []

    def launch(job_overrides, number):
        jobs.extend(job_overrides)
        return [SimpleNamespace(return_value=0.5)]

    plugins = SimpleNamespace(instantiate_launcher=lambda **_: SimpleNamespace(launch=launch))
    monkeypatch.setattr(lockstep_sweeps.Plugins, "instance", lambda: plugins)
    loader = SimpleNamespace(get_group_options=lambda *_, **__: ["alexnet", "vit"])
    sweep_node = {"sweeper": {"direction": "maximize"}, "sweep": {"dir": str(tmp_path / "sweep")}}
    config = OmegaConf.create({"optimized_metric": "val/acc", "hydra": sweep_node})
    sweeper = lockstep_sweeps.OptunaSearch(None, 1, "auto", str(tmp_path), seed=1)
    context = SimpleNamespace(config_loader=loader)
    sweeper.setup(hydra_context=context, task_function=None, config=config)
    sweeper.sweep(["model=glob(alex*)"])
    assert jobs[0][0] == "model=alexnet"


def search_in(
    folder, *, pruner=None, sweep="first", study=None, words=("optimizer.lr=interval(1e-4,1e-1)",)
):
    """Return a search of one range in a folder."""
    sweeper = {"sweeper": {"direction": "maximize"}, "sweep": {"dir": str(folder / sweep)}}
    config = OmegaConf.create({"optimized_metric": "val/acc", "hydra": sweeper})
    overrides = OverridesParser.create().parse_overrides(list(words))
    return Search(overrides, config, study, folder, seed=1, pruner=pruner)


def begin_run(search, number, **fields):
    folder = search.sweep_dir / f"{search.sweep_dir.name}_{number}"
    folder.mkdir(parents=True)
    write_record(folder / "run.json", RunRecord(**fields))


def test_a_folder_with_runs_of_another_search_is_refused(tmp_path):
    begin_run(search_in(tmp_path / "one", sweep="../night"), 0, status="finished")
    with pytest.raises(UserError, match="night_0, a run of another sweep"):
        search_in(tmp_path / "other", sweep="../night")


RANGE = "optimizer.lr=interval(1e-4,1e-1)"


def test_a_named_study_keeps_its_recipe(tmp_path):
    search_in(tmp_path, study="night", words=[RANGE, "trainer.max_epochs=2", "logbook=keep"])
    search_in(tmp_path, study="night", words=[RANGE, "trainer.max_epochs=2", "s3.uri=s3://b/p"])
    with pytest.raises(UserError, match=r"is another search \(trainer.max_epochs=2\)"):
        search_in(tmp_path, study="night", words=[RANGE, "trainer.max_epochs=30"])


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("a=tag(log,interval(0,0.1))", "begins above 0"),
        ("a=interval(0.1,0.01)", "the smaller end of the interval first"),
    ],
)
def test_a_range_that_cannot_be_searched_makes_no_study(word, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        search_in(tmp_path, words=[word])
    assert not list(tmp_path.glob("*.journal"))


def test_a_continued_search_reports_the_trials_of_its_earlier_starts(tmp_path):
    first = search_in(tmp_path, sweep="first")
    trial = first._choose_trial()
    first._build_overrides(trial)
    jobs._write_job(first.sweep_dir, Job(trial.number, 0, [], 0.75))
    first._end_trial(trial, 0.75)
    later = search_in(tmp_path, sweep="later")
    jobs._write_job(later.sweep_dir, Job(1, 0, [], 0.5))
    assert [job.value for job in jobs._read_jobs(later.sweep_dir)] == [0.75, 0.5]


def test_a_free_place_takes_the_next_trial_at_once(tmp_path):
    search = search_in(tmp_path)
    slow, started = Future(), []

    def start(overrides, number):
        started.append(number)
        if number == 0:
            return slow
        if number == 4:
            slow.set_result(SimpleNamespace(return_value=0.9))
        quick = Future()
        quick.set_result(SimpleNamespace(return_value=0.1 * number))
        return quick

    search.run(5, 2, start)
    assert started == [0, 1, 2, 3, 4] and search.study.best_value == 0.9


def test_a_stopped_trial_goes_on_in_its_folder(tmp_path):
    search = search_in(tmp_path)
    begin_run(search, 0, status="interrupted")
    commands = []

    def start(value):
        def start_job(overrides, number):
            commands.append(overrides)
            job = Future()
            job.set_result(SimpleNamespace(return_value=value))
            return job

        return start_job

    search.run(1, 1, start(math.nan))
    assert [trial.state.name for trial in search.study.trials] == ["RUNNING", "FAIL"]
    again = search_in(tmp_path, sweep="second")
    again.run(1, 1, start(0.5))
    assert [trial.state.name for trial in again.study.trials] == ["COMPLETE", "FAIL"]
    assert commands[-1] == commands[0] and "first/first_0'" in commands[-1][-1]


def test_pruned_trials_count_and_their_share_of_time_is_told(tmp_path, caplog):
    search = search_in(tmp_path, pruner="median")
    begin_run(search, 0, status="finished", fit_seconds=10.0)
    begin_run(search, 1, status="finished", fit_seconds=4.0, ended_by="pruned")
    values = [0.9, math.nan]

    def start(overrides, number):
        job = Future()
        job.set_result(SimpleNamespace(return_value=values[number]))
        return job

    with caplog.at_level("INFO"):
        search.run(2, 1, start)
        search.report()
    assert [trial.state.name for trial in search.study.trials] == ["COMPLETE", "PRUNED"]
    assert "1 trials finished, 1 were pruned: 70% of the training time" in caplog.text
    assert "No validation logs val/acc" in caplog.text


def test_a_pruned_trial_ends_on_all_ranks_and_is_marked(tmp_path):
    """Five trials of the study have finished better than any training can begin."""
    path = tmp_path / "searches" / "night.journal"
    path.parent.mkdir()
    study = optuna.create_study(
        storage=journal_storage(path), study_name="night", direction="maximize"
    )
    for _ in range(5):
        trial = study.ask()
        trial.report(1.0, 1)
        study.tell(trial, 1.0)
    done = succeed(
        "train", *COMMAND[:4], "optimizer.lr=tag(log,interval(1e-5,1e-4))", "trainer.max_epochs=3",
        "hydra.sweeper.study=night", "hydra.sweeper.num_trials=6", "hydra.sweeper.pruner=median",
        logs=tmp_path,
    )  # fmt: skip
    assert done.record["ended_by"] == "pruned" and done.record["status"] == "finished"
    assert done.record["world_size"] == 2 and done.record["epochs"] == 1
    assert len(list(done.folder.checkpoints.glob("last*.ckpt"))) == 1
    assert "pruner of its search" in done.folder.page.read_text()
    assert "trial=" not in done.record["command"]
    assert re.search(r"^ +pruned .* \S+_5$", done.output, re.MULTILINE), done.output


@pytest.mark.slow
def test_the_same_command_goes_on_after_ctrl_c(tmp_path):
    words = [*COMMAND[:3], "trainer=cpu", "trainer.max_epochs=60", "test=false",
             "optimizer.lr=interval(1e-3,1e-2)", "hydra.sweeper.num_trials=2"]  # fmt: skip
    first = start_script("train", *words, logs=tmp_path)
    first.wait_for(lambda: any(tmp_path.glob("train/multiruns/*/*/metrics.csv")))
    os.kill(first.process.pid, signal.SIGINT)
    stopped = first.done()
    assert stopped.code == 75 and "→ stopped" in stopped.output, stopped.output
    again = succeed("train", *words, logs=tmp_path)
    assert re.findall(r"^trial (\d+): .* → [01]", again.output, re.MULTILINE) == ["0", "1"]
    records = [
        json.loads(path.read_text()) for path in tmp_path.glob("train/multiruns/*/*/run.json")
    ]
    assert sorted(len(record["restarts"]) for record in records) == [0, 1]
