"""A project of one's own: what it has, and how a newer release of the template comes into it."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def run(*command, cwd):
    """(exit code, output)"""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def git(*words, cwd):
    code, said = run("git", "-c", "user.name=me", "-c", "user.email=me@here", *words, cwd=cwd)
    assert code == 0, said
    return said.strip()


def project(*words, at):
    return run(sys.executable, at / "launch/project.py", *words, cwd=at)


def change(folder, message, **files):
    """Commit other contents: {path with __ for /: text or function of the text before}."""
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content(path.read_text()) if callable(content) else content)
    git("add", "-A", cwd=folder)
    git("commit", "-qm", message, cwd=folder)


def with_line(number, line):
    """A function that puts a line into a text before its line of that number."""

    def put(text):
        lines = text.splitlines(keepends=True)
        return "".join([*lines[:number], f"{line}\n", *lines[number:]])

    return put


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """This template as it is now, as v1.0.0, and two releases after it."""
    folder = tmp_path_factory.mktemp("template") / "lockstep"
    git("clone", "-q", "--no-tags", ROOT, folder, cwd=ROOT)
    git("remote", "remove", "origin", cwd=folder)  # else projects are upgraded from there
    listed = git("ls-files", "-com", "--exclude-standard", cwd=ROOT).splitlines()  # as it lies here, committed or not
    for path in {path for path in listed if (ROOT / path).is_file()}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((ROOT / path).read_bytes())
    git("add", "-A", cwd=folder)
    git("commit", "-qm", "as it is", "--allow-empty", cwd=folder)
    git("tag", "v1.0.0", cwd=folder)
    change(
        folder, "more", src__lockstep__runs__errors_DOT_py=with_line(1, "# newer"),
        src__models__newer_DOT_py="NEW = 1\n", configs__model__newer_DOT_yaml="# A newer one\n",
        docs__howto_DOT_md=with_line(3, "Newer words."),
    )  # fmt: skip
    git("tag", "v1.1.0", cwd=folder)
    change(folder, "machinery moves", src__lockstep__runs__batch_DOT_py=with_line(1, "# newer still"))
    git("mv", "src/lockstep/runs/redact.py", "src/lockstep/runs/hide.py", cwd=folder)
    git("commit", "-qm", "a module has another name", cwd=folder)
    git("tag", "v1.2.0", cwd=folder)
    return folder


@pytest.fixture(scope="session")
def first(template, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "birds"
    git("checkout", "-q", "v1.0.0", cwd=template)
    code, said = project("new", "birds", str(folder), at=template)
    assert code == 0, said
    return folder


@pytest.fixture
def made(first, tmp_path):
    """As somebody else has it who cloned the project."""
    git("clone", "-q", first, tmp_path / "birds", cwd=first)
    return tmp_path / "birds"


def test_a_new_project_is_whole_and_clean(made):
    assert git("status", "--porcelain", cwd=made) == ""
    assert git("log", "--format=%s", cwd=made) == "Lockstep v1.0.0"
    there = {path.name for path in made.iterdir()}
    assert {"README.md", "Makefile", "src", "configs", "tests", "docs", "logbook", "nullgpu"} <= there
    assert not {"benchmarks", "CHANGELOG.md", "CONTRIBUTING.md", ".ci", "LICENSE"} & there
    assert [path.name for path in (made / "logbook").iterdir()] == ["README.md"]
    assert (made / "README.md").read_text().startswith("# birds\n")
    assert 'name = "birds"' in (made / "pyproject.toml").read_text()
    assert (made / "src/lockstep/LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "{{" not in "".join((made / name).read_text() for name in ("README.md", "AGENTS.md"))


def test_every_link_of_a_new_project_leads_somewhere(made):
    for page in [made / "README.md", *(made / "docs").glob("*.md")]:
        for place in LINK.findall(page.read_text()):
            assert "://" in place or (page.parent / place).exists(), f"{page.name}: {place}"


def test_its_makefile_runs_its_own_tests_alone(made):
    code, said = run("make", "-n", "test", "check", "format", "docs", "lock", cwd=made)
    assert code == 0 and "-m pytest -n 3" in said and "benchmarks" not in said
    assert "ruff check --fix-only src tests\n" in said
    code, said = run("make", "help", cwd=made)
    assert "make upgrade" in said and "make soak" not in said and "make new" not in said
    for target in ("new", "test-all", "site", "release", "soak", "assignment"):
        code, said = run("make", "-n", target, cwd=made)
        assert code == 2 and "No rule to make target" in said, said


def test_a_fault_of_format_is_answered_with_what_mends_it(made):
    make = ["make", f"VENV={sys.prefix}", "-o", "install-dev"]  # nothing is installed
    (made / "src/models/mine.py").write_text("import os\nx  =  1\n")
    code, said = run(*make, "check", cwd=made)
    assert code == 2 and "make format mends the format, and of lint what ruff can.\n" in said, said
    assert run(*make, "format", cwd=made)[0] == 0
    assert (made / "src/models/mine.py").read_text() == "x = 1\n"


@pytest.mark.slow
def test_its_tests_pass(made):
    os.symlink(ROOT / ".venv", made / ".venv")
    code, said = run(sys.executable, "-m", "pytest", "-q", "-n", "2", cwd=made)
    assert code == 0, said


def test_an_upgrade_brings_what_is_new_and_keeps_what_is_yours(made):
    change(made, "mine", src__models__mine_DOT_py="MINE = 1\n", src__classifier_DOT_py=with_line(1, "# mine"))
    change(made, "a fix", src__lockstep__runs__errors_DOT_py=lambda text: f"{text}\n# my fix\n")
    code, said = project("upgrade", "v1.1.0", at=made)
    assert code == 0 and "Upgraded to v1.1.0" in said, said
    assert "Machinery that this project has changed" in said and "src/lockstep/runs/errors.py" in said
    errors = (made / "src/lockstep/runs/errors.py").read_text()
    assert "# newer" in errors and errors.endswith("# my fix\n")
    assert (made / "src/models/newer.py").exists() and (made / "src/models/mine.py").exists()
    assert (
        "# mine" in (made / "src/classifier.py").read_text() and "Newer words." in (made / "docs/howto.md").read_text()
    )
    assert (made / "README.md").read_text().startswith("# birds\n") and git("status", "--porcelain", cwd=made) == ""
    code, said = project("upgrade", "v1.1.0", at=made)
    assert code == 0 and "has what v1.1.0 has already" in said
    code, said = project("upgrade", "v1.2.0", at=made)
    assert code == 0 and (made / "src/lockstep/runs/hide.py").exists()
    assert not (made / "src/lockstep/runs/redact.py").exists()


@pytest.mark.slow
def test_lines_that_both_sides_changed_are_named_and_nothing_is_lost(made):
    change(made, "mine", src__lockstep__runs__errors_DOT_py=with_line(1, "# mine"))
    before = git("rev-parse", "HEAD", cwd=made)
    code, said = project("upgrade", "v1.1.0", at=made)
    assert code == 2 and "1 files were changed here and in v1.1.0: src/lockstep/runs/errors.py." in said
    assert "git merge --abort" in said
    git("merge", "--abort", cwd=made)
    assert git("rev-parse", "HEAD", cwd=made) == before and git("status", "--porcelain", cwd=made) == ""


@pytest.mark.slow
def test_a_copy_of_the_whole_template_becomes_a_project_in_its_place(template, tmp_path):
    git("clone", "-q", "--branch", "v1.0.0", template, tmp_path / "copy", cwd=tmp_path)
    code, said = project("new", "birds", ".", at=tmp_path / "copy")
    assert code == 0, said
    assert not (tmp_path / "copy/benchmarks").exists() and (tmp_path / "copy/README.md").read_text().startswith(
        "# birds"
    )
    code, said = project("upgrade", "v1.1.0", at=tmp_path / "copy")
    assert code == 0, said
    assert (tmp_path / "copy/src/models/newer.py").exists()


def test_what_cannot_be_is_said_in_a_sentence(template, made, tmp_path):
    assert project("new", "My Birds", str(tmp_path / "x"), at=template) == (
        2, "error: NAME=My Birds: take lower-case letters, digits, - and _, beginning with a letter.\n",
    )  # fmt: skip
    assert project("new", "birds", "", at=template) == (2, "error: DIR= is missing: make new NAME=birds DIR=../birds\n")
    code, said = project("new", "birds", str(made), at=template)
    assert code == 2 and "is not empty" in said
    code, said = project("upgrade", "v9", at=made)
    assert code == 2 and "FROM=ADDRESS" in said
    (made / "README.md").write_text("changed")
    code, said = project("upgrade", "v1.1.0", at=made)
    assert code == 2 and "not committed" in said
    git("checkout", "-q", "v1.0.0", cwd=template)
    code, said = project("upgrade", "v1.1.0", at=template)
    assert code == 2 and "was not made by `make new`" in said


def edits(seed):
    """What somebody does to their project: parts of their own, values in configs, sometimes a line of machinery."""
    chance = random.Random(seed)
    done = {
        f"src__models__own{seed}_DOT_py": "OWN = 1\n",
        f"configs__experiment__own{seed}_DOT_yaml": "# Mine\nseed: 1\n",
    }
    for name in ("configs__model__small_cnn_DOT_yaml", "configs__train_DOT_yaml", "src__classifier_DOT_py"):
        if chance.random() < 0.5:
            done[name] = lambda text: f"{text}\n# mine\n"
    if chance.random() < 0.5:
        done["src__lockstep__runs__errors_DOT_py"] = with_line(chance.randint(1, 30), "# mine")
    return done


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_projects_over_three_releases(first, tmp_path):
    conflicts = []
    for seed in range(20):
        folder = tmp_path / str(seed)
        git("clone", "-q", first, folder, cwd=first)
        change(folder, "mine", **edits(seed))
        for release in ("v1.1.0", "v1.2.0"):
            code, said = project("upgrade", release, at=folder)
            if code:
                conflicts.append((seed, release, said))
                break
        else:
            assert (folder / f"src/models/own{seed}.py").exists() and (folder / "src/lockstep/runs/hide.py").exists()
    assert len(conflicts) <= 2, conflicts
    assert all("errors.py" in said for _, _, said in conflicts)
