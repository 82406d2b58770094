"""launch/install.sh: the order of its steps, seen by stubs in place of Python and uv.

What uv is asked for each build of PyTorch is in test_project_files.py.
"""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "launch" / "install.sh"
REQUIREMENTS = """\
cuda-toolkit==12.8.1
lightning==2.5.0
torch==2.9.0
torchvision==0.24.0
"""
# It notes its arguments, and fails where they contain $FAILS.
STUB = """\
#!/bin/bash
echo "${0##*/} $*" >>steps.txt
if [ -n "$FAILS" ] && [[ "$*" == *"$FAILS"* ]]; then exit 1; fi
case "$*" in
*sysconfig*) echo .venv/lib/python3.12/site-packages ;;
esac
"""
UV_INSTALL = "uv pip install --python .venv/bin/python"
CHECKED = "--require-hashes --compile-bytecode"


@pytest.fixture
def project(tmp_path):
    """A folder with stubs of Python and uv, and a package for src/."""
    (tmp_path / ".venv/lib/python3.12/site-packages").mkdir(parents=True)
    (tmp_path / "src/lockstep").mkdir(parents=True)
    (tmp_path / "requirements.txt").write_text(REQUIREMENTS)
    (tmp_path / "pyproject.toml").write_text("")
    for name in ("python", "uv"):
        stub = tmp_path / ".venv/bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(STUB)
        stub.chmod(0o755)
    return tmp_path


def install(project, device="", fails=""):
    """Run the script; return how it ended, and what it asked Python and uv for."""
    variables = {**os.environ, "DEVICE": device, "FAILS": fails}
    command = ["bash", str(SCRIPT), "requirements.txt"]
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True)
    steps = project / "steps.txt"
    return done, steps.read_text().splitlines() if steps.exists() else []


def positions(steps, *parts):
    """Return the number of the only step with each part."""
    numbers = []
    for part in parts:
        [number] = [number for number, step in enumerate(steps) if part in step]
        numbers.append(number)
    return numbers


def test_requirements_are_installed_before_sources_are_compiled(project):
    done, steps = install(project)
    assert done.returncode == 0, done.stderr
    packages = f"{UV_INSTALL} {CHECKED} -r requirements.txt"
    assert steps[:2] == [packages, "python -m compileall -q src"]
    assert (project / ".venv/.device").read_text() == "\n"
    path = project / ".venv/lib/python3.12/site-packages/lockstep.pth"
    assert path.read_text() == f"{project}/src\n"


def test_pip_installs_with_hashes_where_uv_cannot_be_had(project):
    (project / ".venv/bin/uv").unlink()
    done, steps = install(project, fails="launch/uv.txt")
    assert done.returncode == 0 and "going on with pip" in done.stdout
    assert steps[:4] == [
        "python -m pip install -q --require-hashes -r launch/uv.txt",
        "python -m pip install --require-hashes -r requirements.txt",
        "python -m compileall -q -j 0 .venv/lib",
        "python -m compileall -q src",
    ]


def test_the_package_of_an_old_name_goes_first(project):
    (project / ".venv/lib/python3.12/site-packages/lockstep-2.0.0.dist-info").mkdir()
    _, steps = install(project)
    assert steps[0] == "python -m pip uninstall -q -y lockstep"
    assert positions(steps, "uninstall", "-r requirements.txt") == [0, 1]


@pytest.mark.parametrize("fails", ["--dry-run", "-r .venv/rest.txt", "--compile-bytecode --python"])
def test_a_failed_installation_keeps_the_build_to_take_again(project, fails):
    (project / ".venv/.device").write_text("cu128\n")
    done, steps = install(project, device="cu126", fails=fails)
    assert done.returncode != 0 and fails in steps[-1]
    assert (project / ".venv/.device").read_text() == "cu128\n"


def test_the_repository_is_installed_in_editable_form_at_last(project):
    (project / "pyproject.toml").write_text("[build-system]\n")
    _, steps = install(project)
    assert positions(steps, "-r requirements.txt", "compileall", "-e .") == [0, 1, 2]
