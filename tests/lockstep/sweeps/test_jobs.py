"""Jobs of a sweep: how they are stopped, how many run side by side, and the ranking at the end."""

import argparse
import copy
import json
import logging
import math
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from example_runs import write_run
from hydra_plugins.lockstep_sweeps import LocalJobs
from lockstep.config.compose import compose, register_resolvers
from lockstep.process.errors import UserError
from lockstep.sweeps import jobs, local, stopping
from lockstep.sweeps.checks import choose_first_values, parse_sweep_overrides
from lockstep.sweeps.jobs import run_child
from lockstep.sweeps.ranking import Job, format_ranking, group_into_arms, is_minimized
from lockstep.sweeps.stopping import forward_stop_signals
from runs import run_script

SRC = Path(__file__).resolve().parents[3] / "src"


def job(words: str) -> list[str]:
    return [sys.executable, "-c", f"import os, pathlib, signal, sys, time\n{words}"]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="argparse checks no help before 3.14")
def test_argparse_has_the_check_that_hydra_fails():
    assert hasattr(argparse.ArgumentParser, "_check_help")


@pytest.fixture
def root_logger_restored():
    """Hydra's `--info` configures the root logger, and later tests read what is logged."""
    root = logging.getLogger()
    level = root.level
    handlers = root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def test_hydras_options_survive_a_check_of_their_help(monkeypatch, capsys, root_logger_restored):
    def refuse(parser, action):
        raise ValueError("badly formed help string")

    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", refuse, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    register_resolvers()
    jobs.run_hydra("train", lambda cfg: None, ["--info", "defaults"])
    assert "Defaults" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "times", "code"), [(2, 1, 75), (15, 1, 75), (1, 1, 75), (2, 2, 130)]
)
def test_a_stop_lets_the_job_save(tmp_path, number, times, code):
    saved, before = tmp_path / "saved", signal.getsignal(signal.SIGINT)
    words = (
        "for each in (1, 15): signal.signal(each, lambda *_: None)\n"
        f"for _ in range({times}): os.kill(os.getppid(), {number}); time.sleep(1)\n"
        f"pathlib.Path({str(saved)!r}).touch()"
    )
    with pytest.raises(SystemExit) as end, forward_stop_signals():
        run_child(job(words))
    assert end.value.code == code and saved.exists() == (code == 75)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_job_that_starts_as_the_sweep_stops_is_told(monkeypatch):
    monkeypatch.setattr(jobs, "stop_signals", [signal.SIGTERM])
    assert run_child(job("time.sleep(60)")) == -signal.SIGTERM
    assert not stopping.running_jobs


def test_a_job_at_its_limit_saves_before_it_is_requeued(tmp_path, monkeypatch):
    """SLURM with cgroups signals submitit's process alone, whose own handler would queue the job at
    once.
    """
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    saved, queued = tmp_path / "saved", []
    words = (
        "told = []; signal.signal(signal.SIGUSR1, lambda *_: told.append(1)); os.kill(os.getppid(), signal.SIGUSR1)\n"
        f"while not told: time.sleep(0.05)\ntime.sleep(0.5); pathlib.Path({str(saved)!r}).touch(); sys.exit(75)"
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: queued.append(saved.exists()))
    try:
        with forward_stop_signals():
            assert run_child(job(words)) == 75
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert queued == [True]


@pytest.mark.parametrize(("restarts", "words"), [("", []), ("2", ["resume=auto"])])
def test_a_job_that_slurm_queued_again_goes_on(tmp_path, monkeypatch, restarts, words):
    asked = []
    monkeypatch.setattr(
        jobs, "run_child", lambda command, environ, output: asked.extend([*command, environ]) or 0
    )
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    node: dict = {"sweep": {"dir": str(tmp_path / "night")}, "job": {"num": 3}}
    node["overrides"] = {"task": ["seed=1"], "hydra": []}
    config, own = OmegaConf.create({"optimized_metric": "val/acc"}), {"CUDA_VISIBLE_DEVICES": "3"}
    jobs.run_job(config, OmegaConf.create(node), "src/train.py", own)
    result = json.loads((tmp_path / "night" / jobs.RESULTS_FOLDER / "3-0").read_text())
    assert result["overrides"] == ["seed=1"], "a requeued job is no arm of its own"
    assert (
        asked.pop() == own
        and asked[1:3] == ["src/train.py", "seed=1"]
        and "run_id=night_3" in asked
    )
    assert [word for word in asked if word.startswith("resume=")] == words


