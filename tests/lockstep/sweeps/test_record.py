"""sweep.json and the page of a sweep: in its folder, in the logbook, and of a whole sweep."""

import json
from itertools import zip_longest

import pytest

from example_runs import write_run
from lockstep.logbook.folders import NOTE_MARKS
from lockstep.logbook.sweep_page import numeric_keys, read_sweep, write_sweep_page
from lockstep.process.errors import UserError
from lockstep.sweeps.ranking import Job, group_into_arms
from lockstep.sweeps.record import write_sweep
from logbook import main
from runs import succeed

VALUES = {"0.1": (0.90, 0.91, 0.92), "0.2": (0.93, 0.945, 0.95)}


def example_jobs():
    jobs = []
    for rate, values in VALUES.items():
        for seed, value in enumerate(values, 1):
            overrides = ["data=digits", f"optimizer.lr={rate}", f"seed={seed}"]
            jobs.append(Job(len(jobs), 0, overrides, value, value - 0.1))
    jobs.append(Job(6, 2, ["data=digits", "optimizer.lr=0.2", "seed=4"], float("nan")))
    return jobs


@pytest.fixture
def sweep(tmp_path):
    """The folder of an invented sweep of two rates and three seeds."""
    folder = tmp_path / "logs" / "train" / "multiruns" / "night"
    jobs = example_jobs()
    for job in jobs[:-1]:
        run_id = f"night_{job.number}"
        write_run(folder, run_id, uuid=run_id, num_train=900, metrics={"val/acc": job.value})
    arms = group_into_arms(jobs, folder, "val/acc", minimize=False)
    write_sweep(folder, "python src/train.py -m <b>", jobs, arms)
    return folder


def test_the_record_has_jobs_arms_and_comparisons(sweep):
    record = json.loads((sweep / "sweep.json").read_text())
    job = record["jobs"][4]
    assert job["run_id"] == "night_4" and job["overrides"][1:] == ["optimizer.lr=0.2", "seed=2"]
    assert job["uuid"] == "night_4"
    assert job["metrics"] == {"val/acc": 0.945} and job["num_train"] == 900
    assert [job["status"] for job in record["jobs"]] == ["finished"] * 6 + ["refused"]
    assert record["jobs"][6]["value"] is None and record["jobs"][6]["exit_code"] == 2
    assert [arm["arm"] for arm in record["arms"]] == ["optimizer.lr=0.2", "optimizer.lr=0.1"]
    assert record["arms"][0]["mean"] == pytest.approx(0.941667, abs=1e-6)
    comparison = record["comparisons"][0]
    assert comparison["count"] == 3 and comparison["mean"] == pytest.approx(3.1667, abs=1e-4)
    assert comparison["sentence"] == "better by 3.17 ± 0.72 points (95 %, 3 pairs)"


def test_the_page_has_arms_sentence_winner_and_ranking(sweep):
    page = (sweep / "page.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "| `optimizer.lr=0.2` | 3 | 94.17 % | 0.60 % | 1.04 % |" in page
    assert "**better by 3.17 ± 0.72 points (95 %, 3 pairs)**" in page
    assert "test/acc 84.17% ± 0.60% · 2 settings were tried on the same validation" in page
    assert page.count("84.17%") == 1 and "81.00%" not in page
    jobs = [line for line in page.splitlines() if line.startswith(("| [night_", "| night_"))]
    assert (
        jobs[0].startswith("| [night_5](night_5/page.md)") is (sweep / "night_5/page.md").exists()
    )
    assert "night_5" in jobs[0] and "night_0" in jobs[5] and "refused, exit code 2" in jobs[6]
    assert "optimizer.lr" in (sweep / "arms.svg").read_text()


def test_a_sweep_of_two_versions_of_the_code_says_so(sweep):
    said = "Not held fixed between these runs: the code."
    assert said not in (sweep / "page.md").read_text()
    path = sweep / "night_5" / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"code": {"tree_hash": "other"}}))
    jobs = example_jobs()
    arms = group_into_arms(jobs, sweep, "val/acc", minimize=False)
    write_sweep(sweep, "python src/train.py -m", jobs, arms)
    assert json.loads((sweep / "sweep.json").read_text())["caution"] == said
    assert f"**{said}**" in (sweep / "page.md").read_text()


def test_a_trial_that_went_on_keeps_its_run(tmp_path):
    first = tmp_path / "first" / "first_0"
    write_run(first.parent, "first_0", num_train=900, metrics={"val/acc": 0.5})
    (first / "page.md").write_text("")
    jobs = [Job(0, 0, ["optimizer.lr=0.1"], 0.5, folder=str(first)), Job(1, 1, [], float("nan"))]
    second = tmp_path / "second"
    second.mkdir()
    write_sweep(second, "", jobs, group_into_arms(jobs, second, "val/acc", minimize=False))
    record = json.loads((second / "sweep.json").read_text())
    shown = [(job["run_id"], job["status"], job["num_train"]) for job in record["jobs"]]
    assert shown == [("first_0", "finished", 900), ("second_1", "refused", None)]
    assert "[first_0](../first/first_0/page.md)" in (second / "page.md").read_text()


def test_arms_of_other_image_sizes_are_drawn(tmp_path):
    jobs = []
    for number, size in enumerate((8, 8, 16, 16)):
        overrides = [f"data.image_size={size}", f"seed={number % 2}"]
        jobs.append(Job(number, 0, overrides, 0.5 + number / 10))
    write_sweep(tmp_path, "", jobs, group_into_arms(jobs, tmp_path, "val/acc", minimize=False))
    assert "data.image_size=16" in (tmp_path / "arms.svg").read_text()


