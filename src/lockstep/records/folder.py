"""The main files of a run folder, where run folders lie, and configs of older versions. Imports no torch.

A run folder is `logs/train/runs/<run_id>/` (a sweep's: `logs/train/multiruns/<sweep_id>/<job>/`).
"""

import difflib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.process.errors import UserError

GROUPS = ("model", "task", "data", "optimizer", "scheduler", "trainer", "callbacks", "logger", "paths", "s3")
RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RUNS = ("*/run.json", "runs/*/run.json", "*/runs/*/run.json", "train/multiruns/*/*/run.json")  # in logs/ and logbook/
MOVED = {  # classes that older runs name in their config.yaml by another name
    "classifier.ImageClassifier": "tasks.classifier.ImageClassifier",
    "lockstep.strategies.sharded.Sharded": "lockstep.strategies.fsdp.FSDP",
    "augmentations.auto_augment.AutoAugment": "augmentations.policies.AutoAugment",
    "augmentations.rand_augment.RandAugment": "augmentations.policies.RandAugment",
    "augmentations.resized_crop.ResizedCrop": "augmentations.policies.ResizedCrop",
    "augmentations.three_augment.ThreeAugment": "augmentations.policies.ThreeAugment",
    "augmentations.trivial_augment.TrivialAugment": "augmentations.policies.TrivialAugment",
    "data.cifar10.CIFAR10DataModule": "data.torchvision_sets.CIFAR10DataModule",
    "data.csv.CSVDataModule": "data.table.CSVDataModule",
    "data.mnist.FashionMNISTDataModule": "data.torchvision_sets.FashionMNISTDataModule",
    "data.mnist.MNISTDataModule": "data.torchvision_sets.MNISTDataModule",
    "data.parquet.ParquetDataModule": "data.table.ParquetDataModule",
    "schedulers.linear.linear": "schedulers.cosine.linear",
}


@dataclass
class RunFolder:
    """The paths of the files of one run."""

    path: Path

    def __post_init__(self) -> None:
        self.run_id = self.path.name
        self.config = self.path / "config.yaml"
        self.bucket_config = self.path / "from-bucket" / "config.yaml"  # untrusted: others may write to the bucket
        self.record = self.path / "run.json"
        self.alive = self.path / ".alive"  # locked for as long as the run trains
        self.metrics = self.path / "metrics.csv"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.page = self.path / "page.md"
        self.code_diff = self.path / "code.diff"  # of src and configs, where they were not committed


def new_run_id() -> str:
    """Return an id that sorts by time; its random part keeps two starts in one second apart."""
    return f"{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"


def checked_run_id(run_id: str) -> str:
    """Return the same id; raise UserError if it could leave its folder or prefix."""
    if not RUN_ID_PATTERN.fullmatch(str(run_id)) or ".." in run_id:
        raise UserError(
            f"run_id={run_id!r} cannot name a folder: use letters, digits, '.', '_' and '-' (no '..'), at most 100."
        )
    return run_id


def read_config(path: Path) -> dict[str, Any]:
    """Return a run folder's config.yaml; raise UserError if it is missing or is no config, or its tags ask for code."""
    import yaml

    try:
        config = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        odd = [key for key in GROUPS if not isinstance(config.get(key), dict | None)]
        if odd:
            raise ValueError(f"its {odd[0]} is a {type(config[odd[0]]).__name__}")
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} cannot be read as a run's config: {reason}.") from None
    return with_current_names(config)


def with_current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config as this version writes it: version 1 had `classifier` for `task`, and one more callback."""
    found = _with_moved_classes(config)
    if isinstance(callbacks := found.get("callbacks"), dict):
        callbacks.pop("throughput", None)
    before, choices = found.pop("classifier", None), found.get("choices")
    if isinstance(before, dict) and isinstance(choices, dict):
        task: Any = found.get("task")
        is_own = isinstance(task, dict) and task.get("_target_")
        found["task"] = task if is_own else {"_target_": "tasks.classifier.ImageClassifier", **before}
        found["choices"] = {"task": task["_target_"].rpartition(".")[2] if is_own else "classifier", **choices}
        if isinstance(words := found.get("overrides"), list | tuple):
            found["overrides"] = [re.sub(r"^([+~]*)classifier\b", r"\1task", str(word)) for word in words]
    return found


def _with_moved_classes(node: Mapping[str, Any]) -> dict[str, Any]:
    new = {key: _with_moved_classes(value) if isinstance(value, Mapping) else value for key, value in node.items()}
    if isinstance(target := new.get("_target_"), str):
        new["_target_"] = MOVED.get(target, target)
    return new


def run_folders(root: Path) -> list[Path]:
    """Return the folders of all runs and sweep jobs below logs/ or logbook/."""
    return sorted({path.parent for pattern in RUNS for path in root.glob(pattern)})


def find_run(logs: Path, run_id: str) -> RunFolder:
    """Return the folder of a run or of a sweep's job under `logs`; raise UserError if there is none."""
    checked_run_id(run_id)
    for pattern in (f"runs/{run_id}", f"multiruns/*/{run_id}"):
        for path in (logs / "train").glob(f"{pattern}/run.json"):
            return RunFolder(path.parent)
    raise no_such_run(run_id, run_folders(logs), logs)


def no_such_run(word: str, folders: Iterable[Path], *roots: Path) -> UserError:
    """Return the error that names the run of nearly that name, and the newest ones."""
    names = [path.name for path in sorted(folders, key=lambda path: (path / "run.json").stat().st_mtime)]
    near = "".join(f" did you mean {name}?" for name in difflib.get_close_matches(word, names, 1))
    newest = f"the newest are {', '.join(names[-3:])}" if names else "there are none yet"
    return UserError(f"No run {word!r} in {' or '.join(map(str, roots))};{near} {newest}.")