@pytest.mark.parametrize(
    ("gpus", "visible", "trainer", "n_jobs", "expected"),
    [
        (0, None, {}, None, (1, [])),
        (4, None, {}, None, (4, ["0", "1", "2", "3"])),
        (2, "5,7", {}, None, (2, ["5", "7"])),
        (4, None, {"devices": 2}, None, (2, ["0,1", "2,3"])),
        (4, None, {"accelerator": "cpu"}, None, (1, [])),
        (
            2,
            None,
            {"devices": 1, "process_devices": None, "launch": "one_process"},
            None,
            (1, []),
        ),
        (4, None, {"devices": 2, "process_devices": 2}, None, (2, ["0,1", "2,3"])),
        (0, None, {}, 3, (3, [])),
    ],
)
def test_there_is_a_job_for_each_gpu(gpus, visible, trainer, n_jobs, expected, monkeypatch):
    monkeypatch.setattr(local, "count_visible_gpus", lambda environ: gpus)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launcher = LocalJobs(n_jobs)
    launcher.config = OmegaConf.create(
        {
            "trainer": {
                "accelerator": "auto",
                "devices": "auto",
                "launch": "process_per_device",
                **trainer,
            }
        }
    )
    assert launcher.plan_jobs() == expected


def test_jobs_side_by_side_know_how_many_they_are(monkeypatch, tmp_path):
    environs = []
    monkeypatch.setattr(jobs, "run_job", lambda *job: environs.append(job[3]))
    launcher = LocalJobs(4)
    launcher.config = compose("train", ["trainer=cpu"])
    launcher.config.hydra = {"sweep": {"dir": str(tmp_path)}, "job": {"num": 0}}
    launcher.loader = SimpleNamespace(load_sweep_config=lambda config, _: copy.deepcopy(config))
    launcher.launch([["seed=1"], ["seed=2"]], 0)
    assert [environ["LOCKSTEP_JOBS"] for environ in environs] == ["4", "4"]


