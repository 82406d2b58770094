"""The layers: imports go downwards only, folders of one layer never import each other, and there are no cycles."""

import ast
import functools
import graphlib
import re
from pathlib import Path

from omegaconf import OmegaConf

TESTS = Path(__file__).resolve().parent
SRC = TESTS.parent / "src"
LAYERS = (
    {"process"},
    {"records"},
    {"config"},
    {"ranks", "data", "strategies", "loggers", "logbook"},
    {"checkpoints"},
    {"storage"},
    {"callbacks"},
    {"runs"},
    {"training"},
    {"sweeps"},
    {"commands"},
)
LAYER = {f"lockstep.{name}": number for number, names in enumerate(LAYERS) for name in names}
YOURS, SCRIPTS = len(LAYERS), len(LAYERS) + 1
SCRIPT_NAMES = {path.stem for path in SRC.glob("*.py")}
WITHOUT_TORCH = ("process", "records", "config", "ranks", "storage", "logbook", "runs", "sweeps", "commands")
WITH_TORCH = {
    "lockstep/ranks/agent.py",
    "lockstep/ranks/collectives.py",
    "lockstep/ranks/failures.py",  # inside of functions: runs/opening.py imports it
    "lockstep/ranks/heartbeat.py",
    "lockstep/ranks/meeting.py",
    "lockstep/runs/join.py",
}
TORCH_FREE = {"lockstep/checkpoints/files.py"}
HEAVY = {"torch", "lightning", "hydra", "torchvision", "timm"}
FOLDER_OF_GROUP = {
    "model": ("models",), "task": ("tasks",), "data": ("data",), "augmentation": ("augmentations", "lockstep.data"),
    "optimizer": ("optimizers", "torch"), "scheduler": ("schedulers", "torch"),
    "trainer": ("strategies", "lockstep.strategies"),
    "callbacks": ("callbacks", "lockstep.callbacks", "lightning"),
    "loss": ("losses",), "metrics": ("metrics", "torchmetrics"), "logger": ("lockstep.loggers", "lightning"),
}  # fmt: skip
FILES = {str(path.relative_to(SRC)): path for path in sorted(SRC.rglob("*.py"))}
MODULES = {name.removesuffix(".py").replace("/", "."): path for name, path in FILES.items()}


parsed = functools.cache(lambda path: ast.parse(path.read_text()))


def imports(path: Path, *, top_level: bool = False, typing: bool = True) -> set[str]:
    """Dotted names of all imported modules; of those that run when the file is imported, or all but for typing."""
    body = [node for node in parsed(path).body if typing or "TYPE_CHECKING" not in ast.dump(node)]
    found = set()
    for node in body if top_level else ast.walk(ast.Module(body)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found


def folder(module: str) -> str:
    """Return what a layer holds: a folder of the package, a folder or a file at the top of src/."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "lockstep" else parts[0]


def layer(name: str) -> int | None:
    """None: not of this project."""
    if name in LAYER:
        return LAYER[name]
    if name in SCRIPT_NAMES:
        return SCRIPTS
    return YOURS if (SRC / name).is_dir() or (SRC / f"{name}.py").exists() else None


def test_imports_go_downwards_and_every_folder_has_a_layer():
    for module, path in MODULES.items():
        mine = folder(module)
        for used in {folder(name) for name in imports(path)} - {mine}:
            assert layer(used) is None or layer(used) < layer(mine), f"{module} uses {used}"
    found = {path.name for path in (SRC / "lockstep").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found == set().union(*LAYERS)


def test_no_file_imports_itself_by_way_of_others():
    uses = {name: imports(path) & MODULES.keys() for name, path in MODULES.items()}
    list(graphlib.TopologicalSorter(uses).static_order())  # raises CycleError, which names the circle


def test_one_file_reads_the_environment():
    readers = {name for name, path in FILES.items() if "os.environ" in path.read_text() or "getenv" in path.read_text()}
    assert readers == {"lockstep/process/environment.py"}


def test_what_starts_a_run_comes_without_torch():
    for name, path in FILES.items():
        parts = name.split("/")
        is_free = parts[0] == "lockstep" and parts[1] in WITHOUT_TORCH and name not in WITH_TORCH
        if is_free or name in TORCH_FREE:
            assert not {used.split(".")[0] for used in imports(path, typing=False)} & {"torch", "lightning"}, name
        elif len(parts) == 1:
            heavy = {used.split(".")[0] for used in imports(path, top_level=True)} & HEAVY
            assert not heavy, "a script imports torch inside main, so that --help is quick"


def test_init_files_are_empty_and_no_file_name_says_nothing():
    for name, path in FILES.items():
        assert path.name != "__init__.py" or name == "__init__.py" or path.read_text() == ""
        assert path.stem not in {"utils", "common", "helpers", "components", "misc"}
        assert len(name.split("/")) <= (3 if name.startswith("lockstep/") else 2)


def test_each_config_is_yaml_without_a_key_twice_and_builds_what_lies_in_the_folder_of_its_group():
    for path in SRC.parent.glob("configs/**/*.yaml"):
        OmegaConf.load(path)
        homes = tuple(f"{home}." for home in FOLDER_OF_GROUP.get(path.parent.name, ()))
        for target in re.findall(r"_target_: *([\w.]+)", path.read_text()) if homes else ():
            assert target == "null" or target.startswith(homes), (path, target)


# Names with a leading underscore of the libraries, which may go in any release. Each file says in its first line which
# and why, and a test beside it fails when the name goes.
PRIVATE = {
    "lockstep/sweeps/jobs.py": {"_check_help"},
    "lockstep/training/memory_estimate.py": {"_subclasses", "_tools"},
    "lockstep/callbacks/interruption.py": {"_broadcast_sigterm_tensor", "_signal_connector"},
    "lockstep/callbacks/weight_average.py": {"_average_model"},
    "models/timm.py": {"_pos_embed"},
}
LIBRARIES = ("torch", "lightning", "hydra", "timm")
# Calls that take the name of an attribute as a text.
BY_NAME = ("getattr", "setattr", "delattr", "patch.object")

# Names of Lightning that may change although they have no underscore: methods that Lightning calls
# and a strategy replaces, and the name under which it stores a plugin's state; messages of Hydra,
# and the source of Lightning's Trainer. The test fails when the library no longer has the name.
FRAGILE = {
    "lockstep/config/compose.py": {
        "Could not": "test_what_is_wrong_is_refused_in_one_sentence_with_what_to_type",
        "OverrideParseException": "test_what_is_wrong_is_refused_in_one_sentence_with_what_to_type",
    },
    "lockstep/config/schema.py": {
        "kwonlyargs": "test_the_trainers_arguments_are_those_of_its_signature",
    },
    "lockstep/strategies/base.py": {
        "configure_ddp": "test_lightning_calls_what_the_strategies_replace",
        "num_processes": "test_in_a_plain_script_that_nobody_started_with_ranks_they_say_so",
    },
    "lockstep/strategies/ddp.py": {
        "configure_ddp": "test_lightning_calls_what_the_strategies_replace",
        "determine_ddp_device_ids": "test_lightning_calls_what_the_strategies_replace",
    },
    "lockstep/strategies/fsdp.py": {
        "__qualname__": "test_fsdp_stores_its_loss_scale_under_the_name_of_ddps",
    },
}


def private_names(path: Path, own: set[str]) -> set[str]:
    """Return the names with a leading underscore that a file imports from the libraries or reads of an object."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES:
            found |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} - own
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(BY_NAME):
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            found |= {text for text in texts if isinstance(text, str)} - own
    return {name for name in found if name.startswith("_") and not name.startswith("__") and name not in ("_", "_exit")}


