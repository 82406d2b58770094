"""The main files of a run folder, and the places of run folders. Imports no torch.

A run folder is `logs/train/runs/<run_id>/`. That of a sweep's job is
`logs/train/multiruns/<sweep_id>/<job>/`.
"""

import difflib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.process.errors import UserError

# Groups whose node in config.yaml is a mapping.
MAPPING_GROUPS = (
    "model",
    "task",
    "data",
    "optimizer",
    "scheduler",
    "trainer",
    "callbacks",
    "logger",
    "paths",
    "s3",
)
RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Patterns of run folders below logs/ and below logbook/.
RUN_PATTERNS = (
    "*/run.json",
    "runs/*/run.json",
    "*/runs/*/run.json",
    "train/multiruns/*/*/run.json",
)


@dataclass
class RunFolder:
    """The paths of the files of one run.

    Attributes:
        bucket_config_path: the config from the bucket. It is not trusted, because others may write
            to the bucket.
        lock_path: a file that is locked while the run trains.
        code_diff: the uncommitted changes of src and configs.
    """

    path: Path

    def __post_init__(self) -> None:
        self.run_id = self.path.name
        self.config_path = self.path / "config.yaml"
        self.bucket_config_path = self.path / "from-bucket" / "config.yaml"
        self.record_path = self.path / "run.json"
        self.lock_path = self.path / ".alive"
        self.metrics = self.path / "metrics.csv"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.page = self.path / "page.md"
        self.code_diff = self.path / "code.diff"


def new_run_id() -> str:
    """Return an id that sorts by time. Its random part makes two ids of one second different."""
    return f"{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"


def validate_run_id(run_id: str) -> str:
    """Return the same id.

    Raises:
        UserError: the id could lead out of its folder or prefix.
    """
    if not RUN_ID_PATTERN.fullmatch(str(run_id)) or ".." in run_id:
        raise UserError(
            f"run_id={run_id!r} cannot name a folder: use letters, digits, '.', '_' and '-' "
            "(no '..'), at most 100."
        )
    return run_id


def read_config(path: Path) -> dict[str, Any]:
    """Return a run folder's config.yaml.

    Raises:
        UserError: the file is missing or no config, or a yaml tag in it would run code.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        content = path.read_bytes()
        try:
            config = yaml.load(content, Loader=loader)
        except yaml.YAMLError:
            # libyaml refuses the escapes in a path that is not UTF-8.
            config = yaml.load(content, Loader=yaml.SafeLoader)
        if not isinstance(config, dict):
            raise ValueError("it holds no options")
        for group in MAPPING_GROUPS:
            if not isinstance(config.get(group), dict | None):
                raise ValueError(f"its {group} is a {type(config[group]).__name__}")
    except (
        OSError,
        yaml.YAMLError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} cannot be read as a run's config: {reason}.") from None
    return config


def run_folders(root: Path) -> list[Path]:
    """Return the folders of all runs and sweep jobs below logs/ or logbook/."""
    folders = set()
    for pattern in RUN_PATTERNS:
        folders |= {path.parent for path in root.glob(pattern)}
    return sorted(folders)


def find_run_folder(logs: Path, run_id: str) -> RunFolder:
    """Return the folder of a run or a sweep's job under `logs`.

    Raises:
        UserError: there is no such run.
    """
    validate_run_id(run_id)
    for pattern in (f"runs/{run_id}", f"multiruns/*/{run_id}"):
        for path in (logs / "train").glob(f"{pattern}/run.json"):
            return RunFolder(path.parent)
    raise missing_run_error(run_id, run_folders(logs), logs)


def missing_run_error(name: str, folders: Iterable[Path], *roots: Path) -> UserError:
    """Return the error on a missing run, with the most similar run id and the newest ones."""
    in_order = sorted(folders, key=lambda folder: (folder / "run.json").stat().st_mtime)
    names = [folder.name for folder in in_order]
    close = difflib.get_close_matches(name, names, 1)
    hint = f" did you mean {close[0]}?" if close else ""
    newest = f"the newest are {', '.join(names[-3:])}" if names else "there are none yet"
    places = " or ".join(map(str, roots))
    return UserError(f"No run {name!r} in {places};{hint} {newest}.")
