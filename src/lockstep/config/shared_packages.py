"""Let a user's project have packages with the names of this project's components, as `models`.

Python imports one package of each name, and the one beside the script comes first. So the folder of
the user's package is added to this project's: `models.their_file` is imported from there, and
`models` has the names that their `models/__init__.py` defines.
"""

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.process.project import REPOSITORY

log = logging.getLogger(__name__)

COMPONENTS = REPOSITORY / "src"


def share_packages() -> None:
    """Add the folders of the user's packages on sys.path to the components of the same names."""
    roots = [Path(folder).resolve() for folder in sys.path if _is_of_user(folder)]
    for root in roots:
        for file in sorted(COMPONENTS.glob("*/__init__.py")):
            name = file.parent.name
            user_folder = root / name
            # A folder of tests has the names of the packages, too, and is none.
            modules = [
                path for path in user_folder.glob("*.py") if not path.name.startswith("test_")
            ]
            if name != "lockstep" and modules:
                _add_folder(importlib.import_module(name), user_folder)


def _is_of_user(folder: str) -> bool:
    """Return whether an entry of sys.path is the user's.

    It is neither a folder of this project nor one of installed packages.
    """
    path = Path(folder).resolve()
    if not folder or path == COMPONENTS.resolve() or not path.is_dir():
        return False
    # The repository of a snapshot is on the path, too, by its installed package.
    if (path / "lockstep").is_dir():
        return False
    return not any(path.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))


def _add_folder(package: ModuleType, user_folder: Path) -> None:
    """Let imports from a package search the user's folder before this project's."""
    if str(user_folder) in package.__path__:
        return
    project_folders = [Path(folder) for folder in package.__path__]
    package.__path__.insert(0, str(user_folder))
    log.info(
        f"{package.__name__}: modules of {user_folder} come before those of {project_folders[0]}."
    )

    init = user_folder / "__init__.py"
    if not init.is_file() or hasattr(package, "__getattr__"):
        return

    def read_from_user_package(name: str) -> Any:
        """Run the user's __init__.py when a name is asked for that it may define."""
        is_project_module = any((folder / f"{name}.py").exists() for folder in project_folders)
        if is_project_module or name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        del vars(package)["__getattr__"]
        package.__file__ = str(init)
        exec(compile(init.read_text(), init, "exec"), vars(package))
        return getattr(package, name)

    vars(package)["__getattr__"] = read_from_user_package