@pytest.mark.slow
def test_jobs_side_by_side_have_folders_of_their_own(tmp_path):
    words = ["-m", "experiment=quickstart", "trainer.max_epochs=1", "seed=1,2", "test=false"]
    command = [
        sys.executable,
        "train.py",
        *words,
        "hydra.launcher.n_jobs=2",
        f"paths.log_dir={tmp_path}",
    ]
    both = [subprocess.Popen(command, cwd=SRC, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        said = process.communicate()[0]
        assert process.returncode == 0 and "val/acc, mean ± standard error:" in said, said
    sweeps = list(tmp_path.glob("train/multiruns/*"))
    assert len(sweeps) == 2
    for folder in sweeps:
        assert len(list(folder.glob("*/run.json"))) == 2
        assert all("finished" in path.read_text() for path in folder.glob("*.log"))


@pytest.mark.slow
def test_the_worst_exit_code_of_a_sweep_counts(tmp_path):
    words = [
        "experiment=quickstart",
        "trainer.max_epochs=1",
        "-m",
        "task.label_smoothing=0.0,2.0",
        "test=false",
    ]
    done = run_script("train", *words, logs=tmp_path)
    *_, last_of_ranking, page = done.output.rstrip().splitlines()
    assert done.code and last_of_ranking.startswith(f"  exit code {done.code}   task.label_smoo")
    assert page.startswith("page: ") and page.endswith("/page.md")


def folds(rate, values, first=0):
    words = ("experiment=kfold", f"optimizer.lr={rate}")
    return [
        Job(first + n, int(v != v), [*words, f"data.fold={n}"], v, v - 0.25, 0.5)
        for n, v in enumerate(values)
    ]


def test_errors_are_minimized_and_other_metrics_are_not():
    for metric in ("val/mae", "test/loss", "ece", "val/acc", "val/miou", "val/image"):
        config = OmegaConf.create(
            {"optimized_metric": metric, "callbacks": None, "hydra": {"sweeper": {}}}
        )
        assert is_minimized(config) is (metric in ("val/mae", "test/loss", "ece")), metric


def test_the_short_words_of_a_direction_count():
    config = {"optimized_metric": "val/acc", "hydra": {"sweeper": {"direction": "min"}}}
    assert is_minimized(OmegaConf.create(config))
    config["hydra"]["sweeper"]["direction"] = "max"
    assert not is_minimized(OmegaConf.create({**config, "optimized_metric": "val/loss"}))


def ranking_of(jobs, metric, *, minimize):
    arms = group_into_arms(jobs, Path("night"), metric, minimize=minimize)
    return format_ranking(jobs, arms, Path("night"))


def test_settings_and_folds_are_ranked_and_compared_by_fold():
    jobs = [*folds(0.1, [0.5, 0.75, 1.0]), *folds(0.2, [0.75, 0.75, 0.75], 3)]
    assert ranking_of(jobs, "val/acc", minimize=False)[2:] == [
        "  75.00%        optimizer.lr=0.1 data.fold=1  night_1",
        "  75.00%        optimizer.lr=0.2 data.fold=0  night_3",
        "  75.00%        optimizer.lr=0.2 data.fold=1  night_4",
        "  75.00%        optimizer.lr=0.2 data.fold=2  night_5",
        "  50.00%        optimizer.lr=0.1 data.fold=0  night_0",
        "val/acc, mean ± standard error:",
        "  75.00% ± 22.82% of 3 folds · deviation 25.00% · optimizer.lr=0.1",
        "  75.00% ± 0.00% of 3 folds · deviation 0.00% · optimizer.lr=0.2",
        "  optimizer.lr=0.2 against optimizer.lr=0.1: no difference larger than 100 points can be "
        "told from these 3 folds, which share training images: with Nadeau and Bengio's correction",
        "best: optimizer.lr=0.1 · test/acc 50.00% ± 22.82% · 2 settings were tried on the same "
        "validation images",
    ]


def test_failed_jobs_are_last_and_the_lowest_may_be_first():
    jobs = [*folds(0.1, [0.5, float("nan"), 1.0]), *folds(0.2, [0.75], 3)]
    lines = ranking_of(jobs, "val/loss", minimize=True)
    assert lines[0] == "4 jobs by val/loss, the lowest first:"
    assert lines[1].startswith("  0.5 ")
    assert lines[4] == "  exit code 1   optimizer.lr=0.1 data.fold=1  night_1"
    assert lines[8].endswith("1 fold gives no interval, which takes 3 or more")


def test_a_stopped_sweep_reports_the_jobs_that_have_ended(tmp_path, monkeypatch):
    sweep = tmp_path / "night"

    def stop(*_):
        ended = {"number": 0, "code": 0, "overrides": ["seed=1"], "value": 0.5}
        (sweep / jobs.RESULTS_FOLDER).mkdir(parents=True)
        (sweep / jobs.RESULTS_FOLDER / "0-0").write_text(json.dumps(ended))
        raise SystemExit(75)

    monkeypatch.setattr(jobs, "run_hydra", stop)
    with pytest.raises(SystemExit):
        jobs.run_sweep("train", ["experiment=quickstart", "seed=1,2", f"hydra.sweep.dir={sweep}"])
    assert json.loads((sweep / "sweep.json").read_text())["jobs"][0]["value"] == 0.5


@pytest.mark.parametrize(("number", "code"), [(0, 1), (1, 0)])
def test_a_continued_search_ends_by_its_new_jobs(tmp_path, monkeypatch, number, code):
    sweep = tmp_path / "night"
    jobs._write_job(sweep, Job(0, 1, [], math.nan))
    monkeypatch.setattr(
        jobs, "run_hydra", lambda *_: jobs._write_job(sweep, Job(number, code, [], 0.5))
    )
    words = ["optimizer.lr=interval(0.1,1)", "hydra/sweeper=optuna", f"hydra.sweep.dir={sweep}"]
    assert jobs.run_sweep("train", ["experiment=quickstart", *words]) == code


def test_a_job_is_read_as_it_was_written(tmp_path):
    job = Job(1, 3, ["seed=1"], 0.5, 0.25)
    jobs._write_job(tmp_path, job)
    assert jobs._read_jobs(tmp_path) == [job]


def test_seeds_alone_have_a_mean_first_and_stay_in_order():
    jobs = [Job(n, 0, [f"seed={n}"], value) for n, value in enumerate((0.5, 1.0, 0.75))]
    assert ranking_of(jobs, "val/acc", minimize=False) == [
        "val/acc, mean ± standard error:",
        "  75.00% ± 14.43% of 3 runs · deviation 25.00%",
        "3 jobs:",
        "  50.00%        seed=0  night_0",
        "  100.00%       seed=1  night_1",
        "  75.00%        seed=2  night_2",
    ]


def test_the_winner_of_settings_has_its_test_metric():
    jobs = [Job(n, 0, [f"optimizer.lr={n}"], 0.5 + n / 4, 0.25) for n in range(2)]
    lines = ranking_of(jobs, "val/acc", minimize=False)
    assert lines[-1] == (
        "best: optimizer.lr=1 · test/acc 25.00% · 2 settings were tried on the same validation "
        "images"
    )


@pytest.mark.parametrize("value", ["small_cnn,nosuch", "choice(small_cnn,nosuch)"])
def test_a_misspelt_option_is_refused_before_the_first_job(tmp_path, value):
    done = run_script("train", "-m", f"model={value}", logs=tmp_path)
    assert done.code == 2 and "There is no model=nosuch: any model of timm" in done.output
    assert "job 0" not in done.output


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["trainer.max_epochs=1,0"], "trainer.max_epochs=0: give a whole number"),
        (["optimizer.lr=0.1,high"], "optimizer.lr='high': give a number"),
        (["seed=1,2", "optimizer.lrr=0.1,0.2"], "optimizer.lr"),
        (["seed=1,-3"], "seed=-3: give a whole number"),
        (["data=digits,image_folder", "data.root=nowhere"], "data.root"),
        (["seed=1,2", "hydra/sweeper=paired"], "needs against=baseline"),
        (["seed=1,2", "hydra/sweeper=optuna", "hydra.sweeper.direction=up"], "maximize"),
    ],
)
def test_an_impossible_job_is_refused_before_the_first_one(
    overrides, sentence, monkeypatch, tmp_path
):
    monkeypatch.setattr(jobs, "run_hydra", lambda *_: pytest.fail("a job has started"))
    with pytest.raises(UserError, match=sentence):
        jobs.run_sweep("train", ["experiment=quickstart", *overrides])


