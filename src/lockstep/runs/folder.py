"""The name of every file in a run folder, and where a run's folder lies. Imports no torch.

A run folder is `logs/train/runs/<run_id>/` (a sweep's: `logs/train/multiruns/<sweep_id>/<job>/`).
"""

import difflib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.runs.errors import UserError
from lockstep.runs.foreign_files import read_yaml

GROUPS = ("model", "task", "data", "optimizer", "scheduler", "trainer", "callbacks", "logger", "paths", "s3")
RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class RunFolder:
    """Where each file of one run lies."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def bucket_config(self) -> Path:
        """The untrusted config.yaml of the run's bucket, where others may write."""
        return self.path / "from-bucket" / "config.yaml"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def alive(self) -> Path:
        """Locked for as long as the run trains."""
        return self.path / ".alive"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def confusion_matrix(self) -> Path:
        """CSV: one row per true class, one column per predicted class, exact counts on the test set."""
        return self.path / "confusion_matrix.csv"

    @property
    def calibration(self) -> Path:
        return self.path / "calibration.csv"

    @property
    def page(self) -> Path:
        """The run's page, as markdown; its picture lies beside it."""
        return self.path / "page.md"

    @property
    def curves_image(self) -> Path:
        return self.path / "curves.svg"

    @property
    def code_diff(self) -> Path:
        """`git diff HEAD` of src and configs where the code was not committed."""
        return self.path / "code.diff"

    def hardware_samples(self, node_rank: int) -> Path:
        return self.path / f"hardware-node{node_rank}.csv"

    def nvidia_smi(self, node_rank: int, moment: str) -> Path:
        """moment: start, peak or end."""
        return self.path / f"nvidia-smi-node{node_rank}-{moment}.txt"

    def stack(self, rank: int) -> Path:
        """The Python stack of a rank after a hang."""
        return self.path / f"stack-rank{rank}.txt"

    def nccl_trace(self, rank: int) -> Path:
        """NCCL's last collectives on this rank where a run on GPUs failed, for torchfrtrace."""
        return self.path / f"nccl-trace-rank{rank}"


def new_run_id() -> str:
    """Sorts by time; the random part keeps two starts in one second apart."""
    return f"{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"


def checked_run_id(run_id: str) -> str:
    """The same id, or UserError where it could leave its folder or prefix."""
    if not RUN_ID_PATTERN.fullmatch(run_id) or ".." in run_id:
        raise UserError(
            f"run_id={run_id!r} cannot name a folder: use letters, digits, '.', '_' and '-' (no '..'), at most 100."
        )
    return run_id


def read_config(path: Path) -> dict[str, Any]:
    """A run folder's config.yaml.

    Raises:
        UserError: there is none, or it is not one; a tag that asks for code is none.
    """
    try:
        config = read_yaml(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a run's config: {error}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a run's config: it holds no mapping.")
    for key in GROUPS:
        if not isinstance(config.get(key), dict | None):
            raise UserError(f"{path} is not a run's config: its {key} is a {type(config[key]).__name__}.")
    return with_task(config)


def with_task(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config whose `task` holds what version 1 wrote under `classifier`."""
    found = dict(config)
    before, choices = found.pop("classifier", None), found.get("choices")
    if not isinstance(before, Mapping) or not isinstance(choices, Mapping):
        return found
    task: Any = found.get("task")
    is_own = isinstance(task, Mapping) and task.get("_target_")
    target = before.get("_target_", "classifier.ImageClassifier")
    renamed = {"_target_": "tasks.classifier.ImageClassifier"} if target == "classifier.ImageClassifier" else {}
    found["task"] = task if is_own else {**before, **renamed}
    found["choices"] = {"task": str(task["_target_"]).rpartition(".")[2] if is_own else "classifier", **choices}
    if isinstance(words := found.get("overrides"), list | tuple):
        found["overrides"] = [re.sub(r"^([+~]*)classifier\b", r"\1task", str(word)) for word in words]
    return found


def find_run(logs: Path, run_id: str) -> RunFolder:
    """The folder of a run under `logs` (runs and sweeps).

    Raises:
        UserError: no such run; names the one of nearly that name, and the newest ones.
    """
    checked_run_id(run_id)
    direct = logs / "train" / "runs" / run_id
    if (direct / "run.json").exists():
        return RunFolder(direct)
    for found in (logs / "train" / "multiruns").glob(f"*/{run_id}/run.json"):
        return RunFolder(found.parent)
    records = sorted((logs / "train" / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    known = [path.parent.name for path in records]
    near = "".join(f"did you mean {name}? " for name in difflib.get_close_matches(run_id, known, 1, cutoff=0.8))
    hint = f"{near}the newest are {', '.join(known[-3:])}" if known else "there are none yet"
    raise UserError(f"No run {run_id!r} under {logs}; {hint}.")
