"""The overrides of a command line, in the form in which Hydra reads them. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.config import keys
from lockstep.config.schema import FREE_GROUPS, is_group, key_of
from lockstep.config.suggestions import missing_option
from lockstep.process.errors import UserError

# Values that Hydra reads as they are meant: functions of its grammar, quotes, lists, sweeps, null
# and plain text.
READ_AS_MEANT = re.compile(
    r"""(?as)(choice|range|interval|glob|tag|sort|shuffle|str)\(.*\)|['"$\[].*|.*,.*|(?i:null)"""
    r"|(?!(?i:true|false|nan|inf)$)[a-zA-Z/][\w/.:@-]*"
)
# Settings of these groups fit the class of an option. Another class may need other ones.
UNFIT_GROUPS = {
    "data._target_": ("data", "task"),
    "model._target_": ("data", "task", "optimizer", "scheduler"),
}
SEARCH_PATH = "hydra.searchpath"
# Other commands start runs of a few steps. Such a run ends by its epochs, and leaves nothing.
SHORT_RUN_OVERRIDES = {
    "trainer.max_steps": -1,
    "trainer.max_time": "null",
    "trainer.compile": False,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.val_check_interval": 1.0,
    "trainer.timeout_s": 60,
    "logbook": "null",
    "s3.uri": "null",
}


@dataclass(frozen=True)
class CommandLine:
    """The overrides of a command line.

    Args:
        config_name: the yaml that Hydra composes.
        overrides: the overrides in the form in which Hydra reads them.
        folders: the folders that hold the groups, configs/ first.
    """

    config_name: str
    overrides: list[str]
    folders: tuple[Path, ...]

    @classmethod
    def parse(cls, config_name: str, typed_overrides: list[str], configs: Path) -> "CommandLine":
        """Quote names; refuse an override without key or value, and an option that is missing."""
        folders = config_folders(typed_overrides, configs)
        overrides = []
        for override in typed_overrides:
            if is_choice(override, folders):
                override = override.lstrip("+")
            overrides.append(quote_names(override))
        for override in overrides:
            _check_form(override, folders)
        return cls(config_name, overrides, folders)

    @cached_property
    def choices(self) -> dict[str, str]:
        """The options that are chosen, by group."""
        return {
            key_of(override): override.partition("=")[2]
            for override in self.overrides
            if is_choice(override, self.folders)
        }

    @property
    def search_path_overrides(self) -> list[str]:
        """The overrides that add folders of yamls."""
        return search_paths(self.overrides)

    @property
    def fit_removals(self) -> list[str]:
        """Overrides that remove settings for the class of an option, which another one replaces."""
        groups: set[str] = set()
        for override in self.overrides:
            groups.update(UNFIT_GROUPS.get(key_of(override), ()))
        return sorted(f"~fits/{group}" for group in groups)

    @property
    def recorded_overrides(self) -> list[str]:
        """The overrides that a run records: all but Hydra's own."""
        return [word for word in self.overrides if not re.match("hydra[./]", key_of(word))]


def overrides_of_short_run(overrides: list[str], changes: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a run of a few steps: the user's, and changes in place of some."""
    replaced = {key_of(key) for key in changes}
    kept_overrides = []
    for override in overrides:
        key = key_of(override)
        if key not in replaced and not keys.is_left_out_of_short_runs(key):
            kept_overrides.append(override)
    return [*kept_overrides, *(f"{key}={value}" for key, value in changes.items())]


def is_typed(key: str, typed_keys: set[str]) -> bool:
    """Return whether an override sets or removes a key, or a node that holds the key.

    An override that chooses an option, as model=vit, does not count for the option's values.

    Args:
        typed_keys: the keys of the overrides.
    """
    nodes = [node for node in typed_keys if "." in node]
    return key in typed_keys or any(key.startswith(f"{node}.") for node in nodes)


def search_paths(overrides: list[str]) -> list[str]:
    """Return the overrides that add folders of yamls."""
    return [override for override in overrides if override.startswith(f"{SEARCH_PATH}=")]


def config_folders(overrides: list[str], configs: Path) -> tuple[Path, ...]:
    """Return `configs` and the folders that the overrides add to it."""
    values = "".join(override.partition("=")[2] for override in search_paths(overrides))
    paths = re.findall(r"'file://(.*?)(?<!\\)'|file://([^',\]]+)", values)
    added = [Path(quoted.replace("\\'", "'") or unquoted) for quoted, unquoted in paths]
    return (configs, *added)


def is_choice(override: str, folders: tuple[Path, ...]) -> bool:
    """Return whether an override chooses an option, as `model=alexnet`, and sets no value."""
    _, sign, value = override.partition("=")
    if not sign or override.startswith("~") or value.startswith("{"):
        return False
    return is_group(key_of(override), folders)


def quote_names(override: str) -> str:
    """Quote a name that Hydra would read as a number, a switch or not at all; expand ~ in it."""
    key, sign, value = override.partition("=")
    if not sign or not keys.is_text(key.lstrip("+")):
        return override
    if re.fullmatch(r"\[[^\"'\[{$]+\]", value):
        items = [_quote_if_needed(item) for item in value[1:-1].split(",")]
        return f"{key}=[{','.join(items)}]"
    if value.startswith("~"):
        value = str(Path(value).expanduser())
    return f"{key}={_quote_if_needed(value)}"


def _quote_if_needed(value: str) -> str:
    return value if READ_AS_MEANT.fullmatch(value) else quote_value(value)


def set_or_add(override: str) -> str:
    """Return the override with `++`, which sets a key that the config has and adds any other."""
    return f"++{override.lstrip('+')}"


def quote_value(value: str) -> str:
    """Quote a text for Hydra's grammar."""
    text = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", "\\'")
    return f"'{text}'"


def _check_form(override: str, folders: tuple[Path, ...]) -> None:
    """Refuse a missing key, value or option, and ~ before a whole group."""
    key, sign, value = override.lstrip("+~").partition("=")
    if override.startswith("~"):
        if "." not in key and key not in FREE_GROUPS:
            raise UserError(
                f"{override}: a run needs {key}. Give it another value, {key}=VALUE or {key}=none."
            )
    elif not sign or not key:
        raise UserError(f"{override}: write {_possible_forms(key, folders)}.")

    if not re.fullmatch(r"[\w./-]+|\[[\w.,-]+\]", value):
        return
    for name in value.strip("[]").split(","):
        sentence = missing_option(key, name, folders)
        if sentence and name != "null":
            raise UserError(sentence)


def _possible_forms(key: str, folders: tuple[Path, ...]) -> str:
    """Return GROUP=KEY for each group that has an option of this name, or else KEY=VALUE."""
    groups: set[str] = set()
    for folder in folders:
        groups.update(path.parent.name for path in folder.glob(f"*/{key}.yaml"))
    forms = [f"{group}={key}" for group in sorted(groups)]
    return " or ".join(forms or [f"{key or 'KEY'}=VALUE"])
