"""Search ranges with Optuna: one study in a journal file, which the same command continues."""

import hashlib
import logging
import math
import shutil
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from lockstep.config.keys import kind_of
from lockstep.config.overrides import quote_value
from lockstep.config.schema import key_of
from lockstep.process.errors import UserError
from lockstep.records.folder import RunFolder
from lockstep.records.record import RunRecord, read_record
from lockstep.records.trial import build_pruner, journal_storage
from lockstep.runs.run_lock import is_alive
from lockstep.sweeps.jobs import RESULTS_FOLDER
from lockstep.sweeps.local import StartJob
from lockstep.sweeps.ranking import is_minimized
from lockstep.sweeps.stopping import stop_signals

log = logging.getLogger(__name__)


class Search:
    """A search over the ranges of a command line, one job for each trial.

    Failed trials are skipped.

    Args:
        overrides: the parsed overrides of the command line.
        config: the config of the sweep, with `optimized_metric` and Hydra's node.
        study_name: None derives it from the search space, so that another search has another study.
        folder: the folder of the journal.
        seed: the seed of Optuna's sampler.
        pruner: hyperband or median; None lets every trial run to its end.

    Attributes:
        started_trials: the numbers of the trials that this start has run.
    """

    def __init__(
        self,
        overrides: list[Override],
        config: Any,
        study_name: str | None,
        folder: Path,
        seed: int | None,
        pruner: str | None = None,
    ) -> None:
        self.ranges = [override for override in overrides if override.is_sweep_override()]
        if not self.ranges:
            raise UserError(
                "Nothing to search. Pass a range, such as "
                "'optimizer.lr=tag(log,interval(1e-4,1e-1))'."
            )
        for override in self.ranges:
            _check_range(override)
        self.fixed = [
            f"{override.get_key_element()}={override.get_value_element_as_str()}"
            for override in overrides
            if override not in self.ranges
        ]
        self.config = config
        self.pruner = pruner
        self.sweep_dir = Path(str(config.hydra.sweep.dir)).resolve()
        self.started_trials: set[int] = set()
        self.study = self._open_study(study_name, folder, seed)
        self._refuse_other_runs()
        self._copy_earlier_results()

    def _copy_earlier_results(self) -> None:
        """Copy how the jobs of earlier starts have ended, so that the report is on all trials."""
        target = self.sweep_dir / RESULTS_FOLDER
        for trial in self.study.trials:
            if "folder" not in trial.user_attrs:
                continue
            source = _find_run_folder(trial).path.parent / RESULTS_FOLDER
            if source == target:
                continue
            for path in source.glob(f"{trial.number}-*"):
                target.mkdir(parents=True, exist_ok=True)
                # The time of the file tells the jobs of this start from others.
                shutil.copy2(path, target / path.name)

    def _refuse_other_runs(self) -> None:
        """Refuse a folder with runs of another search: a trial would go on with one of them."""
        folders = {trial.user_attrs.get("folder") for trial in self.study.trials}
        for path in sorted(self.sweep_dir.glob("*/run.json")):
            if str(path.parent) not in folders:
                raise UserError(
                    f"hydra.sweep.dir={self.sweep_dir} holds {path.parent.name}, a run of another "
                    "sweep: give another folder."
                )

    def run(self, num_trials: int, num_parallel: int, start: StartJob) -> None:
        """Run trials until `num_trials` have ended, over all starts; at most as many may fail.

        The next trial starts as soon as one of the `num_parallel` running trials ends.
        """
        jobs: dict[Future[Any], Any] = {}
        while True:
            for _ in range(self._count_trials_to_start(num_trials, num_parallel, len(jobs))):
                trial = self._choose_trial()
                self.started_trials.add(trial.number)
                jobs[start(self._build_overrides(trial), trial.number)] = trial
            if not jobs:
                break
            ended_jobs, _ = wait(jobs, return_when=FIRST_COMPLETED)
            for job in ended_jobs:
                self._end_trial(jobs.pop(job), job.result().return_value)
        if stop_signals:
            log.info(f"The search was stopped. The same command continues {self.journal}.")

    def _count_trials_to_start(self, num_trials: int, num_parallel: int, num_running: int) -> int:
        """Return how many more trials start now; at most 0 if none does."""
        if stop_signals:
            return 0
        num_missing = num_trials - num_running - len(self._select_trials("COMPLETE", "PRUNED"))
        # As many may fail as are to end.
        starts_left = 2 * num_trials - len(self.started_trials)
        return min(num_parallel - num_running, num_missing, starts_left)

    def _choose_trial(self) -> Any:
        """Return a trial whose run was stopped in an earlier start, or else a new one."""
        for trial in self._select_trials("RUNNING"):
            if trial.number in self.started_trials or "folder" not in trial.user_attrs:
                continue
            folder = _find_run_folder(trial)
            # Another search may share the study.
            if folder.record_path.exists() and not is_alive(folder):
                return trial

        trial = self.study.ask()
        trial.set_user_attr("folder", str(self.sweep_dir / f"{self.sweep_dir.name}_{trial.number}"))
        return trial

    def _build_overrides(self, trial: Any) -> list[str]:
        """Return the overrides of a trial's job."""
        texts = {
            "journal": str(self.journal),
            "study": self.study.study_name,
            "folder": trial.user_attrs["folder"],
        }
        items = [f"{name}:{quote_value(text)}" for name, text in texts.items()]
        items += [f"number:{trial.number}", f"pruner:{self.pruner or 'null'}"]
        return [*self.fixed, *self._suggest_overrides(trial), f"trial={{{','.join(items)}}}"]

    def _end_trial(self, trial: Any, value: float | None) -> None:
        """Tell the study how a trial's job has ended. A stopped one stays for the next start."""
        record = _read_record(trial)
        outcome = "failed"
        if value is not None and math.isfinite(value):
            self._tell_study(trial, "COMPLETE", float(value))
            outcome = str(float(value))
        elif record.ended_by == "pruned":
            self._tell_study(trial, "PRUNED")
            outcome = f"pruned in epoch {record.epochs}"
        elif record.status and (stop_signals or record.status == "interrupted"):
            outcome = "stopped"
        else:
            self._tell_study(trial, "FAIL")
        log.info(f"trial {trial.number}: {' '.join(self._suggest_overrides(trial))} → {outcome}")

    def _tell_study(self, trial: Any, state: str, value: float | None = None) -> None:
        from optuna.trial import TrialState

        # Optuna gives a pruned trial the value that it has reported last.
        self.study.tell(trial.number, value, state=TrialState[state], skip_if_finished=True)

    def _select_trials(self, *states: str) -> list[Any]:
        """Return the trials that are in one of these states, by number."""
        return [trial for trial in self.study.trials if trial.state.name in states]

    def report(self) -> None:
        """Log the best trial, and what the pruner has saved.

        Raises:
            UserError: no trial has finished.
        """
        finished = self._select_trials("COMPLETE")
        if not finished:
            raise UserError(
                f"No trial of the study {self.study.study_name} has finished. Their output states "
                "the errors."
            )
        best = self.study.best_trial
        settings = " ".join(f"{key}={value}" for key, value in best.params.items())
        log.info(f"best of {len(self.study.trials)} trials: {best.value:.6g} with {settings}")
        if not self.pruner:
            return

        pruned = self._select_trials("PRUNED")
        share = share_of_whole_runs(
            [_read_fit_seconds(trial) for trial in finished],
            [_read_fit_seconds(trial) for trial in pruned],
        )
        log.info(
            f"{len(finished)} trials finished, {len(pruned)} were pruned: {share:.0%} of the "
            f"training time of {len(finished) + len(pruned)} whole runs"
        )
        if not any(trial.intermediate_values for trial in finished):
            log.warning(
                f"No validation logs {self.config.optimized_metric}, so no trial was pruned. "
                "Pass a metric of the validation as optimized_metric=."
            )

    def _suggest_overrides(self, trial: Any) -> list[str]:
        """Return the overrides that a trial searches."""
        return [
            f"{override.get_key_element()}={suggest_value(trial, override)}"
            for override in self.ranges
        ]

    def _open_study(self, study_name: str | None, folder: Path, seed: int | None) -> Any:
        """Return the study, new or from its journal; refuse the study of another search."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = "minimize" if is_minimized(self.config) else "maximize"
        ranges = sorted(str(override.input_line) for override in self.ranges)
        space = [direction, str(self.config.optimized_metric), *ranges]
        name = study_name or _name_study([*space, *sorted(self.fixed)])

        folder.mkdir(parents=True, exist_ok=True)
        path = (folder / f"{name}.journal").resolve()
        self.journal = path
        study = optuna.create_study(
            storage=journal_storage(path),
            study_name=name,
            direction=direction,
            load_if_exists=True,
            pruner=build_pruner(self.pruner),
        )
        recipe = sorted(override for override in self.fixed if _is_compared(override))
        for attribute, current in (("search", space), ("fixed", recipe)):
            earlier = study.user_attrs.get(attribute, current)
            if earlier != current:
                raise UserError(
                    f"The study {name} is another search ({' '.join(earlier) or 'no options'}): "
                    f"pass hydra.sweeper.study=NAME for a new one, or remove {path}."
                )
            study.set_user_attr(attribute, current)
        log.info(f"study {name} in {path}: {len(study.trials)} trials so far")

        # With the same seed a second start would propose the trials of the first one again.
        sampler_seed = None if seed is None else seed + len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=sampler_seed)
        return study


def _is_compared(override: str) -> bool:
    """Return whether trials with another value of this option cannot be compared."""
    return kind_of(key_of(override)).is_compared


def _find_run_folder(trial: Any) -> RunFolder:
    """Return the folder of a trial's run."""
    return RunFolder(Path(trial.user_attrs["folder"]))


