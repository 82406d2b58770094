"""Put the files of a new project into the wheel, from where `lockstep-vision new` copies them."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "launch"))
from project import write_template  # noqa: E402


class BuildWithTemplate(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_template(ROOT, Path(self.build_lib) / "lockstep" / "template")


setup(cmdclass={"build_py": BuildWithTemplate})
