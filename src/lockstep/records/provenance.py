"""The origin of a run: commit, the state of the code, package versions, host. Imports no torch."""

import contextlib
import hashlib
import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.process.environment import available_cores
from lockstep.process.project import REPOSITORY
from lockstep.records.config import Config, flatten

CODE = ("src", "configs", "requirements.txt")
GIT_TIMEOUT_S = 20
PACKAGES = ("torch", "torchvision", "lightning", "hydra-core", "timm", "numpy", "boto3", "tensorboard")
DIFF_LIMIT = 200_000  # characters
PLAIN = ("--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")  # whatever the user has configured
Fingerprint = dict[str, dict[str, str]]  # kind → name → value
MENDS = {
    "code": "make src, configs and requirements.txt equal on all nodes", "options": "give all nodes the same options",
    "packages": "run make install there",
}  # fmt: skip


def code_state(repository: Path) -> dict[str, Any]:
    """Return commit, dirty and tree_hash, or why a commit is unknown; pages of the logbook do not make a run dirty."""
    status, complaint = git(repository, "status", "--porcelain=v2", "--branch", "--", *CODE)
    head = next((line.split()[2] for line in status.splitlines() if line.startswith("# branch.oid")), "")
    found = {"commit": None, "dirty": None, "tree_hash": tree_hash(repository)}
    if head not in ("", "(initial)"):
        is_dirty = any(not line.startswith("#") for line in status.splitlines())
        return {**found, "commit": head, "dirty": is_dirty}
    if (repository / "COMMIT").is_file():  # which launch/Dockerfile writes: an image holds no .git
        return {**found, "commit": (repository / "COMMIT").read_text().strip()}
    lines = [line.strip() for line in complaint.split("\n")]  # no repository, or another user's: how to trust it
    reason = "no commit yet" if head else lines[0].removeprefix("fatal: ").replace(str(repository), "this folder")
    return {**found, "commit_unknown": ": ".join([reason, *(line for line in lines if line.startswith("git config"))])}


def tree_hash(repository: Path) -> str:
    """Return the sha256 of the names and bytes of all code and config files: equal on nodes that run the same code."""
    digest = hashlib.sha256()
    for name in CODE:
        top = repository / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix in (".py", ".yaml", ".txt") and path.is_file():
                digest.update(f"{path.relative_to(repository)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def code_diff(repository: Path) -> str:
    """Return what `git apply` takes: `git diff HEAD` of the code and its new files, cut at DIFF_LIMIT."""
    diff = git(repository, "diff", *PLAIN, "HEAD", "--", *CODE)[0]
    new, _ = git(repository, "ls-files", "-z", "--others", "--exclude-standard", "--", *CODE)
    for name in filter(None, new.split("\0")):
        if len(diff) <= DIFF_LIMIT:
            diff += git(repository, "diff", *PLAIN, "--no-index", "--", os.devnull, name, differs=1)[0]
    return diff if len(diff) <= DIFF_LIMIT else diff[:DIFF_LIMIT] + "\n… cut here\n"


def git(repository: Path, *arguments: str, differs: int = 0) -> tuple[str, str]:
    """Return what git prints and its errors; nothing printed counts unless it ends with 0 or with `differs`."""
    command = ["git", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=GIT_TIMEOUT_S)
    except OSError:
        return "", "git is not installed"
    except subprocess.TimeoutExpired:
        return "", f"git took longer than {GIT_TIMEOUT_S} s"
    return done.stdout if done.returncode in (0, differs) else "", done.stderr


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version(), **dict.fromkeys(PACKAGES, "missing")}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def host(node_rank: int) -> dict[str, Any]:
    return {"node_rank": node_rank, "host": platform.node(), "cores": available_cores(), "system": platform.platform()}


def fingerprint(config: Config, is_equal_on_all_ranks: Callable[[str], bool]) -> Fingerprint:
    """Return what must be equal on all nodes of a run, whatever folders a node has.

    Args:
        is_equal_on_all_ranks: returns whether an option must be equal, by its key.
    """
    flat = flatten(dict(config))
    options = {key: str(value) for key, value in flat.items() if is_equal_on_all_ranks(key)}
    for folder in map(str, config["paths"].values()):
        options = {key: text.replace(folder, "") for key, text in options.items()}
    return {"code": {"code": tree_hash(REPOSITORY)[:12]}, "options": options, "packages": versions()}


def first_difference(own: Fingerprint, first: Fingerprint, who: str, who_first: str) -> str | None:
    """Return a sentence on the first thing in which `who` differs from `who_first`, and how to fix it."""
    for kind, mend in MENDS.items():
        for key in sorted({*own[kind], *first[kind]}):
            here, there = (found[kind].get(key, "missing") for found in (own, first))
            if here != there:
                return f"{who} has {key}={here}, {who_first} has {key}={there}: {mend}."
    return None
