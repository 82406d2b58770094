"""The name of every file in a run folder, and the run record (run.json): its fields, and how it is read and written.

A run folder is `logs/train/runs/<run_id>/` (a sweep's: `logs/train/multiruns/<sweep_id>/<job>/`).
Nothing here needs torch: the supervisor, the logbook and the uploader read and write records too.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from errors import UserError

SCHEMA_VERSION = 1
STATUSES = ("running", "finished", "failed", "interrupted", "lost")
HEARTBEAT_INTERVAL_S = 15.0
LOST_AFTER_S = 300.0
LOST_AFTER_STARTING_S = 3600.0  # it downloads and decodes, and its heart does not beat yet
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

    def config_of(self, node_rank: int) -> Path:
        """What this node's ranks read: nodes may share the folder, and must not write over each other's."""
        return self.path / f"config-node{node_rank}.yaml" if node_rank else self.config

    def any_config(self) -> Path | None:
        """config.yaml, or on a machine that never held node 0 its own node's."""
        found = [self.config, *sorted(self.path.glob("config-node*.yaml"))]
        return next((path for path in found if path.exists()), None)

    @property
    def defaults(self) -> Path:
        """The config that no override would have composed: what differs from it is what the user chose."""
        return self.path / "defaults.yaml"

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
    def confusion_matrix_image(self) -> Path:
        return self.path / "confusion_matrix.png"

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

    def rank_error(self, rank: int) -> Path:
        """JSON {rank, host, phase, message, time}: what ended this rank."""
        return self.path / f"error-rank{rank}.json"


def utc_now() -> str:
    """Now as `2026-11-21T10:30:12Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


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


def write_atomically(path: Path, write: Callable[[Any], None], *, binary: bool = False) -> None:
    """Write beside the target, sync to disk, rename: a reader sees the old file or the new one, never a part.

    Args:
        write: called with the open file.

    Raises:
        OSError: names the target, e.g. where its disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb" if binary else "w") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = os.fspath(path)  # a full disk says nothing of where it is
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_record(path: Path) -> dict[str, Any]:
    """A run record as it was written.

    Raises:
        UserError: there is none, or it is not one.
    """
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no run folder: it has no {path.name}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a run record: {error}.") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} is not a run record: it holds no JSON object.")
    return record


def read_config(path: Path) -> dict[str, Any]:
    """A run folder's config.yaml.

    Raises:
        UserError: there is none, or it is not one; a tag that asks for code is none.
    """
    import yaml

    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as a run's config: {' '.join(str(error).split())[:300]}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a run's config: it holds no mapping.")
    return config


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network file systems


def lock(handle: Any, wait_s: float | None = None) -> bool:
    """An exclusive lock that goes with the process; False where another holds it for longer than `wait_s`.

    Where the disk has no locks, nothing is locked. What is let go before the process ends takes `locked`: to close is
    not enough while a child that was forked meanwhile has the handle too.
    """
    deadline = None if wait_s is None else time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if deadline is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if deadline is None or time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return True


@contextlib.contextmanager
def locked(handle: Any, wait_s: float | None = None) -> Iterator[None]:
    """`lock` for as long as the block lasts."""
    lock(handle, wait_s)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the whole record, atomically; stamps `updated_at`."""
    record["updated_at"] = utc_now()
    text = json.dumps(record, indent=1, sort_keys=False, allow_nan=False, default=str)
    write_atomically(path, lambda file: file.write(text + "\n"))


def status_of(record: dict[str, Any], now: str | None = None) -> str:
    """The record's status; `lost` where it says running and its heartbeat is older than LOST_AFTER_S."""
    status = record.get("status")
    if status != "running":
        return status if status in STATUSES else "lost"
    updated_at = record.get("updated_at") or record.get("started_at")
    try:
        age_s = seconds_between(str(updated_at), now or utc_now())
    except (ValueError, TypeError):  # no time, or one without a zone
        return "lost"
    silence_s = LOST_AFTER_STARTING_S if record.get("phase") == "start" else LOST_AFTER_S
    return "lost" if age_s > silence_s else "running"


def find_run(logs: Path, run_id: str) -> RunFolder:
    """The folder of a run under `logs` (runs and sweeps).

    Raises:
        UserError: no such run; names the newest ones there are.
    """
    checked_run_id(run_id)
    direct = logs / "train" / "runs" / run_id
    if (direct / "run.json").exists():
        return RunFolder(direct)
    for found in (logs / "train" / "multiruns").glob(f"*/{run_id}/run.json"):
        return RunFolder(found.parent)
    known = sorted(p.parent.name for p in (logs / "train" / "runs").glob("*/run.json"))[-3:]
    hint = f"the newest are {', '.join(known)}" if known else "there are none yet"
    raise UserError(f"No run {run_id!r} under {logs}; {hint}.")
