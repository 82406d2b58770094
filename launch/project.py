"""Make a project of one's own from this template, and upgrade it later.

    make new NAME=birds DIR=../birds      from a clone of the template: its machinery, recipes and docs, your own README
    make new NAME=birds DIR=.             the same within a copy that a git host made ("use this template")
    make upgrade TO=v1.1.0                in such a project: the template's newer release, merged by git

What came from the template is a commit of its own in the project's history, with the line `Lockstep-template: <commit>`
in its message. An upgrade puts the new release on top of the newest such commit and merges that, so git knows which
lines you changed, which the template changed, and which both did. Needs git, tar and Python only, nothing installed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parents[1]
OWN_FILES = "launch/project"  # what a project has in place of the template's: {{name}} stands for its name
TAKEN = (
    ".devcontainer", ".dockerignore", ".github/workflows/checks.yml", ".gitignore", ".pre-commit-config.yaml",
    ".vscode", "LICENSE", "Makefile", "configs", "docs", "launch", "logs", "nullgpu", "pyproject.toml",
    "requirements-dev.txt", "requirements-hivemind.txt", "requirements-ray.txt", "requirements.txt", "src",
)  # fmt: skip
LEFT = (
    OWN_FILES, "docs/assets", "docs/pictures", "docs/make_pictures.py", "docs/site_hooks.py",
    "docs/assignment.md", "launch/release.py", "launch/vit_exercise.sh",
)  # fmt: skip
LEFT_TARGETS = (
    "assignment", "new", "test-all", "test-beside", "test-alone", "test-nullgpu", "site", "$(VENV)/site/.installed",
    "audit", "parity", "bench", "soak", "release",
)  # fmt: skip
MACHINERY = ("src/lockstep", "src/hydra_plugins", "launch", "nullgpu")
TRAILER, SOURCE = "Lockstep-template", "Lockstep-from"
NAME = re.compile(r"[a-z][a-z0-9_-]{0,49}")


class Refused(Exception):
    """One sentence for the user."""


def git(*words: str, cwd: Path, env: dict[str, str] | None = None, check: bool = True) -> str:
    """What git prints. A machine on which nobody has told git their name commits as lockstep."""
    who = {}
    for role in ("AUTHOR", "COMMITTER"):
        who |= {f"GIT_{role}_NAME": "lockstep", f"GIT_{role}_EMAIL": "lockstep@localhost"}
    known = subprocess.run(["git", "config", "user.email"], cwd=cwd, capture_output=True).returncode == 0
    environment = {**({} if known else who), **os.environ, **(env or {})}
    done = subprocess.run(["git", *words], cwd=cwd, env=environment, capture_output=True, text=True)
    if check and done.returncode:
        raise Refused(f"git {words[0]} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return done.stdout.strip()


# What a project is made of


def render(template: Path, name: str, folder: Path) -> None:
    """The files of a project called `name`, as the template's commit that is checked out in `template` has them."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=template, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", scratch], input=archive, check=True)  # tarfile has no filter in 3.11.2
        for path in TAKEN:
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (whole / path).rename(target) if (whole / path).is_file() else shutil.copytree(whole / path, target)
    for path in LEFT:
        shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink()
    (folder / "LICENSE").rename(folder / "src/lockstep/LICENSE")  # of the machinery; yours is up to you
    own = template / OWN_FILES
    for path in [path for path in own.rglob("*") if path.is_file()]:
        target = folder / path.relative_to(own)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text().replace("{{name}}", name))
    _rewrite(folder / "Makefile", _without_targets)
    _rewrite(folder / "pyproject.toml", lambda text: _renamed(text, name))
    for page in (folder / "docs").glob("*.md"):
        _rewrite(page, lambda text, page=page: _without_dead_links(text, page))


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def _without_targets(makefile: str) -> str:
    """Paragraphs of what a project has no tests or benchmarks for are left out, and those folders with them."""
    kept = [part for part in makefile.split("\n\n") if not part.startswith(tuple(f"{name}:" for name in LEFT_TARGETS))]
    return "\n\n".join(kept).replace(" src tests benchmarks nullgpu launch", " src tests")


def _renamed(pyproject: str, name: str) -> str:
    head = r'^name = "lockstep"\nversion = .*\ndescription = .*'
    text = re.sub(head, f'name = "{name}"\nversion = "0.1.0"', pyproject, count=1, flags=re.MULTILINE)
    return text.replace('"src", "tests/harness", "nullgpu"', '"src", "nullgpu"')


def _without_dead_links(text: str, page: Path) -> str:
    """Of a link to a page that only the template has its words are left."""

    def kept(link: re.Match) -> str:
        place = link[2].partition("#")[0]
        return link[0] if "://" in place or not place or (page.parent / place).exists() else link[1]

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", kept, text)


# Commits


