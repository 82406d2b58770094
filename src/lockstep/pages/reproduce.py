"""`logbook.py reproduce RUN`: the run's own commit in a clone with its diff, its options, run once more here.

A record names code that then runs with its reader's rights. Only what this clone's user wrote, or git holds, is taken
without a question: SECURITY.md.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.distributed.cluster import environment
from lockstep.pages.json_values import as_text, items, mapping
from lockstep.pages.source import Source, import_run, read_source, read_yaml, source_path
from lockstep.runs.batch import ACCUMULATION, states_accumulation
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.own_config import own_config
from lockstep.runs.provenance import available_cores, tree_hash, versions
from lockstep.runs.record import RunRecord
from lockstep.runs.typed_json import from_json

COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
# Where a run finds things and leaves them: the repetition has places of its own, and sends nothing to a bucket.
OF_A_PLACE = ("run_id", "resume", "logbook", "sweep_dir", "ckpt_path", "s3", "paths", "hydra")


@dataclass(frozen=True)
class Original:
    """The run that is to be repeated.

    Args:
        folder: None where only the logbook has it.
        words: what was typed after train.py.
        data_dir: where its data lie.
        is_vouched: this machine's user wrote it, or git holds it.
    """

    source: Source
    record: RunRecord
    folder: RunFolder | None
    words: tuple[str, ...]
    diff: str
    data_dir: str
    is_vouched: bool

    @property
    def run_id(self) -> str:
        return str(self.source["run_id"])


def from_folder(folder: RunFolder, logs: Path, repository: Path) -> Original:
    """
    Raises:
        UserError: it is no run folder.
    """
    source = import_run(folder.path)
    is_own = own_config(folder.config, logs) is not None
    typed = read_yaml(folder.config) if is_own else {}  # as it was: its code may be older than this one
    words = typed.get("overrides", mapping(source.get("record")).get("overrides"))
    data_dir = as_text(mapping(typed.get("paths")).get("data_dir")) or str(repository / "data")
    diff = folder.code_diff.read_text(errors="replace") if folder.code_diff.exists() else ""
    fetched = (folder.path / "from-bucket").exists()  # with the record and the diff of others
    return _original(source, folder, words, diff, data_dir, is_vouched=is_own and not fetched)


def from_logbook(logbook: Path, run_id: str, repository: Path) -> Original:
    """
    Raises:
        UserError: it cannot be read.
    """
    path = source_path(logbook, run_id)
    source, data_dir = read_source(path), str(repository / "data")
    words, diff = mapping(source.get("record")).get("overrides"), as_text(source.get("code_diff"))
    return _original(source, None, words, diff, data_dir, is_vouched=_is_as_committed(path, repository))


def _original(source: Source, folder: RunFolder | None, words: Any, diff: str, data_dir: str, **vouched: bool) -> Any:
    record = from_json(RunRecord, mapping(source.get("record")), tolerant=True)
    typed = tuple(word for word in items(words) if isinstance(word, str))
    return Original(source, record, folder, typed, diff, data_dir, **vouched)


def _is_as_committed(path: Path, repository: Path) -> bool:
    return _git(repository, "ls-files", "--error-unmatch", "--", str(path)) is not None and (
        _git(repository, "diff", "--quiet", "HEAD", "--", str(path)) is not None
    )


def obstacle(record: RunRecord) -> str:
    """Why no single machine with one state of the code can repeat the run; empty where one can."""
    if record.task_name != "train":
        return "is no training run: reproduce repeats what train.py did."
    if (record.num_nodes or 1) > 1 or record.trainer == "hivemind":
        return "needs other machines: start its command on each of them."
    if any(restart.code.tree_hash for restart in record.restarts):
        return "went on with other code than it began with: there is no one state to repeat."
    return "" if COMMIT.fullmatch(record.code.commit or "") else "has no commit in its record."


def check(original: Original, repository: Path, *, yes: bool) -> None:
    """
    Raises:
        UserError: it cannot be repeated here, or nobody here vouches for it.
    """
    record, run_id = original.record, original.run_id
    if found := obstacle(record):
        raise UserError(f"{run_id} {found}")
    commit = record.code.commit
    if _git(repository, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise UserError(f"The commit {commit} of {run_id} is not in this clone: git fetch it first.")
    if not (original.is_vouched or yes):
        raise UserError(
            f"{run_id} is not from here (its folder lacks your signature, its record is not as in git), and names "
            "code that would run as you: read the lines above and its diff, then give --yes."
        )


def said_before(original: Original) -> Iterator[str]:
    """What is about to run, and what differs from the machine that it ran on."""
    code, now = original.record.code, versions()
    changes = f" with a diff of {len(original.diff.splitlines())} lines" if code.dirty else ""
    yield f"code     {code.commit}{changes}"
    yield f"options  {' '.join(original.words) or '(none)'}"
    unlike = [
        f"{name} {then} (here {now[name]})"
        for name, then in original.record.versions.items()
        if name in now and then != now[name]
    ]
    if len(original.record.hosts) == 1 and original.record.hosts[0].cores not in (None, available_cores()):
        unlike.append(f"{original.record.hosts[0].cores} cores (here {available_cores()})")
    yield f"differs  {', '.join(unlike)}: bits may differ too" if unlike else "packages as recorded"


def clone(original: Original, repository: Path, target: Path) -> None:
    """The run's code, as it was, into `target`.

    Raises:
        UserError: commit and diff do not give the code that the record says.
    """
    code = original.record.code
    _do(["git", "clone", "--quiet", "--shared", "--no-checkout", str(repository), str(target)])
    _do(["git", "-C", str(target), "checkout", "--quiet", "--detach", str(code.commit)])
    if code.dirty:
        diff = original.diff.rstrip("\n") + "\n"
        _do(["git", "-C", str(target), "apply", "--whitespace=nowarn", "-"], diff, "its diff was cut or redacted")
    if tree_hash(target) != code.tree_hash:
        raise UserError(
            f"The code of {original.run_id} cannot be had again: its commit and diff give other files in src and "
            "configs than its record says (a diff leaves out what is large, secret or ignored by git)."
        )


def _do(command: list[str], given: str = "", hint: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())[:300]
        raise UserError(f"git {command[3]} failed{f', {hint}' if hint else ''}: {said}.")


def words_again(original: Original, into: Path) -> list[str]:
    """The run's options, its places replaced."""
    record = original.record
    kept = [word for word in original.words if _key(word).split(".")[0] not in OF_A_PLACE]
    if (record.world_size or 1) > 1 and not any(_key(word) == "trainer.devices" for word in kept):
        kept.append(f"trainer.devices={record.devices}")  # of torchrun or SLURM
    if record.restarts and record.accumulate_grad_batches and not states_accumulation(kept):
        kept.append(f"{ACCUMULATION}={record.accumulate_grad_batches}")  # an earlier start may have stated it
    if record.initial_weights:
        kept.append(f"ckpt_path={record.initial_weights}")
    places = {"log_dir": into / "logs", "logbook_dir": into / "logbook", "data_dir": original.data_dir}
    return [*kept, "run_id=again", *(f"paths.{key}={_quoted(str(path))}" for key, path in places.items())]


def _key(word: str) -> str:
    return word.split("=")[0].lstrip("+~").split("@")[0]


def _quoted(path: str) -> str:
    """As Hydra reads it."""
    return path if re.fullmatch(r"[\w./-]+", path) else json.dumps(path)


def run_again(original: Original, into: Path, repository: Path) -> tuple[int, RunFolder]:
    """The exit code, and the folder of the repetition."""
    code = into / "clone"
    command = [sys.executable, str(code / "src" / "train.py"), *words_again(original, into)]
    done = subprocess.run(command, cwd=repository, env={**environment(), "PYTHONPATH": str(code / "src")})
    return done.returncode, RunFolder(into / "logs" / "train" / "runs" / "again")


def _git(repository: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails."""
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, errors="replace")
    return done.stdout if done.returncode == 0 else None