def test_a_folder_with_another_sweep_is_refused(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(jobs, "run_hydra", lambda *_: begun.append(1))
    write_run(tmp_path / "night", "night_0")
    words = ["experiment=quickstart", "seed=1,2", f"hydra.sweep.dir={tmp_path}/night"]
    with pytest.raises(UserError, match="holds runs of another sweep, as night_0"):
        jobs.run_sweep("train", words)
    assert not begun
    assert jobs.run_sweep("train", [*words, "resume=auto"]) == 0 and begun


def launcher_in(folder, gpus=0):
    """Return a launcher of jobs that do not start."""
    launcher = LocalJobs()
    trainer = {"accelerator": "auto", "devices": "auto", "launch": "process_per_device"}
    launcher.config = OmegaConf.create(
        {"trainer": trainer, "hydra": {"sweep": {"dir": str(folder)}}}
    )
    launcher.loader = SimpleNamespace(load_sweep_config=lambda *_: OmegaConf.create({}))
    return launcher


def write_job(folder, number, *overrides):
    run = write_run(folder, f"{folder.name}_{number}")
    (run / "config.yaml").write_text(OmegaConf.to_yaml({"overrides": list(overrides)}))


def test_more_seeds_do_not_take_the_runs_of_other_jobs(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(local.sweep_jobs, "run_job", lambda cfg, *_: started.append(cfg))
    monkeypatch.setattr(
        LocalJobs,
        "_compose_job",
        lambda _, words, number: OmegaConf.create({"hydra": {"job": {"num": number}}}),
    )
    folder = tmp_path / "lr"
    write_job(folder, 0, "optimizer.lr=0.1", "seed=1", "run_id=lr_0")
    write_job(folder, 1, "optimizer.lr=0.2", "seed=1", "run_id=lr_1", "trainer.max_epochs=2")
    same = [["optimizer.lr=0.1", "seed=1", "resume=auto"], ["optimizer.lr=0.2", "seed=1"]]
    launcher_in(folder).launch(same, 0)
    assert len(started) == 2
    more = [["optimizer.lr=0.1", "seed=1"], ["optimizer.lr=0.1", "seed=2"]]
    with pytest.raises(SystemExit) as ended:
        launcher_in(folder).launch(more, 0)
    said = capsys.readouterr()
    assert ended.value.code == 2 and len(started) == 2, "no job has started"
    assert "lr_1 is the run of another job (optimizer.lr=0.2 seed=1)" in said.out + said.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("trainer.devices=1", "trainer.devices=2"), (1, [])),
        (("experiment=a", "experiment=b"), (1, [])),
        (("seed=1", "seed=2"), (4, ["0", "1", "2", "3"])),
    ],
)
def test_jobs_of_other_trainers_see_all_gpus(words, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "count_visible_gpus", lambda environ: 4)
    planned = []
    launcher = launcher_in(tmp_path)

    @contextmanager
    def starter():
        planned.append(launcher.plan_jobs())
        yield lambda *_: SimpleNamespace(result=lambda: None)

    monkeypatch.setattr(launcher, "job_starter", starter)
    launcher.launch([[word] for word in words], 0)
    assert planned == [expected]


