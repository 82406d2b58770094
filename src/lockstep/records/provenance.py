"""The origin of a run: commit, the state of the code, package versions, host. Imports no torch."""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.process.environment import available_cores
from lockstep.process.project import REPOSITORY
from lockstep.records.config import Config, flatten

CODE_PATHS = ("src", "configs", "requirements.txt")
GIT_TIMEOUT_S = 20
PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "hydra-core",
    "timm",
    "numpy",
    "boto3",
    "tensorboard",
)
DIFF_LIMIT = 200_000  # characters
# The head of a binary file in a patch, before the line that says that the file differs.
HEAD_OF_BINARY = re.compile(
    r"^diff --git .*\n(?:(?!diff )[a-z].*\n)*(?=Binary files )", re.MULTILINE
)
# With these options a patch does not depend on the user's git config.
DIFF = ("diff", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
# As {"packages": {"torch": "2.14.1"}}.
Fingerprint = dict[str, dict[str, str]]
REMEDIES = {
    "code": "make src, configs and requirements.txt equal on all nodes",
    "options": "give all nodes the same options",
    "packages": "run make install there",
}


def code_state(repository: Path) -> dict[str, Any]:
    """Return commit, dirty and tree_hash. If the commit is unknown, return the reason.

    Only changes below CODE_PATHS make a run dirty, and not pages of the logbook.
    """
    # The user's git config may hide new files.
    options = ("--porcelain=v2", "--branch", "--untracked-files=normal")
    status, complaint = git(repository, "status", *options, "--", *CODE_PATHS)
    heads = [line.split()[2] for line in status.splitlines() if line.startswith("# branch.oid")]
    state = {"commit": None, "dirty": None, "tree_hash": tree_hash(repository)}
    if heads and heads[0] != "(initial)":
        is_dirty = any(not line.startswith("#") for line in status.splitlines())
        return {**state, "commit": heads[0], "dirty": is_dirty}

    # launch/Dockerfile writes this file, because an image holds no .git.
    commit = repository / "COMMIT"
    if commit.is_file():
        return {**state, **_read_commit_of_image(commit)}
    if heads:
        return {**state, "commit_unknown": "no commit yet"}

    # git says how to trust a repository that belongs to another user.
    lines = [line.strip() for line in complaint.split("\n")]
    reason = lines[0].removeprefix("fatal: ").replace(str(repository), "this folder")
    remedies = [line for line in lines if line.startswith("git config")]
    return {**state, "commit_unknown": ": ".join([reason, *remedies])}


def _read_commit_of_image(path: Path) -> dict[str, Any]:
    """Return the commit of which an image was built, with -dirty behind it if code had changed."""
    text = path.read_text().strip()
    if not text:
        return {"commit_unknown": "the image was built without COMMIT"}
    return {"commit": text.removesuffix("-dirty"), "dirty": text.endswith("-dirty") or None}


def tree_hash(repository: Path) -> str:
    """Return the sha256 of the names and bytes of all code and config files.

    It is equal on nodes that run the same code.
    """
    digest = hashlib.sha256()
    for name in CODE_PATHS:
        top = repository / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix in (".py", ".yaml", ".txt") and path.is_file():
                digest.update(f"{path.relative_to(repository)}\0".encode())
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def code_diff(repository: Path) -> str:
    """Return a patch for `git apply` with the changes of the code since HEAD.

    It is cut at DIFF_LIMIT. A binary file has only the line "Binary files … differ", which
    `git apply` skips. Bytes that are not UTF-8 are surrogate escapes, so the text has to be written
    with errors="surrogateescape".
    """
    diff, _ = git(repository, *DIFF, "HEAD", "--", *CODE_PATHS)
    for name in list_code_files(repository, "--others"):
        if len(diff) > DIFF_LIMIT:
            break
        new_file, _ = git(repository, *DIFF, "--no-index", "--", os.devnull, name, other_success=1)
        diff += new_file
    diff = HEAD_OF_BINARY.sub("", diff)
    if len(diff) > DIFF_LIMIT:
        return diff[:DIFF_LIMIT] + "\n… cut here\n"
    return diff


def list_code_files(repository: Path, *kinds: str) -> list[str]:
    """Return the code files that git lists: new ones for --others, changed ones for --modified."""
    names, _ = git(repository, "ls-files", "-z", *kinds, "--exclude-standard", "--", *CODE_PATHS)
    return names.split("\0")[:-1]


def git(repository: Path, *arguments: str, other_success: int = 0) -> tuple[str, str]:
    """Return the output of git and its errors. Bytes that are not UTF-8 are surrogate escapes.

    Args:
        other_success: an exit code besides 0 that means success.
    """
    command = ["git", "-C", str(repository), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S)
    except OSError:
        return "", "git is not installed"
    except subprocess.TimeoutExpired:
        return "", f"git took longer than {GIT_TIMEOUT_S} s"
    complaint = process.stderr.decode(errors="replace")
    if process.returncode not in (0, other_success):
        return "", complaint
    # Line ends stay as they are, because a patch needs them.
    return process.stdout.decode(errors="surrogateescape"), complaint


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that influence the results of a run."""
    version_of = {"python": platform.python_version(), **dict.fromkeys(PACKAGES, "missing")}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version_of[name] = metadata.version(name)
    return version_of


def describe_host(node_rank: int) -> dict[str, Any]:
    return {
        "node_rank": node_rank,
        "host": platform.node(),
        "cores": available_cores(),
        "system": platform.platform(),
    }


def take_fingerprint(config: Config, is_equal_on_all_ranks: Callable[[str], bool]) -> Fingerprint:
    """Return the code, options and packages that must be equal on all nodes of a run.

    The folders of a node do not count.

    Args:
        is_equal_on_all_ranks: a function that returns whether the option with a key must be equal.
    """
    options = {}
    for key, value in flatten(dict(config)).items():
        if is_equal_on_all_ranks(key):
            text = str(value)
            for folder in config["paths"].values():
                text = text.replace(str(folder), "")
            options[key] = text
    code = {"code": tree_hash(REPOSITORY)[:12]}
    return {"code": code, "options": options, "packages": versions()}


def describe_difference(
    fingerprint: Fingerprint, first_fingerprint: Fingerprint, node: str, first_node: str
) -> str | None:
    """Return a sentence on the first difference between two nodes, with its remedy.

    Args:
        fingerprint, first_fingerprint: the results of `take_fingerprint` on the two nodes.
        node, first_node: the names of the two nodes in the sentence.
    """
    for kind, remedy in REMEDIES.items():
        values = fingerprint[kind]
        first_values = first_fingerprint[kind]
        for key in sorted(values.keys() | first_values.keys()):
            value = values.get(key, "missing")
            first_value = first_values.get(key, "missing")
            if value != first_value:
                return f"{node} has {key}={value}, {first_node} has {key}={first_value}: {remedy}."
    return None
