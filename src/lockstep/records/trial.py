"""A trial of a search, as its job knows it, and the study in a journal. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.process.errors import UserError

PRUNERS = ("hyperband", "median")


@dataclass(frozen=True)
class Trial:
    """A trial of a search: the key `trial` of its job's config.

    Args:
        journal: path of the file that holds the study.
        study: its name.
        number: of the trial in the study.
        folder: of the trial's run.
        pruner: hyperband or median; None: nothing is pruned.
    """

    journal: str
    study: str
    number: int
    folder: str
    pruner: str | None = None

    def report(self, validation: int, value: float) -> bool:
        """Report the metric of a validation; return whether the pruner gives the trial up.

        A trial that has ended, whose command somebody repeats, reports nothing.

        Args:
            validation: its number in the run, from 1.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = journal_storage(Path(self.journal))
        study_id = storage.get_study_id_from_name(self.study)
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, self.number)
        if storage.get_trial(trial_id).state.is_finished():
            return False

        storage.set_trial_intermediate_value(trial_id, validation, value)
        pruner = build_pruner(self.pruner)
        study = optuna.load_study(study_name=self.study, storage=storage, pruner=pruner)
        return bool(pruner.prune(study, storage.get_trial(trial_id)))


def journal_storage(path: Path) -> Any:
    """Return Optuna's storage in a journal file, which several processes may share."""
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    return JournalStorage(JournalFileBackend(str(path)))


def check_pruner(name: str | None) -> None:
    """Raise UserError for a pruner that does not exist."""
    if name is not None and name not in PRUNERS:
        raise UserError(f"hydra.sweeper.pruner={name}: give {', '.join(PRUNERS)} or null.")


def build_pruner(name: str | None) -> Any:
    """Return Optuna's pruner of this name."""
    from optuna import pruners

    if name == "hyperband":
        return pruners.HyperbandPruner()
    if name == "median":
        return pruners.MedianPruner()
    return pruners.NopPruner()
