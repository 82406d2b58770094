"""Import the class that a config names.

Its file may import Lightning as `pytorch_lightning` or as `lightning.pytorch`.
"""

import importlib
import importlib.machinery
import logging
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.config.shared_packages import share_packages
from lockstep.process.environment import environment
from lockstep.process.errors import UserError

log = logging.getLogger(__name__)

# Lightning's other packages define the same classes in modules of the same names.
SAME_PACKAGES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
PATHS = sysconfig.get_paths()
LIBRARIES = (PATHS["stdlib"], PATHS["purelib"], PATHS["platlib"], "<frozen")


class SameModules(MetaPathFinder, Loader):
    """Let `import pytorch_lightning` give the module `lightning.pytorch`, and likewise submodules.

    Otherwise each package would define its own classes, and the Trainer of one package would refuse
    a module of the other.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in SAME_PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        package, dot, rest = spec.name.partition(".")
        module = importlib.import_module(f"{SAME_PACKAGES[package]}{dot}{rest}")
        # The import system is about to overwrite the module's own spec.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name = module.__spec__.name
        module.__spec__ = module.__spec__.loader_state
        if name == "pytorch_lightning":
            _log_once()


def _log_once() -> None:
    if environment().get("RANK", "0") == "0":
        log.info(
            "`import pytorch_lightning` gives lightning.pytorch here, whose classes are the same."
        )


def alias_lightning_packages() -> None:
    """Let both names of Lightning give the same modules, also for later imports of this process.

    If the other package has been imported already, it stays: see `describe_foreign_import`.
    """
    is_installed = any(isinstance(finder, SameModules) for finder in sys.meta_path)
    if not is_installed and not SAME_PACKAGES.keys() & sys.modules.keys():
        sys.meta_path.insert(0, SameModules())


def describe_foreign_import(cls: type) -> str | None:
    """Return a sentence that says which import to change; None if the class needs no change.

    A class needs one if it comes from the package pytorch_lightning.
    """
    bases = [base.__module__.partition(".")[0] for base in cls.__mro__]
    if "pytorch_lightning" not in bases:
        return None

    place = ""
    for base in cls.__mro__[: bases.index("pytorch_lightning")]:
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        lines = Path(file).read_text().splitlines() if file else []
        for number, line in enumerate(lines, 1):
            if "pytorch_lightning" in line and "import" in line:
                place = f" in {file}, line {number}"
    return (
        f"{cls.__name__} comes from the package pytorch_lightning, which was imported before this "
        "run began, and Lockstep's Trainer comes from lightning. "
        f"Write `import lightning.pytorch as pl`{place}."
    )


def locate(target: str, where: str) -> Any:
    """Return the object that a dotted name names, and import its module.

    Args:
        where: key of the config, for errors.
    Raises:
        UserError: it cannot be found, or its file cannot be imported. The error names the line.
    """
    alias_lightning_packages()
    share_packages()
    parts = target.split(".")
    if not all(parts):
        raise UserError(f"{where}={target!r} cannot be found: it is no dotted name.")

    located = _import(parts[0], target, where)
    for position, part in enumerate(parts[1:], 2):
        if isinstance(located, ModuleType) and not hasattr(located, part):
            located = _import(".".join(parts[:position]), target, where)
        elif hasattr(located, part):
            located = getattr(located, part)
        else:
            owner = ".".join(parts[: position - 1])
            raise UserError(f"{where}={target!r} cannot be found: {owner} has no {part}.")
    return located


def _import(name: str, target: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        line = _line_of_failure(error)
        if line:
            problem = f"{type(error).__name__}: {error}"
            raise UserError(f"{where}={target!r} cannot be imported. {line}: {problem}.") from None
        missing_module = str(error.name) if isinstance(error, ModuleNotFoundError) else None
        if missing_module is None or not f"{name}.".startswith(f"{missing_module}."):
            # The module exists, and its import fails. Its error is the cause.
            problem = f"{type(error).__name__}: {error}"
            raise UserError(f"{where}={target!r} cannot be imported. {problem}.") from None
        owner, _, last = name.rpartition(".")
        problem = f"{owner} has no {last}" if owner else f"there is no module {name}"
        raise UserError(f"{where}={target!r} cannot be found: {problem}.") from None


def _line_of_failure(error: Exception) -> str | None:
    """Return the last line of the user's files that an exception went through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename != __file__ and not frame.filename.startswith(LIBRARIES):
            line = f"{frame.filename}, line {frame.lineno}"
    return line
