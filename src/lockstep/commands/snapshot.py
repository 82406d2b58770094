"""Run a copy of the present code, so that later edits do not reach the run: `snapshot=true`."""

import logging
import os
import shutil
import sys
import time
from pathlib import Path

from lockstep.process.environment import environment, set_variables
from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.records.provenance import CODE_PATHS, git, list_code_files

log = logging.getLogger(__name__)

SNAPSHOT_VARIABLE = "LOCKSTEP_SNAPSHOT"


def refuse_if_not_snapshot() -> None:
    """Raise UserError if this process does not run from a snapshot, as where a yaml asks for it."""
    if SNAPSHOT_VARIABLE not in environment():
        raise UserError("snapshot: true works on the command line alone: give snapshot=true.")


def run_from_snapshot(argv: list[str]) -> None:
    """Start the same command, in this process, from a git worktree with the uncommitted changes.

    It returns if the process already runs from a snapshot. The worktree stays in logs/code for the
    jobs that read it.

    Raises:
        UserError: there is no commit, or another launcher has started the ranks.
    """
    if SNAPSHOT_VARIABLE in environment():
        return
    if {"RANK", "SLURM_PROCID"} & environment().keys():
        raise UserError(
            "snapshot=true is for a command that starts its ranks itself: with this launcher use a "
            "git worktree."
        )

    folder = REPOSITORY / "logs/code" / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{os.getpid()}"
    # git prints "HEAD is now at …" where it has made the worktree.
    output, complaint = git(REPOSITORY, "worktree", "add", "--detach", str(folder), "HEAD")
    if not output:
        raise UserError(
            f"snapshot=true needs a git repository with a commit ({complaint.strip()})."
        )
    # The project may be a folder of a larger repository.
    prefix, _ = git(REPOSITORY, "rev-parse", "--show-prefix")
    project = folder / prefix.removesuffix("\n")
    _copy_changes(project)
    log.info(
        f"snapshot of the code: {folder}; when its jobs have ended, remove it with "
        "git worktree remove --force"
    )

    script = project / Path(sys.argv[0]).resolve().relative_to(REPOSITORY)
    command = [sys.executable, str(script), *argv]
    if not any(argument.startswith("paths.root_dir=") for argument in argv):
        # Runs and data stay where they are without a snapshot.
        command.append(f"paths.root_dir={REPOSITORY}")
    sys.stdout.flush()
    set_variables({SNAPSHOT_VARIABLE: "1"})
    os.execv(sys.executable, command)


def _copy_changes(folder: Path) -> None:
    """Copy the uncommitted changes of the project into its folder of a worktree.

    Raises:
        UserError: git cannot list the changes.
    """
    # The worktree has the commit HEAD. Changes since then may be staged.
    listing = ("diff", "--name-only", "-z", "--no-renames", "--relative", "HEAD", "--", *CODE_PATHS)
    changed_names, complaint = git(REPOSITORY, *listing)
    if complaint and not changed_names:
        raise UserError(f"snapshot=true cannot list the changed files ({complaint.strip()}).")
    for name in [*changed_names.split("\0")[:-1], *list_code_files(REPOSITORY, "--others")]:
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
        else:
            # It was deleted since the commit.
            (folder / name).unlink(missing_ok=True)
