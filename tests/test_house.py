"""The layers: imports go downwards only, and folders of one layer never import each other.

Names of libraries that may change have a test each.
"""

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
    {"config", "ranks"},
    {"data", "strategies", "loggers", "logbook"},
    {"checkpoints"},
    {"storage"},
    {"callbacks"},
    {"runs"},
    {"training"},
    {"sweeps"},
    {"commands"},
)
LAYER = {}
for number, names in enumerate(LAYERS):
    LAYER |= {f"lockstep.{name}": number for name in names}
YOURS, SCRIPTS = len(LAYERS), len(LAYERS) + 1
SCRIPT_NAMES = {path.stem for path in SRC.glob("*.py")}
WITHOUT_TORCH = (
    "process",
    "records",
    "config",
    "ranks",
    "storage",
    "logbook",
    "runs",
    "sweeps",
    "commands",
)
WITH_TORCH = {
    "lockstep/ranks/agent.py",
    "lockstep/ranks/collectives.py",
    "lockstep/ranks/failures.py",  # inside of functions: runs/opening.py imports it
    "lockstep/ranks/gpus.py",
    "lockstep/ranks/heartbeat.py",
    "lockstep/ranks/meeting.py",
    "lockstep/ranks/process_group.py",
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


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, *, top_level: bool = False, typing: bool = True) -> set[str]:
    """Return the dotted names of all imported modules.

    Args:
        top_level: only of those that run when the file is imported.
        typing: with those for type annotations alone.
    """
    body = [node for node in parsed(path).body if typing or "TYPE_CHECKING" not in ast.dump(node)]
    modules = set()
    for node in body if top_level else ast.walk(ast.Module(body)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if name in MODULES else node.module for name in names}
    return modules


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
    folders = {path.name for path in (SRC / "lockstep").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set().union(*LAYERS)


def test_no_file_imports_itself_by_way_of_others():
    uses = {name: imports(path) & MODULES.keys() for name, path in MODULES.items()}
    list(
        graphlib.TopologicalSorter(uses).static_order()
    )  # raises CycleError, which names the circle


def test_one_file_reads_the_environment():
    readers = {
        name
        for name, path in FILES.items()
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers == {"lockstep/process/environment.py"}


def test_what_starts_a_run_comes_without_torch():
    for name, path in FILES.items():
        parts = name.split("/")
        is_free = parts[0] == "lockstep" and parts[1] in WITHOUT_TORCH and name not in WITH_TORCH
        if is_free or name in TORCH_FREE:
            assert not {used.split(".")[0] for used in imports(path, typing=False)} & {
                "torch",
                "lightning",
            }, name
        elif len(parts) == 1:
            heavy = {used.split(".")[0] for used in imports(path, top_level=True)} & HEAVY
            assert not heavy, "a script imports torch inside main, so that --help is quick"


def test_init_files_are_empty_and_no_file_name_says_nothing():
    for name, path in FILES.items():
        assert path.name != "__init__.py" or path.read_text() == ""
        assert path.stem not in {"utils", "common", "helpers", "components", "misc"}
        assert len(name.split("/")) <= (3 if name.startswith("lockstep/") else 2)


def test_each_config_builds_what_its_group_holds():
    for path in SRC.parent.glob("configs/**/*.yaml"):
        OmegaConf.load(path)
        homes = tuple(f"{home}." for home in FOLDER_OF_GROUP.get(path.parent.name, ()))
        for target in re.findall(r"_target_: *([\w.]+)", path.read_text()) if homes else ():
            assert target == "null" or target.startswith(homes), (path, target)


# Names with a leading underscore of the libraries, which may go in any release. Each file says in
# its first line which it uses and why. The test of a name fails when the name goes.
NO_LIGHTNING_SIGNALS = "test_lockstep_takes_signals_in_place_of_lightning"
PRIVATE = {
    "lockstep/sweeps/jobs.py": {
        "_check_help": "test_argparse_checks_help_texts_by_the_name_that_is_replaced"
    },
    "lockstep/training/memory_estimate.py": {
        "_subclasses": "test_an_estimate_ends_at_the_number_of_training_images",
        "_tools": "test_an_estimate_ends_at_the_number_of_training_images",
    },
    "lockstep/callbacks/interruption.py": {
        "_broadcast_sigterm_tensor": NO_LIGHTNING_SIGNALS,
        "_signal_connector": NO_LIGHTNING_SIGNALS,
    },
    "lockstep/checkpoints/loader_state.py": {
        "_last_train_dl_reload_epoch": "test_loaders_made_anew_resume_bit_for_bit",
    },
    "lockstep/callbacks/weight_average.py": {
        "_average_model": "test_its_decay_begins_small_and_it_stays_in_its_precision",
    },
    "models/timm.py": {
        "_pos_embed": "test_timms_vision_transformer_has_the_parts_before_its_blocks",
    },
}
LIBRARIES = ("torch", "lightning", "hydra", "timm")
# Calls that take the name of an attribute as a text.
BY_NAME = ("getattr", "setattr", "delattr", "patch.object")

# Names that may change although they have no underscore: what a file sets, replaces or reads of a
# library's objects, beside its documented use.
LOOP_STATE = "test_the_loop_state_has_the_keys_that_a_resume_writes"
LOOP_METHODS = "test_the_loops_have_the_methods_that_are_called"
WRAPPED = "test_lightning_calls_what_the_loader_state_wraps"
AGENT = "test_the_agent_takes_its_signals_and_its_grace"
STORE = "test_a_store_serves_at_the_socket_that_it_gets"
FRAGILE = {
    "lockstep/strategies/base.py": {
        "configure_ddp": "test_lightning_calls_what_the_strategies_replace",
        "num_processes": "test_a_script_that_was_not_started_with_ranks_is_refused",
    },
    "lockstep/strategies/ddp.py": {
        "configure_ddp": "test_lightning_calls_what_the_strategies_replace",
        "determine_ddp_device_ids": "test_lightning_calls_what_the_strategies_replace",
    },
    "lockstep/strategies/fsdp.py": {
        "__qualname__": "test_fsdp_stores_its_loss_scale_under_the_name_of_ddps",
    },
    "lockstep/strategies/sync_batchnorm.py": {
        "__class__": "test_layers_names_and_timms_activation_within_the_layer_stay",
    },
    "lockstep/checkpoints/resume_point.py": {
        "batch_progress": LOOP_STATE,
        "is_last_batch": LOOP_STATE,
        "epoch_progress": LOOP_STATE,
        "val_loop.batch_progress": LOOP_STATE,
        "val_check_batch": "test_validations_follow_an_interval_set_when_training_starts",
    },
    "lockstep/checkpoints/loader_state.py": {
        "process_dataloader": WRAPPED,
        "on_run_start": WRAPPED,
        "val_loop": WRAPPED,
        "is_resuming": WRAPPED,
        "restarting": WRAPPED,
        "setup_data": LOOP_METHODS,
    },
    "lockstep/callbacks/checkpoints.py": {
        "on_iteration_done": LOOP_METHODS,
        "trainer.callbacks = ": "test_a_callback_added_in_setup_is_called",
    },
    "lockstep/callbacks/training_log.py": {
        "trainer.val_check_batch = ": (
            "test_validations_follow_an_interval_set_when_training_starts"
        ),
    },
    "lockstep/training/task.py": {"setup_data": LOOP_METHODS},
    "lockstep/training/compilation.py": {
        "set_stance": "test_a_stance_turns_compilation_off_and_on",
    },
    "lockstep/config/schema.py": {
        "kwonlyargs": "test_the_trainers_arguments_are_those_of_its_source",
    },
    "lockstep/config/compose.py": {
        "Could not": "test_what_is_wrong_is_refused_with_what_to_type",
        "OverrideParseException": "test_what_is_wrong_is_refused_with_what_to_type",
        "hydra.overrides.task": "test_hydras_node_has_the_overrides_and_the_chosen_options",
        "hydra.overrides.hydra": "test_hydras_node_has_the_overrides_and_the_chosen_options",
        "hydra.runtime.choices": "test_hydras_node_has_the_overrides_and_the_chosen_options",
    },
    "lockstep/ranks/agent.py": {
        "signals_to_handle": AGENT,
        "shutdown_timeout": AGENT,
        "error.json": AGENT,
        "master_listen_fd": STORE,
    },
    "lockstep/ranks/meeting.py": {"master_listen_fd": STORE, "store.append": STORE},
    "models/timm_weights.py": {
        "checkpoint_filter_fn": "test_timm_filters_a_state_dict_by_the_model",
    },
    "models/patch_conv.py": {
        "__class__ = PatchConv": "test_patches_by_a_matrix_product_are_those_of_the_convolution",
    },
}


def private_names(path: Path, defined: set[str]) -> set[str]:
    """Return the names with a leading underscore that a file has from a library.

    Args:
        defined: names that src/ defines itself.
    """
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES:
            names |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            names |= {node.attr} - defined
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(BY_NAME):
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            names |= {text for text in texts if isinstance(text, str)} - defined
    return {name for name in names if re.match("_[^_]", name)} - {"_exit"}


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


def test_private_names_of_libraries_are_explained():
    defined = set()
    for path in FILES.values():
        defined |= defined_names(parsed(path))
    used = {name: private_names(path, defined) for name, path in FILES.items()}
    assert {name: names for name, names in used.items() if names} == {
        name: {*test_of} for name, test_of in PRIVATE.items()
    }
    for name in PRIVATE:
        first = ast.get_docstring(parsed(FILES[name])).splitlines()[0]
        is_explained = first.startswith("Uses ") or "`_" in first
        assert is_explained, f"{name} does not say which private names it needs"


def test_a_private_name_in_a_text_is_seen(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("setattr(trainer, '_theirs', 1)\nmock.patch.object(Parser, '_check', None)\n")
    assert private_names(file, set()) == {"_theirs", "_check"}


def test_an_assignment_to_a_librarys_attribute_is_no_definition():
    tree = ast.parse("self._ours = 1\ntrainer._theirs = 1\nloop._one = loop._two = 2\n_name = 3")
    assert defined_names(tree) == {"_ours", "_name"}


def test_a_private_or_fragile_name_has_its_test():
    tests = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    for file, test_of in [*PRIVATE.items(), *FRAGILE.items()]:
        for name, test in test_of.items():
            assert name in FILES[file].read_text(), f"{file} has no {name} any more"
            assert f"def {test}(" in tests, f"{test}, of {name}, is gone"


def test_the_public_interface_is_that_of_its_page():
    page = (SRC.parent / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `(lockstep\.[\w.]+)\.(\w+)` \| ([^|]*)\|", page, re.MULTILINE)
    assert 20 <= len(rows) <= 30
    for module, name, documented in rows:
        arguments = arguments_of(module, name)
        assert set(re.findall(r"`(\w+)`", documented)) <= arguments, f"docs/api.md: {name}"


def arguments_of(module: str, name: str) -> set[str]:
    """Return the arguments of a function, or of a class's constructor, else of all its methods."""
    [maker] = [each for each in parsed(MODULES[module]).body if getattr(each, "name", "") == name]
    for method in getattr(maker, "body", ()):
        if getattr(method, "name", "") == "__init__":
            maker = method
    return {node.arg for node in ast.walk(maker) if isinstance(node, ast.arg)}
