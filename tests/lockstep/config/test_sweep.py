"""A sweep's jobs tell how they ended through files, and a requeued SLURM job goes on."""

import signal
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from lockstep.config import sweep
from lockstep.config.sweep import CODES, ExitCodes, Job, means, not_started, ranking, run_job


@pytest.fixture
def config(tmp_path):
    hydra = {"sweep": {"dir": str(tmp_path / "night")}, "job": {"num": 3}, "overrides": {"task": ["seed=1"]}}
    return OmegaConf.create({"hydra": hydra, "optimized_metric": "val/acc"})


def test_the_worst_code_counts_and_an_earlier_sweep_in_the_folder_does_not(config, tmp_path, monkeypatch):
    monkeypatch.setattr(ExitCodes, "worst", 0)
    codes = tmp_path / "night" / CODES
    codes.mkdir(parents=True)
    (codes / "9-0").write_text("75")
    end = ExitCodes()
    end.on_multirun_start(config)
    for ended in (0, 2, 1):
        monkeypatch.setattr(sweep, "run_child", lambda command, ended=ended: ended)
        run_job(config, "src/train.py")
        config.hydra.job.num += 1
    end.on_multirun_end(config)
    assert ExitCodes.worst == 2


@pytest.mark.parametrize(("restarts", "words"), [("", []), ("2", ["resume=auto"])])
def test_a_job_that_slurm_queued_again_goes_on(config, monkeypatch, restarts, words):
    asked = SimpleNamespace(command=[])
    monkeypatch.setattr(sweep, "run_child", lambda command: asked.__setattr__("command", command) or 0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    run_job(config, "src/train.py")
    assert asked.command[1:3] == ["src/train.py", "seed=1"]
    assert [word for word in asked.command if word.startswith("resume=")] == words
    assert "run_id=night_3" in asked.command


def test_a_job_of_submitit_hands_in_its_code_all_the_same(monkeypatch):
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    job = "import os, signal, sys; signal.signal(15, signal.SIG_IGN); os.kill(os.getppid(), 2); sys.exit(75)"
    assert sweep.run_child([sys.executable, "-c", job]) == 75


def test_a_job_at_its_limit_saves_before_submitit_queues_it_again(tmp_path, monkeypatch):
    """SLURM with cgroups signals submitit's process alone, whose own handler would queue the job at once."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    saved, queued = tmp_path / "saved", []
    job = (
        "import os, pathlib, signal, sys, time; told = []; signal.signal(signal.SIGUSR1, lambda *_: told.append(1)); "
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        f"while not told: time.sleep(0.05)\ntime.sleep(0.5); pathlib.Path({str(saved)!r}).touch(); sys.exit(75)"
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: queued.append(saved.exists()))
    try:
        assert sweep.run_child([sys.executable, "-c", job]) == 75
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert queued == [True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_asked_to_stop_lets_its_job_save(tmp_path, monkeypatch, number):
    """Python's own subprocess.run kills the child a quarter of a second after a Ctrl-C."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    saved, before = tmp_path / "saved", signal.getsignal(signal.SIGINT)
    job = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, lambda *_: None); "
        f"signal.signal(signal.SIGINT, signal.SIG_IGN); os.kill(os.getppid(), {int(number)}); time.sleep(1.5); "
        f"pathlib.Path({str(saved)!r}).touch()"
    )
    with pytest.raises(SystemExit) as end:
        sweep.run_child([sys.executable, "-c", job])
    assert end.value.code == 75 and saved.exists()
    assert signal.getsignal(signal.SIGINT) == before


def stop_now(_):
    raise SystemExit(75)


@pytest.mark.parametrize(
    ("number", "own", "said"),
    [
        (
            0,
            ["optimizer.lr=0.1", "loss=bce"],
            "3 of 4 jobs were not started: optimizer.lr=0.1 loss=focal; optim",
        ),
        (2, ["optimizer.lr=0.2", "loss=bce"], "1 of 4 jobs was not started: optimizer.lr=0.2 loss=focal\n"),
        (3, ["optimizer.lr=0.2", "loss=focal"], ""),
        (0, ["optimizer.lr=0.2", "loss=bce"], ""),  # shuffled: not the job that was foreseen
    ],
)
def test_a_stopped_sweep_says_which_jobs_it_did_not_start(config, monkeypatch, capsys, number, own, said):
    """As configs that Hydra hands to its callbacks and to a job."""
    monkeypatch.setattr(ExitCodes, "jobs", [])
    monkeypatch.setattr(sweep, "run_child", stop_now)
    config.hydra.sweeper = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper", "params": None}
    config.hydra.overrides.task = ["seed=1", "optimizer.lr=0.1,0.2", "loss=glob([b*,f*])"]
    ExitCodes().on_multirun_start(config)
    config.hydra.job.num, config.hydra.overrides.task = number, ["seed=1", *own]
    with pytest.raises(SystemExit) as end:
        run_job(config, "src/train.py")
    lines = capsys.readouterr().out.partition(own[-1] + "\n")[2]
    assert end.value.code == 75 and lines.startswith(said) and bool(lines) == bool(said)