def test_a_setting_and_seed_that_occur_twice_count_once():
    """A search suggests combinations again, and on a CPU they are equal to the bit."""
    values = {("0.1", 1): 0.5, ("0.1", 2): 0.6, ("0.2", 1): 0.7, ("0.2", 2): 0.75}
    tried = [*values, ("0.2", 1), ("0.2", 2), ("0.1", 1)]
    jobs_of_search = [
        Job(number, 0, [f"optimizer.lr={rate}", f"seed={seed}"], values[rate, seed])
        for number, (rate, seed) in enumerate(tried)
    ]
    arms = group_into_arms(jobs_of_search, Path("s"), "val/acc", minimize=False)
    assert [len(arm.runs) for arm in arms.ranked] == [2, 2]
    (comparison,) = arms.comparisons
    assert comparison.differences.values == pytest.approx([20.0, 15.0])
    assert "by 2 of" not in arms.winner_lines()[0]


def test_a_fold_that_all_jobs_share_is_no_repeat():
    def ratio(*overrides):
        jobs_of_sweep = [
            Job(number, 0, [*words.split()], 0.5, fold_ratio=0.25)
            for number, words in enumerate(overrides)
        ]
        return group_into_arms(jobs_of_sweep, Path("s"), "val/acc", minimize=False).runs[0]

    assert ratio("data.fold=0 seed=1", "data.fold=0 seed=2").fold_ratio == 0.0
    assert ratio("data.fold=0 seed=1", "data.fold=1 seed=1").fold_ratio == 0.25


@pytest.mark.parametrize(
    "typed",
    [
        "s3.uri=s3://bucket/runs",
        r"s3.uri=s3://bucket/a\b",
        "paths.data_dir=/data/two words",
        r"paths.data_dir=\\host\share",
        "paths.data_dir='/data/it is'",
    ],
)
def test_a_job_gets_a_text_as_it_was_typed(typed, monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "refuse_impossible_jobs", lambda *_: None)
    commands = []

    def keep(command, environ, output):
        commands.append(command)
        return 1

    monkeypatch.setattr(jobs, "run_child", keep)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    words = ["experiment=quickstart", "seed=1,2", f"hydra.sweep.dir={tmp_path}/night"]
    jobs.run_sweep("train", [*words, typed])
    group, _, key = typed.partition("=")[0].partition(".")
    single = compose("train", [typed])[group][key]
    assert len(commands) == 2
    for command in commands:
        [word] = [word for word in command if word.startswith(f"{group}.{key}=")]
        assert compose("train", [word])[group][key] == single


PLAIN_JOB = (
    "data._target_=plain_task.NoisyNumbers",
    "+data.num_workers=0",
    "trainer=cpu",
    "trainer.max_epochs=1",
    "trainer.limit_val_batches=3",
)


def test_a_sweep_takes_arguments_that_no_yaml_lists(tmp_path):
    done = run_script(
        "train",
        "-m",
        "task._target_=plain_task.Regression",
        "task.monitor=val_loss",
        "task.mode=min",
        *PLAIN_JOB,
        "seed=1,2",
        logs=tmp_path,
    )
    assert done.code == 0, done.output
    assert "val_loss, mean ± standard error:" in done.output and "of 2 runs" in done.output


@pytest.mark.slow
def test_a_sweep_without_validation_names_no_foreign_metric(tmp_path):
    words = ("-m", "task._target_=plain_task.TrainsAlone", *PLAIN_JOB, "+task.lr=0.01,0.1")
    done = run_script("train", *words, logs=tmp_path)
    assert done.code == 0 and "by val/acc" not in done.output, done.output
    assert "2 jobs, of which none logs val/acc:" in done.output and "  finished  " in done.output
    assert "optimized_metric= takes what it logs: fit_error" in done.output

    done = run_script("train", *words, "optimized_metric=fit_error", logs=tmp_path / "own")
    assert "2 jobs by fit_error, the lowest first:" in done.output, done.output


def test_a_glob_sweeps_over_options_of_all_folders(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "alexander.yaml").write_text("{}\n")
    words = [f"hydra.searchpath=[file://{tmp_path}]", "model=glob(alex*)"]
    glob = parse_sweep_overrides(words)[1]
    assert list(glob.sweep_string_iterator()) == ["alexander", "alexnet", "alexnet_bn"]
    assert choose_first_values(words)[1] == "model=alexander"
