"""Let a user's project have packages of the same names as this one's components, as `models`.

Python imports one package of each name, and that of the script comes first. So the folder of the
user's package is added to it: `models.their_file` is imported from there, and what their
`models/__init__.py` defines is found in `models`.
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
    """Add the user's packages on the path of imports to the components of the same names."""
    roots = [Path(folder).resolve() for folder in sys.path if _is_of_user(folder)]
    for file in sorted(COMPONENTS.glob("*/__init__.py")):
        name = file.parent.name
        for root in roots:
            user_folder = root / name
            # A folder of tests mirrors the packages.
            modules = [
                path for path in user_folder.glob("*.py") if not path.name.startswith("test_")
            ]
            if name != "lockstep" and modules:
                _add_folder(importlib.import_module(name), user_folder)


def _is_of_user(folder: str) -> bool:
    """Return whether an entry of sys.path is neither this project's nor of installed packages."""
    path = Path(folder).resolve()
    if not folder or path == COMPONENTS.resolve() or not path.is_dir():
        return False
    # The repository of a snapshot is on the path, too, by its installed package.
    if (path / "lockstep").is_dir():
        return False
    return not any(path.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))


def _add_folder(package: ModuleType, user_folder: Path) -> None:
    """Search a user's folder before that of this project's package."""
    if str(user_folder) in package.__path__:
        return
    ours = [Path(folder) for folder in package.__path__]
    package.__path__.insert(0, str(user_folder))
    log.info(f"{package.__name__}: modules of {user_folder} come before those of {ours[0]}.")

    init = user_folder / "__init__.py"
    if not init.is_file() or hasattr(package, "__getattr__"):
        return

    def read_from_user_package(name: str) -> Any:
        """Run their __init__.py when somebody asks for what it may define."""
        is_ours = any((folder / f"{name}.py").exists() for folder in ours)
        if is_ours or name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        del vars(package)["__getattr__"]
        package.__file__ = str(init)
        exec(compile(init.read_text(), init, "exec"), vars(package))
        return getattr(package, name)

    vars(package)["__getattr__"] = read_from_user_package
