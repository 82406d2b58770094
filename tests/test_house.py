"""The floors of the house: imports go downwards only, rooms never import each other."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
ROOMS = {path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"} | {"classifier"}
FLOOR_2 = {
    "assemble",
    "launch",
    "run_options",
    "run_start",
    "run_end",
    "no_secrets",
    "compose",
    "sweep",
    "join",
    "shared_checkpoint",
    "checks",
    "finished_model",
    "model_card",
    "estimate",
    "fake_images",
    "batch_probe",
    "least_batch",
    "targets",
    "rank_process",
}
DOORS = {"train", "eval", "find_batch_size", "doctor", "logbook", "nodes", "upload", "predict", "export"}
MODULES = {path.stem for path in SRC.glob("*.py")}
FLOOR_0 = MODULES - ROOMS - FLOOR_2 - DOORS
HEAVY = {"torch", "lightning", "hydra", "torchvision", "timm"}
ROOM_OF_GROUP = {
    "model": "models", "data": "data", "optimizer": "optimizers", "scheduler": "schedulers", "trainer": "strategies",
    "callbacks": "callbacks", "logger": "callbacks",
}  # fmt: skip
FILES = sorted(SRC.rglob("*.py"))


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """First parts of all imported modules; with top_level only those that run when the file is imported."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def home(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_downwards(path):
    mine, used = home(path), imports(path)
    if mine in FLOOR_0:
        assert not used & (ROOMS | FLOOR_2 | DOORS), used
        assert not imports(path, top_level=True) & HEAVY
    elif mine in ROOMS:
        assert not used & ((ROOMS - {mine}) | FLOOR_2 | DOORS), used
    elif mine in FLOOR_2:
        assert not used & DOORS, used
    else:
        assert not used & (DOORS - {mine}), used
        assert not imports(path, top_level=True) & HEAVY, "a door imports torch inside main, so that --help is quick"


def test_only_cluster_reads_the_environment():
    readers = {str(p.relative_to(SRC)) for p in FILES if "os.environ" in p.read_text() or "getenv" in p.read_text()}
    assert readers == {"cluster.py"}


def test_pages_and_launch_come_without_torch():
    for path in [
        *SRC.glob("pages/*.py"),
        SRC / "launch.py",
        SRC / "run_start.py",
        SRC / "run_end.py",
        SRC / "compose.py",
        SRC / "supervisor.py",
    ]:
        assert not imports(path) & {"torch", "lightning"}, path


def test_init_files_are_empty_and_no_file_name_says_nothing():
    for path in FILES:
        assert path.name != "__init__.py" or path.read_text() == ""
        assert path.stem not in {"utils", "common", "helpers", "components", "misc"}
        assert len(path.relative_to(SRC).parts) <= 2, "two levels, never three"


def test_each_room_with_a_config_group_builds_only_itself():
    for path in SRC.parent.glob("configs/*/*.yaml"):
        for line in path.read_text().splitlines():
            if "_target_:" in line:
                target = line.split("_target_:")[1].strip(" {}").split(",")[0].split(" ")[0].rstrip("}")
                room = target.split(".")[0]
                expected = ROOM_OF_GROUP.get(path.parent.name)
                assert expected is None or room in (expected, "torch", "lightning"), (path, target)