def defined_names(tree: ast.AST) -> set[str]:
    """Return the functions, variables and attributes of self and cls that a file defines.

    An assignment to an attribute of anything else changes an object that may be a library's.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                names.add(node.attr)
    return names


def test_private_names_of_libraries_are_used_only_in_files_that_explain_them():
    own = set().union(*(defined_names(parsed(path)) for path in FILES.values()))
    found = {name: names for name, path in FILES.items() if (names := private_names(path, own))}
    for name in found:
        first = ast.get_docstring(parsed(FILES[name])).splitlines()[0]
        assert first.startswith("Uses ") or "`_" in first, f"{name} does not say which private names it needs"
    assert found == PRIVATE


def test_a_private_name_in_a_text_is_seen(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("setattr(trainer, '_theirs', 1)\nmock.patch.object(Parser, '_check', None)\n")
    assert private_names(file, set()) == {"_theirs", "_check"}


def test_an_assignment_to_a_librarys_attribute_is_no_definition():
    tree = ast.parse("self._ours = 1\ntrainer._theirs = 1\nloop._one = loop._two = 2\n_name = 3")
    assert defined_names(tree) == {"_ours", "_name"}


def test_a_fragile_name_of_lightning_has_its_test():
    tests = "\n".join(path.read_text() for path in (TESTS / "lockstep").rglob("test_*.py"))
    for file, test_of in FRAGILE.items():
        for name, test in test_of.items():
            assert re.search(rf"\b{name}\b", FILES[file].read_text()), f"{file} has no {name} any more"
            assert f"def {test}(" in tests, f"{test}, of {name}, is gone"


def test_the_public_interface_has_the_names_and_arguments_that_docs_api_states():
    page = (SRC.parent / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `(lockstep\.[\w.]+)\.(\w+)` \| ([^|]*)\|", page, re.MULTILINE)
    assert 20 <= len(rows) <= 30
    for module, name, stated in rows:
        body = parsed(MODULES[module]).body
        [node] = [each for each in body if getattr(each, "name", "") == name]
        makers = [each for each in getattr(node, "body", ()) if getattr(each, "name", "") == "__init__"] or [node]
        named = {argument.arg for maker in makers for argument in ast.walk(maker) if isinstance(argument, ast.arg)}
        assert set(re.findall(r"`(\w+)`", stated)) <= named, f"docs/api.md: {name}"
