"""Refuse a sweep before its first job trains, if one of its jobs cannot work."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep.config.compose import CONFIGS, compose, describe_error, whole_config
from lockstep.config.keys import REPEAT_KEYS, may_resume_change
from lockstep.config.overrides import CommandLine, config_folders, is_choice, quote_names
from lockstep.config.schema import key_of, yaml_files
from lockstep.config.suggestions import missing_option
from lockstep.process.errors import UserError
from lockstep.process.redact import refuse_secrets
from lockstep.ranks.find import find_ranks
from lockstep.records.folder import RunFolder
from lockstep.runs.checks import check_before_start
from lockstep.runs.resume import read_earlier_config
from lockstep.sweeps.against import AGAINST

LOCAL_LAUNCHER = "hydra_plugins.lockstep_sweeps.LocalJobs"


def parse_sweep_overrides(overrides: list[str]) -> list[Any]:
    """Return Hydra's objects for overrides; a glob becomes a choice of the options it matches.

    Raises:
        UserError: Hydra cannot read one, or a glob matches no option.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        quoted = [quote_names(override) for override in overrides]
        parsed = OverridesParser.create().parse_overrides(quoted)
    except HydraException as error:
        raise UserError(describe_error(error)) from None
    folders = config_folders(overrides, CONFIGS)
    return [_resolve_glob(override, folders) for override in parsed]


def _resolve_glob(override: Any, folders: tuple[Path, ...]) -> Any:
    """Return an override with a choice of options in place of a glob; others as they are."""
    from hydra.core.override_parser.types import ChoiceSweep, Glob

    pattern = override.value()
    if not isinstance(pattern, Glob) or override.is_hydra_override():
        return override
    group = override.key_or_group
    options: list[Any] = pattern.filter(sorted({path.stem for path in yaml_files(group, folders)}))
    if not options:
        raise UserError(f"{override.input_line} matches no option: configs/{group}/ lists them.")
    # Hydra offers no public way to set a value, and option names may need quotes in a text.
    return dataclasses.replace(override, _value=ChoiceSweep(list=options))


def choose_first_values(overrides: list[str]) -> list[str]:
    """Return the overrides of a sweep's first job."""
    return list(map(_choose_first_value, overrides, parse_sweep_overrides(overrides)))


def _choose_first_value(text: str, override: Any) -> str:
    """Return the override with the first of its values; one that is not swept stays as it is."""
    from hydra.core.override_parser.types import IntervalSweep

    key = text.partition("=")[0]
    value = override.value()
    if not override.is_sweep_override() or key.startswith("hydra"):
        return text
    if isinstance(value, IntervalSweep):
        return f"{key}={value.start}"
    return f"{key}={next(override.sweep_string_iterator())}"


def refuse_missing_options(config_name: str, overrides: list[str]) -> None:
    """Raise UserError for an option of a sweep that does not exist, as in
    model=small_cnn,nosuch.
    """
    folders = CommandLine.parse(config_name, choose_first_values(overrides), CONFIGS).folders
    for text, override in zip(overrides, parse_sweep_overrides(overrides), strict=True):
        if not override.is_discrete_sweep() or not is_choice(text, folders):
            continue
        for name in override.sweep_string_iterator():
            sentence = missing_option(key_of(text), str(name), folders)
            if sentence:
                raise UserError(sentence)


def refuse_impossible_jobs(config_name: str, overrides: list[str], first_config: Any) -> None:
    """Raise UserError where a job would be refused: each value is tried once, in the first job.

    Args:
        first_config: the composed config of the first job.
    """
    # Another launcher starts jobs on machines that have other devices and folders.
    is_here = str(first_config.hydra.launcher.get("_target_")) == LOCAL_LAUNCHER
    if is_here:
        _check_job(first_config)
    for job in _vary_first_job(overrides):
        cfg = compose(config_name, job)
        if is_here:
            _check_job(cfg)


def _vary_first_job(overrides: list[str]) -> Iterator[list[str]]:
    """Yield the overrides of the first job with another value of one key.

    They are [a=2, b=3] and [a=1, b=4] for a=1,2 b=3,4.
    """
    first_overrides = choose_first_values(overrides)
    for position, (text, override) in enumerate(
        zip(overrides, parse_sweep_overrides(overrides), strict=True)
    ):
        if not override.is_discrete_sweep() or key_of(text).startswith("hydra"):
            continue
        values = list(override.sweep_string_iterator())[1:]
        if key_of(text) in REPEAT_KEYS:
            # One seed is as good as another: the last one stands for all.
            values = values[-1:]
        for value in values:
            changed_override = f"{text.partition('=')[0]}={value}"
            yield [*first_overrides[:position], changed_override, *first_overrides[position + 1 :]]


def _check_job(cfg: Any) -> None:
    """Refuse what the job's own process would refuse before it imports torch."""
    config = whole_config(cfg)
    refuse_secrets(config)
    # The sweep gives each job its run_id, and the arms their overrides.
    config[AGAINST] = None
    if config["resume"] == "auto":
        config["run_id"] = "job"
    check_before_start(config, find_ranks(config))


def refuse_used_folder(sweep_dir: Path, overrides: list[str]) -> None:
    """Raise UserError for a folder that holds the runs of another sweep, unless they go on."""
    runs = sorted(path.parent.name for path in sweep_dir.glob("*/run.json"))
    goes_on = any(key_of(override) == "resume" for override in overrides)
    if runs and not goes_on:
        raise UserError(
            f"hydra.sweep.dir={sweep_dir} holds runs of another sweep, as {runs[0]}: give another "
            "folder, or resume=auto to continue that sweep by the same command."
        )


def refuse_other_job(folder: RunFolder, overrides: list[str]) -> None:
    """Raise UserError if the folder of a job holds the run of a job with another recipe.

    Jobs are numbered in order, so more seeds or values give other numbers to the same jobs.
    """
    earlier_config = read_earlier_config(folder)
    if earlier_config is None:
        return
    earlier = _recipe_of(map(str, earlier_config.get("overrides") or ()))
    recipe = _recipe_of(overrides)
    differing = sorted(key for key in earlier | recipe if earlier.get(key) != recipe.get(key))
    if differing:
        before = " ".join(earlier.get(key, f"no {key}") for key in differing)
        raise UserError(
            f"{folder.path} is the run of another job ({before}), because a sweep with other "
            "values numbers its jobs in another order: give another hydra.sweep.dir."
        )


def _recipe_of(overrides: Iterable[str]) -> dict[str, str]:
    """Return the overrides that no resume may change, by their keys."""
    texts = {key_of(override): override for override in overrides}
    return {key: text for key, text in texts.items() if not may_resume_change(key)}
