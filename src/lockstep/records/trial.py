"""A trial of a search in its job, and the study in a journal file. Imports no torch."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.process.errors import UserError

PRUNERS = ("hyperband", "median")


@dataclass(frozen=True)
class Trial:
    """A trial of a search, from the key `trial` of its job's config.

    Args:
        journal: the path of the file that holds the study.
        study: the name of the study.
        number: the trial's number in the study.
        folder: the run folder of the trial.
        pruner: hyperband or median; None: nothing is pruned.
    """

    journal: str
    study: str
    number: int
    folder: str
    pruner: str | None = None

    def report(self, validation: int, value: float) -> bool:
        """Report the metric of a validation, and return whether the pruner stops the trial.

        If somebody repeats the command of a trial that has ended, nothing is reported.

        Args:
            validation: the number of the validation in the run, from 1.
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
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock, JournalStorage

    lock = JournalFileSymlinkLock(str(path))
    _remove_torn_line(path, lock)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _remove_torn_line(path: Path, lock: Any) -> None:
    """Remove a line that a full disk has cut, because the next line would be appended to it."""
    if not path.exists() or _ends_with_newline(path):
        return
    lock.acquire()
    try:
        # Another process may have completed the line meanwhile.
        if not _ends_with_newline(path):
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    finally:
        lock.release()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def check_pruner(name: str | None) -> None:
    """Refuse a pruner that does not exist."""
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
