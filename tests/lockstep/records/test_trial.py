"""What a trial reports to its study, and what the pruner says."""

import optuna
import pytest

from lockstep.process.errors import UserError
from lockstep.records.trial import Trial, build_pruner, check_pruner, journal_storage


def study_of(path, pruner, values):
    """Return a study with a finished trial for each value, reported after each of 3 validations."""
    study = optuna.create_study(
        storage=journal_storage(path),
        study_name="night",
        direction="maximize",
        pruner=build_pruner(pruner),
    )
    for value in values:
        trial = study.ask()
        for number in (1, 2, 3):
            Trial(str(path), "night", trial.number, "", pruner).report(number, value)
        study.tell(trial, value)
    return study


@pytest.mark.parametrize("pruner", ["hyperband", "median"])
def test_a_trial_below_the_others_is_given_up(pruner, tmp_path):
    study = study_of(tmp_path / "j", pruner, [0.9] * 8)
    worse, better = study.ask(), study.ask()

    def verdicts(trial, value):
        place = Trial(str(tmp_path / "j"), "night", trial.number, "", pruner)
        return [place.report(number, value) for number in (1, 2, 3)]

    assert True in verdicts(worse, 0.1)
    assert True not in verdicts(better, 0.95)
    assert study.trials[worse.number].intermediate_values[1] == 0.1


def test_a_trial_that_has_ended_reports_nothing(tmp_path):
    study = study_of(tmp_path / "j", "median", [0.9] * 8)
    assert not Trial(str(tmp_path / "j"), "night", 0, "", "median").report(4, 0.1)
    assert 4 not in study.trials[0].intermediate_values


def test_another_pruner_is_refused():
    check_pruner("median")
    check_pruner(None)
    with pytest.raises(UserError, match="hyperband, median or null"):
        check_pruner("hyperbnd")


def test_a_line_cut_by_a_full_disk_spoils_nothing(tmp_path):
    path = tmp_path / "j"
    study = study_of(path, None, [])
    trial = study.ask()
    with path.open("ab") as file:
        file.write(b'{"op_code":6,"wor')
    for number in (1, 2):
        Trial(str(path), "night", trial.number, "").report(number, 0.5)
    values = study_values(path, trial.number)
    assert values == {1: 0.5, 2: 0.5}


def study_values(path, number):
    study = optuna.load_study(study_name="night", storage=journal_storage(path))
    return study.trials[number].intermediate_values