def _read_record(trial: Any) -> RunRecord:
    """Return the record of a trial's run; an empty record if there is none."""
    path = _find_run_folder(trial).record_path
    return read_record(path) if path.exists() else RunRecord()


def _read_fit_seconds(trial: Any) -> float:
    """Return the training time of a trial; 0 where its folder is gone."""
    if "folder" not in trial.user_attrs:
        return 0.0
    return _read_record(trial).fit_seconds or 0.0


def share_of_whole_runs(finished_s: Sequence[float], pruned_s: Sequence[float]) -> float:
    """Return the time of all trials, as a share of what they would take if none was pruned.

    Args:
        finished_s, pruned_s: the training times of the finished and of the pruned trials.
    """
    unpruned_s = sum(finished_s) / len(finished_s) * (len(finished_s) + len(pruned_s))
    return (sum(finished_s) + sum(pruned_s)) / unpruned_s if unpruned_s else 1.0


def _name_study(parts: list[str]) -> str:
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"search-{digest[:8]}"


def _check_range(override: Override) -> None:
    """Refuse an interval that Optuna cannot search."""
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return
    start = value.start
    end = value.end
    assert start is not None and end is not None, "Hydra's grammar asks for both"
    if start > end:
        raise UserError(f"{override.input_line}: give the smaller end of the interval first.")
    if "log" in value.tags and start <= 0:
        raise UserError(f"{override.input_line}: a logarithmic interval begins above 0.")


def suggest_value(trial: Any, override: Override) -> Any:
    """Return the trial's value for one searched key: a number in its interval, or a choice."""
    key = override.get_key_element()
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return trial.suggest_categorical(key, list(override.sweep_string_iterator()))

    log_scale = "log" in value.tags
    if isinstance(value.start, int) and isinstance(value.end, int):
        return trial.suggest_int(key, value.start, value.end, log=log_scale)
    return trial.suggest_float(key, value.start, value.end, log=log_scale)