def test_jobs_that_a_sweeper_of_another_kind_will_find_are_not_foreseen(config, monkeypatch, capsys):
    monkeypatch.setattr(ExitCodes, "jobs", [])
    monkeypatch.setattr(sweep, "run_child", stop_now)
    config.hydra.sweeper = {"_target_": "hydra_plugins.optuna_search.OptunaSearch"}
    ExitCodes().on_multirun_start(config)
    with pytest.raises(SystemExit):
        run_job(config, "src/train.py")
    assert capsys.readouterr().out == "\njob 3: seed=1\n"


def test_of_many_jobs_that_were_not_started_ten_are_named():
    said = not_started([[f"seed={number}"] for number in range(14)], 1, ["seed=1"])
    assert said.startswith("12 of 14 jobs were not started: seed=2; ") and said.endswith("; seed=11; … and 2 more")


def test_a_sweep_ends_with_its_ranking_failed_jobs_last():
    jobs = [
        Job(0, 0, ("data=mnist", "seed=1"), 0.5),
        Job(1, 1, ("data=mnist", "seed=2"), float("nan")),
        Job(2, 0, ("data=mnist", "seed=3"), 0.75),
    ]
    assert ranking(jobs, "night", "val/acc", minimize=False) == [
        "3 jobs by val/acc:",
        "  75.00%        seed=3  night_2",
        "  50.00%        seed=1  night_0",
        "  exit code 1   seed=2  night_1",
    ]
    lowest = ranking(jobs, "night", "val/loss", minimize=True)
    assert lowest[0] == "3 jobs by val/loss, the lowest first:" and lowest[1] == "  0.5           seed=1  night_0"


def folds(rate, values, code=0):
    words = ("experiment=kfold", f"optimizer.lr={rate}")
    return [Job(n, code, (*words, f"data.fold={n}"), v, v - 0.25) for n, v in enumerate(values)]


def test_folds_and_seeds_of_one_configuration_are_averaged():
    jobs = [*folds(0.1, [0.5, 0.75, 1.0]), *folds(0.2, [0.5, 0.5])]
    assert means(jobs, "val/acc") == [
        "mean ± standard deviation over folds and seeds:",
        "  val/acc 75.00% ± 25.00% · test/acc 50.00% ± 25.00% · 3 jobs · optimizer.lr=0.1",
        "  val/acc 50.00% ± 0.00% · test/acc 25.00% ± 0.00% · 2 jobs · optimizer.lr=0.2",
    ]
    assert means([Job(0, 0, ("optimizer.lr=1",), 0.5), Job(1, 0, ("optimizer.lr=2",), 0.7)], "val/acc") == []
    failed = [*folds(0.1, [0.5, float("nan")]), *folds(0.2, [0.5, 1.0])]
    assert len(means(failed, "val/acc")) == 2, "of five folds four are no mean of five"


def test_a_long_ranking_is_cut():
    jobs = [Job(number, 0, (f"seed={number}",), float(number)) for number in range(14)]
    lines = ranking(jobs, "night", "val/acc", minimize=False)
    assert len(lines) == 12 and lines[1].endswith("seed=13  night_13") and lines[-1] == "  … and 4 more"


def test_the_ranking_is_said_at_the_end(config, monkeypatch, capsys):
    ExitCodes().on_multirun_start(config)
    for code in (0, 2):
        monkeypatch.setattr(sweep, "run_child", lambda command, code=code: code)
        monkeypatch.setattr(sweep, "_metric", lambda folder, name: 0.25)
        config.hydra.overrides.task = [f"seed={code}"]
        run_job(config, "src/train.py")
        config.hydra.job.num += 1
    ExitCodes().on_multirun_end(config)
    said = capsys.readouterr().out
    assert said.splitlines()[-3:] == [
        "2 jobs by val/acc:", "  25.00%        seed=0  night_3", "  exit code 2   seed=2  night_4"
    ]  # fmt: skip
