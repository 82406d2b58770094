"""The origin of a run: commit, the state of the code, package versions, host. Imports no torch."""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.runs.config import Config


def project_root() -> Path:
    """Return the folder that holds configs/ and src/: of this clone, of the running script, or around the work folder.

    In a project of one's own lockstep is an installed package, and only the script's place says where the project is.
    """
    script, here = Path(sys.argv[0]).resolve(), Path.cwd()
    for folder in (Path(__file__).resolve().parents[3], *script.parents[1:2], here, *here.parents):
        if (folder / "configs" / "train.yaml").is_file():
            return folder
    return here


REPOSITORY = project_root()
CODE = ("src", "configs", "requirements.txt")
PACKAGES = ("torch", "torchvision", "lightning", "hydra-core", "timm", "numpy", "boto3", "tensorboard")
DIFF_LIMIT_BYTES = 200_000
PLAIN = ("--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")  # whatever the user has configured


def code_state(repository: Path) -> Config:
    """Return commit, dirty and tree_hash, and why a commit is unknown; pages of the logbook do not make a run dirty."""
    commit, complaint = _git(repository, "rev-parse", "HEAD")
    dirty = bool(_git(repository, "status", "--porcelain", "--", *CODE)[0]) if commit else None
    of_image = repository / "COMMIT"  # which launch/Dockerfile writes: an image holds no .git
    if not commit and of_image.is_file():
        commit = of_image.read_text().strip()
    found = {"commit": commit or None, "dirty": dirty, "tree_hash": tree_hash(repository)}
    if not commit:  # no repository, or one of another user, with the command that trusts it
        lines = [line.strip() for line in complaint.split("\n")]
        reason = lines[0].removeprefix("fatal: ").replace(str(repository), "this folder")
        found["commit_unknown"] = ": ".join([reason, *(line for line in lines if line.startswith("git config"))])
    return found


def tree_hash(repository: Path) -> str:
    """Sha256 over the names and bytes of all code and config files: equal on every node that runs the same code."""
    digest = hashlib.sha256()
    for name in CODE:
        top = repository / name
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        for path in files:
            if path.suffix in (".py", ".yaml", ".txt") and path.is_file():
                digest.update(f"{path.relative_to(repository)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def code_diff(repository: Path) -> str:
    """Return what `git apply` takes: `git diff HEAD` of the code and its new files, cut at DIFF_LIMIT_BYTES.

    Empty if nothing differs or there is no git.
    """
    parts = [_git(repository, "diff", *PLAIN, "HEAD", "--", *CODE)[0]]
    unknown, _ = _git(repository, "ls-files", "-z", "--others", "--exclude-standard", "--", *CODE)
    for name in filter(None, unknown.split("\0")):
        if sum(map(len, parts)) > DIFF_LIMIT_BYTES:
            break
        path = repository / name
        if path.is_file() and (size := path.lstat().st_size) > DIFF_LIMIT_BYTES:
            parts.append(f"new file {name}: its {size:,} bytes are left out here")
        else:
            parts.append(_git(repository, "diff", *PLAIN, "--no-index", "--", os.devnull, name, differs=1)[0])
    diff = "".join(f"{part}\n" for part in parts if part)
    return diff if len(diff) <= DIFF_LIMIT_BYTES else diff[:DIFF_LIMIT_BYTES] + "\n… cut here\n"


def _git(repository: Path, *arguments: str, differs: int = 0) -> tuple[str, str]:
    """Return what git prints and its errors; nothing printed counts unless it ends with 0 or with `differs`."""
    command = ["git", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "", "git is not installed"
    text = done.stdout.strip("\n") if done.returncode in (0, differs) else ""  # a diff may end in spaces
    return text, done.stderr


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


@dataclass(frozen=True)
class Fingerprint:
    """Values that must be equal on all nodes and ranks of a run."""

    tree_hash: str
    options: dict[str, str]  # by full name
    versions: dict[str, str]

    def difference(self, first: "Fingerprint", who: str, who_first: str) -> str | None:
        """Return a sentence on the first thing in which `who` differs from `who_first`, with what mends it."""
        if self.tree_hash != first.tree_hash:
            code = "code in src, configs or requirements.txt"
            return f"{who} runs with other {code} than {who_first}: make them equal on all nodes."
        for key in sorted({*self.options, *first.options}):
            if (own := self.options.get(key)) != (value := first.options.get(key)):
                return f"{who} has {key}={own}, {who_first} has {key}={value}: give all nodes the same options."
        for name, version in first.versions.items():
            if (own := self.versions.get(name, "missing")) != version:
                return f"{who} has {name} {own}, {who_first} has {version}: run make install there."
        return None


RANK_OWN_KEYS = ("paths", "run_id", "resume", "ckpt_path", "overrides", "sweep_dir")


def fingerprint(config: Config) -> Fingerprint:
    """Return the fingerprint of this process; its options are the same whatever folders a node has."""
    options: dict[str, str] = {}

    def take(node: Config, place: str) -> None:
        for name, value in node.items():
            if isinstance(value, Mapping) and value:
                take(value, f"{place}{name}.")
            else:
                options[f"{place}{name}"] = str(value)

    take({key: value for key, value in config.items() if key not in RANK_OWN_KEYS}, "")
    for folder in map(str, config["paths"].values()):
        options = {key: text.replace(folder, "") for key, text in options.items()}
    return Fingerprint(tree_hash(REPOSITORY), options, versions())


Host = dict[str, Any]  # node_rank, host, cores, system


def host(node_rank: int) -> Host:
    return {"node_rank": node_rank, "host": platform.node(), "cores": available_cores(), "system": platform.platform()}


def available_cores(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may use: its affinity, within the CPU quotas of all control groups above."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return cores
    for _, controllers, group in lines:
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = mount / (controllers and "cpu") / group.strip("/")  # version 2 names no controllers
        for folder in (inner, *inner.parents):
            try:
                if controllers:
                    quota, period = (
                        (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
                    )
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if quota not in ("max", "-1"):
                    cores = max(1, min(cores, int(quota) // int(period)))
            except (OSError, ValueError):
                continue  # the root group, and folders above it, state none
    return cores


def cpu_name() -> str:
    """Return the processor's name as /proc/cpuinfo has it, or the architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return os.uname().machine
