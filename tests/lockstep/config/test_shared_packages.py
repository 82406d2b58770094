"""A user's project has packages of the same names as this project's components."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[3] / "src"
FILES = {
    "experiment.py": "from models import *\nfrom models import Base\nfrom models.own import Net\n"
    "from data.dice import LOSS\n\n\nclass Experiment(Base):\n    net = Net\n    loss = LOSS\n",
    "models/__init__.py": "from .base import Base\nfrom .own import Net\n",
    "models/base.py": "class Base:\n    pass\n",
    "models/own.py": "from .base import Base\n\n\nclass Net(Base):\n    pass\n",
    "data/dice.py": "LOSS = 'dice'\n",
    "data/table.py": "LOSS = 'theirs'\n",
    "metrics/__init__.py": "raise RuntimeError\n",
    "losses/images.csv": "",
}
# As a script begins: the components come first.
BEGINNING = """
import logging, sys
sys.path.insert(0, {src!r})
from lockstep.config.locate import locate
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
"""


@pytest.fixture
def project(tmp_path):
    """Return the folder of a project with packages of its own."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def output_of(project: Path, code: str) -> str:
    """Return what a process prints that has the project on its path of imports."""
    environment = {**os.environ, "PYTHONPATH": str(project)}
    code = BEGINNING.format(src=str(SRC)) + code
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_project_imports_its_own_package_models(project):
    output = output_of(
        project, "e = locate('experiment.Experiment', 'task')\nprint(e.net.__module__, e.loss)"
    )
    assert output.splitlines()[-1] == "models.own dice"
    assert f"modules of {project / 'models'} come before those of {SRC / 'models'}" in output


def test_components_are_still_found_beside_their_own(project):
    # Their package metrics fails, and nothing asks for what it defines.
    output = output_of(project, "print(locate('data.columns.__name__', 'data'))\nimport metrics")
    assert output.splitlines()[-1] == "data.columns"


def test_a_file_of_theirs_hides_one_of_the_same_name(project):
    assert output_of(project, "print(locate('data.table.LOSS', 'data'))").endswith("theirs\n")


def test_a_folder_without_python_files_is_no_package(project):
    output = output_of(
        project, "locate('models.Base', 'model')\nimport losses\nprint(losses.__path__)"
    )
    assert output.splitlines()[-1] == str([str(SRC / "losses")])


def test_another_copy_of_this_project_is_not_joined(project):
    (project / "lockstep").mkdir()
    output = output_of(project, "import models\nlocate('logging.INFO', '')\nprint(models.__path__)")
    assert output.splitlines()[-1] == str([str(SRC / "models")])
