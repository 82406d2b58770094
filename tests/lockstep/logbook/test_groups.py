"""Groups of runs beside each other: chosen by a value or by their ids, and paired by seed."""

import pytest

from example_runs import write_run
from lockstep.logbook.folders import read_run
from lockstep.logbook.groups import make_arms, select_runs, shorten_names
from logbook import main

VALUES = {"none": (0.90, 0.91, 0.92), "trivial": (0.93, 0.945, 0.95)}


@pytest.fixture
def compare(tmp_path):
    """Calls compare on six runs; returns the exit code."""
    for augmentation, values in VALUES.items():
        for seed, value in enumerate(values, 1):
            folder = write_run(
                tmp_path / "logs" / "train" / "runs",
                f"{augmentation}-{seed}",
                seed=seed,
                metrics={"val/acc": 0.5, "val/acc_best": value, "test/acc": value - 0.1},
                tags=["night", augmentation],
            )
            (folder / "config.yaml").write_text(
                f"seed: {seed}\ndata: {{seed: {seed}}}\noptimizer: {{lr: 0.0005}}\n"
                f"choices: {{augmentation: {augmentation}}}\n"
            )
    places = ["--logbook", str(tmp_path / "logbook"), "--logs", str(tmp_path / "logs")]
    return lambda *words: main([*places, "compare", *map(str, words)])


@pytest.mark.parametrize(
    "groups",
    [
        ("augmentation=none", "augmentation=trivial"),
        ("tags=none", "tags=trivial,optimizer.lr=5e-4"),
        ("none-1,none-2,none-3", "trivial-3,trivial-2,trivial-1"),
    ],
)
def test_groups_are_compared_by_pairs_of_seeds(compare, capsys, groups):
    assert compare(*groups) == 0
    groups = shorten_names(groups)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "val/acc, mean ± standard error:",
        f"  94.17% ± 0.60% of 3 runs · deviation 1.04% · {groups[1]}",
        f"  91.00% ± 0.58% of 3 runs · deviation 1.00% · {groups[0]}",
        f"  {groups[1]} against {groups[0]}: better by 3.17 ± 0.72 points (95 %, 3 pairs)",
        f"best: {groups[1]} · test/acc 84.17% ± 0.60% · 2 settings were tried on the same "
        "validation images",
    ]


def test_the_page_of_groups_has_the_arms(compare, tmp_path):
    page = tmp_path / "arms.md"
    assert compare("augmentation=none", "augmentation=trivial", "--md", page) == 0
    text = page.read_text()
    assert text.startswith("# augmentation=none beside augmentation=trivial\n")
    assert "**better by 3.17 ± 0.72 points (95 %, 3 pairs)**" in text and "trivial-3" in text


def test_a_list_of_runs_has_a_short_name():
    texts = ["none-1,none-2,none-3", "tags=a,seed=1"]
    assert shorten_names(texts) == ["none-1 and 2 more", "tags=a,seed=1"]


def test_groups_of_one_short_name_are_all_compared(compare, capsys):
    assert compare("none-1,none-2", "none-1,trivial-2") == 2
    assert "none-1 is in several groups" in capsys.readouterr().err
    assert shorten_names(["a,b", "a,c", "d,e"]) == ["a,b", "a,c", "d,e"]


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (("augmentation=none", "augmentation=other"), "No run has augmentation=other"),
        (("augmentation=none", "augmentaton=none"), "No run has augmentaton=none"),
        (("tags=night", "augmentation=none"), "both have seed=1"),
        (("augmentation=none", "tags=none,optimizer.lr=5e-4"), "none-1 is in several groups"),
        (("augmentation=none", "tags=trivial,trivial-1"), "mixes conditions and run ids"),
        (("augmentation=none",), "at least two"),
    ],
)
def test_groups_that_cannot_be_compared_are_refused(compare, capsys, groups, reason):
    assert compare(*groups) == 2 and reason in capsys.readouterr().err


@pytest.fixture
def partly(compare, tmp_path):
    """Writes a run for each seed and status, with a high accuracy; returns the group."""

    def write(name, **statuses):
        for seed, status in statuses.items():
            metrics = {"val/acc_best": 0.99}
            root = tmp_path / "logs/train/runs"
            number = int(seed[1:])
            write_run(
                root, f"{name}-{number}", seed=number, status=status, metrics=metrics, tags=[name]
            )
        return f"tags={name}"

    return write


def test_unfinished_runs_of_a_group_are_named(compare, partly, tmp_path, capsys):
    group = partly("diverged", s1="finished", s2="failed", s3="interrupted")
    page = tmp_path / "x.md"
    assert compare("augmentation=none", group, "--md", page) == 0
    for text in (capsys.readouterr().out, page.read_text().replace("\N{NO-BREAK SPACE}", " ")):
        assert "Left out, not finished with val/acc: diverged-2, diverged-3." in text
        assert "best: tags=diverged (by 1 of its 3 runs)" in text


def test_groups_without_a_common_seed_are_not_compared(compare, partly, capsys):
    group = partly("other", s7="finished", s8="finished")
    assert compare("augmentation=none", group) == 0
    sentence = "No run of tags=other has the seed and fold of one of augmentation=none."
    assert sentence in capsys.readouterr().out


def test_groups_that_have_not_finished_are_refused(compare, partly, capsys):
    groups = partly("a", s1="interrupted"), partly("b", s1="failed")
    assert compare(*groups) == 2
    assert "Left out, not finished with val/acc: a-1, b-1." in capsys.readouterr().err


def test_what_differs_between_the_runs_of_a_pair_is_named(compare, tmp_path, capsys):
    write_run(tmp_path / "logs/train/runs", "longer-1", seed=1, epochs=99, tags=["longer"])
    assert compare("none-1,none-2", "tags=longer") == 0
    assert "Not held fixed between these runs: the number of epochs" in capsys.readouterr().out


def test_what_differs_in_a_later_pair_is_named_once(compare, tmp_path, capsys):
    metrics = {"val/acc_best": 0.9}
    for seed, epochs in ((1, 12), (2, 99), (3, 99)):
        write_run(
            tmp_path / "logs/train/runs",
            f"late-{seed}",
            seed=seed,
            epochs=epochs,
            tags=["late"],
            metrics=metrics,
        )
    assert compare("augmentation=none", "tags=late") == 0
    assert capsys.readouterr().out.count("the number of epochs") == 1


def test_an_option_that_is_none_may_be_a_condition(compare, tmp_path):
    folder = tmp_path / "logs/train/runs/none-1"
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(f"{config}model: {{weights: null}}\n")
    run = read_run(folder)
    assert select_runs("model.weights=none", [run], None) == [run]
    assert select_runs("model.weights=NULL", [run], None) == [run]


def test_a_lower_loss_is_better_without_a_config(tmp_path):
    groups = {}
    for name, value in (("good", 0.1), ("bad", 0.9)):
        metrics = {"val/loss": value, "val/loss_best": value}
        folder = write_run(tmp_path, name, monitor="val/loss", metrics=metrics)
        (folder / "config.yaml").unlink()
        groups[name] = [read_run(folder)]
    arms = make_arms(groups)
    assert arms.minimize and arms.ranked[0].name == "good"


def test_commas_alone_are_no_group(compare, capsys):
    assert compare(",", ",") == 2
    assert "names no run" in capsys.readouterr().err