def commit_of(rendered: Path, repository: Path, template: Path, source: str, version: str, parent: str | None) -> str:
    """A commit in `repository` of just these files; no branch and no file of the repository changes."""
    with tempfile.TemporaryDirectory() as scratch:
        own = {"GIT_INDEX_FILE": str(Path(scratch) / "index"), "GIT_WORK_TREE": str(rendered)}
        folder = Path(git("rev-parse", "--absolute-git-dir", cwd=repository))
        own["GIT_DIR"] = str(folder)
        git("add", "--all", "--force", ".", cwd=rendered, env=own)
        tree = git("write-tree", cwd=rendered, env=own)
    commit = git("rev-parse", "HEAD", cwd=template)
    message = f"Lockstep {version}\n\n{TRAILER}: {commit}\n{SOURCE}: {source}"
    return git("commit-tree", tree, *(("-p", parent) if parent else ()), "-m", message, cwd=repository)


def last_template_commit(repository: Path) -> str:
    found = git("log", "-1", "--format=%H", f"--grep=^{TRAILER}: ", "HEAD", cwd=repository)
    if not found:
        raise Refused("This repository's history has no commit of the template: it was not made by `make new`.")
    return found


def source_of(template: Path) -> str:
    """The template's address without a password, or its folder."""
    address = git("config", "--get", "remote.origin.url", cwd=template, check=False)
    return re.sub(r"//[^/@]*@", "//", address) or str(template)


def version_of(template: Path) -> str:
    return git("describe", "--tags", "--always", cwd=template)


# The two commands


def new(name: str, where: str) -> None:
    """
    Args:
        where: the folder of the project.
    Raises:
        Refused: the name or the folder cannot be taken.
    """
    if not where:
        raise Refused(f"DIR= is missing: make new NAME={name or 'birds'} DIR=../{name or 'birds'}")
    folder = Path(where)
    if not NAME.fullmatch(name):
        raise Refused(f"NAME={name}: take lower-case letters, digits, - and _, beginning with a letter.")
    here = folder.resolve() == TEMPLATE
    if not here and folder.exists() and any(folder.iterdir()):
        raise Refused(f"DIR={folder} is there already and is not empty: name a new folder.")
    if here:
        _refuse_changes(TEMPLATE)
    with tempfile.TemporaryDirectory() as scratch:
        rendered = Path(scratch) / "project"
        render(TEMPLATE, name, rendered)
        if not here:
            folder.mkdir(parents=True, exist_ok=True)
            git("init", "-q", "-b", "main", cwd=folder)
        parent = git("rev-parse", "HEAD", cwd=folder) if here else None
        made = commit_of(rendered, folder, TEMPLATE, source_of(TEMPLATE), version_of(TEMPLATE), parent)
    git("reset", "-q", "--hard", made, cwd=folder)
    print(f"{name} is in {folder}. Next: cd {folder} && make train")


def upgrade(project: Path, to: str, source: str | None) -> None:
    """
    Raises:
        Refused: there is nothing to go by, or git found lines that both sides changed.
    """
    _refuse_changes(project)
    before = last_template_commit(project)
    where = source or git("log", "-1", f"--format=%(trailers:key={SOURCE},valueonly)", before, cwd=project)
    edited = git("diff", "--stat", before, "HEAD", "--", *MACHINERY, cwd=project)
    if edited:
        print(f"Machinery that this project has changed, which git merges with what is new:\n{edited}\n")
    name = re.search(r'^name = "(.+)"', (project / "pyproject.toml").read_text(), re.M)
    with tempfile.TemporaryDirectory() as scratch:
        template, rendered = Path(scratch) / "template", Path(scratch) / "project"
        try:
            git("clone", "-q", where, str(template), cwd=project)
            git("checkout", "-q", to, cwd=template)
        except Refused as refused:
            raise Refused(f"{refused}. Is the template elsewhere now? make upgrade TO={to} FROM=ADDRESS") from None
        program = template / "launch/project.py"  # the newer release knows its own files
        command = [sys.executable, str(program), "render", name[1] if name else "project", str(rendered)]
        if subprocess.run(command).returncode:
            raise Refused(f"The template's {to} could not be read.")
        made = commit_of(rendered, project, template, where, to, before)
    if git("diff", "--stat", before, made, cwd=project) == "":
        print(f"This project has what {to} has already.")
        return
    git("merge", "-q", "--no-edit", "-m", f"Upgrade to Lockstep {to}", made, cwd=project, check=False)
    if hand := git("diff", "--name-only", "--diff-filter=U", cwd=project).splitlines():
        raise Refused(
            f"{len(hand)} files were changed here and in {to}: {', '.join(hand)}. Choose between the <<<<<<< lines in "
            "each, then: git add -A && git commit --no-edit && make test. To go back: git merge --abort"
        )
    print(f"Upgraded to {to}: {git('diff', '--shortstat', 'HEAD~1', 'HEAD', cwd=project).strip()}. Next: make test")


def _refuse_changes(repository: Path) -> None:
    if git("status", "--porcelain", "--untracked-files=no", cwd=repository):
        raise Refused("There are changes that are not committed: commit or stash them first.")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("new", "render"):
        one = commands.add_parser(command)
        one.add_argument("name")
        one.add_argument("folder")
    one = commands.add_parser("upgrade")
    one.add_argument("to")
    one.add_argument("--from", dest="source")
    given = parser.parse_args(argv)
    try:
        if given.command == "new":
            new(given.name, given.folder)
        elif given.command == "render":
            render(TEMPLATE, given.name, Path(given.folder))
        else:
            upgrade(TEMPLATE, given.to, given.source)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