def test_words_of_the_user_stay_on_the_page(sweep):
    page = sweep / "page.md"
    text = (
        page.read_text()
        .replace("# night", "# The rate")
        .replace(NOTE_MARKS[1], f"mine\n{NOTE_MARKS[1]}")
    )
    page.write_text(text)
    write_sweep_page(sweep)
    assert page.read_text().startswith("# The rate\n") and "\nmine\n" in page.read_text()


def test_seeds_alone_have_their_mean_and_no_ranking(tmp_path):
    jobs = [Job(n, 0, [f"seed={n}"], value, 0.5) for n, value in enumerate((0.8, 0.9, 0.85))]
    folder = tmp_path / "s"
    write_sweep(folder, "", jobs, group_into_arms(jobs, folder, "val/acc", minimize=False))
    page = (folder / "page.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "| 3 | 85.00 % | 2.89 % | 5.00 % |" in page and "best" not in page.split("## Mean")[1]
    assert page.index("s_0") < page.index("s_1") < page.index("s_2")


def test_the_logbook_keeps_builds_lists_and_removes_a_sweep(sweep, tmp_path, capsys):
    places = ["--logbook", str(tmp_path / "logbook"), "--logs", str(tmp_path / "logs")]
    kept = tmp_path / "logbook" / "night"
    assert main([*places, "keep", "night", "night_3"]) == 0
    assert (tmp_path / "logbook" / "night_3" / "page.md").exists()
    assert "(../night_3/page.md)" in (kept / "page.md").read_text()
    index = (tmp_path / "logbook" / "README.md").read_text()
    assert "- **[night](night/page.md)** optimizer.lr=0.2: better by 3.17" in index
    words = (
        (kept / "page.md")
        .read_text()
        .replace(NOTE_MARKS[1], f"Yes: [it](a.md) is. More.\n{NOTE_MARKS[1]}")
    )
    (kept / "page.md").write_text(words)
    assert main([*places, "build"]) == 0
    index = (tmp_path / "logbook" / "README.md").read_text()
    assert "- **[night](night/page.md)** Yes: [it](night/a.md) is.\n" in index
    (kept / "page.md").unlink()
    assert main([*places, "build"]) == 0 and (kept / "arms.svg").exists()
    assert (kept / "page.md").exists()
    (kept / "sweep.json").write_text("{}")
    assert main([*places, "build"]) == 0 and "not the record of a sweep" in capsys.readouterr().out
    assert main([*places, "remove", "night"]) == 0 and not kept.exists()


def test_a_kept_sweep_is_not_replaced_by_another(sweep, tmp_path, capsys):
    places = ["--logbook", str(tmp_path / "logbook"), "--logs", str(tmp_path / "logs")]

    def set_uuids(*uuids):
        record = json.loads((sweep / "sweep.json").read_text())
        for job, uuid in zip_longest(record["jobs"], uuids):
            job["uuid"] = uuid
        (sweep / "sweep.json").write_text(json.dumps(record))

    set_uuids("a", "b")
    assert main([*places, "keep", "night"]) == 0
    # A sweep that goes on keeps its jobs and gets more.
    set_uuids("a", "b", "c")
    assert main([*places, "keep", "night"]) == 0
    set_uuids("d", "e", "f")
    assert main([*places, "keep", "night"]) == 2
    assert "another sweep of this name" in capsys.readouterr().err
    kept = json.loads((tmp_path / "logbook/night/sweep.json").read_text())
    assert kept["jobs"][2]["uuid"] == "c"


def test_a_torn_record_is_refused(tmp_path):
    (tmp_path / "sweep.json").write_text('{"schema_version": 1, "jobs": [{}]}')
    with pytest.raises(UserError, match="not the record of a sweep"):
        read_sweep(tmp_path)


def test_keys_that_all_arms_set_to_numbers_are_drawn():
    jobs = [
        {"run_id": "a", "arm": "lr=1e-3 model=vit dropout=0"},
        {"run_id": "b", "arm": "lr=1 model=mlp"},
    ]
    assert numeric_keys({"jobs": jobs}) == {"lr": {"a": 0.001, "b": 1.0}}


@pytest.mark.slow
def test_the_runs_of_a_pair_share_weights_order_and_draws(tmp_path):
    digest = "lockstep.callbacks.step_digest.StepDigest"
    succeed(
        "train",
        "-m",
        "experiment=quickstart",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=2",
        "seed=1,2",
        "against=baseline",
        "task.label_smoothing=0.3",
        f"+callbacks.digest={{_target_:{digest},folder:'${{run:folder}}'}}",
        f"hydra.sweep.dir={tmp_path}/train/multiruns/s",
        logs=tmp_path,
    )
    sweep = tmp_path / "train" / "multiruns" / "s"
    record = json.loads((sweep / "sweep.json").read_text())
    assert [(job["arm"], job["repeat"]) for job in record["jobs"]] == [
        ("baseline", "seed=1"),
        ("baseline", "seed=2"),
        ("task.label_smoothing=0.3", "seed=1"),
        ("task.label_smoothing=0.3", "seed=2"),
    ]
    assert "2 pairs give no interval" in record["comparisons"][0]["sentence"]

    starts = []
    images = []
    losses = []
    for number in range(4):
        text = (sweep / f"s_{number}" / "steps-rank0.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        starts.append(next(row["weights"] for row in rows if row["kind"] == "start"))
        images.append([row["images"] for row in rows if row["kind"] == "step"])
        losses.append([row["loss"] for row in rows if row["kind"] == "step"])
    assert starts[0] == starts[2] and starts[1] == starts[3] and starts[0] != starts[1]
    assert images[0] == images[2] and images[1] == images[3] and images[0] != images[1]
    assert losses[0] != losses[2]
