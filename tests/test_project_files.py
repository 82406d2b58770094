"""The files of the repository: what a git host and an assistant read, make release, make install
from a local index.
"""

import hashlib
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import venv
import zipfile
from functools import partial
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


MAY_WRITE = {
    "docs.publish": {"pages": "write", "id-token": "write"},
    "release.release": {"contents": "write"},
}


def missing(text: str, files: list[str]) -> list[str]:
    """The targets of make and the files that a text names and the repository does not have."""
    named = [target for target in re.findall(r"\bmake ([a-z-]+)", text) if target not in TARGETS]
    return named + [file for file in files if not (ROOT / file).exists()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is_and_may_only_read(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert (
            job.get("permissions") == MAY_WRITE.get(f"{path.stem}.{name}")
            and job["timeout-minutes"]
        )
        for step in job["steps"]:
            command = step.get("run", "")
            assert (
                missing(
                    command, [word for word in command.split() if re.match(r"[\w.]+/[\w.]", word)]
                )
                == []
            )
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}


VERSION = re.compile(r'(?<=^version = ")[\d.]+|(?<=^version: )[\d.]+', re.MULTILINE)
FILES = ("launch/release.py", "launch/project.py", "pyproject.toml", "CITATION.cff")
CHANGELOG = "# Changelog\n\n## Unreleased: the house\n\n- New.\n- More.\n\n## 0.1.0 (2026-01-01)\n\n- Old.\n"


@pytest.fixture
def clone(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = VERSION.sub("0.1.0", (ROOT / name).read_text())  # whatever has been released by now
        (tmp_path / name).write_text(text)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    for words in ("init -q", "add -A", "commit -qm first"):
        git(tmp_path, *words.split())
    return tmp_path


def git(folder, *words):
    own = ("-c", "user.name=me", "-c", "user.email=me@here")
    return subprocess.run(
        ["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def release(folder, *words):
    done = subprocess.run(
        [sys.executable, "launch/release.py", *words], cwd=folder, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_a_release_is_a_commit_and_a_tag(clone):
    before = git(clone, "rev-parse", "HEAD")
    code, said = release(clone, "1.0.0")
    assert code == 0, said
    assert (
        git(clone, "cat-file", "-t", "v1.0.0") == "tag"
        and git(clone, "status", "--porcelain") == ""
    )
    assert git(clone, "rev-parse", "v1.0.0^{commit}~1") == before
    assert tomllib.loads((clone / "pyproject.toml").read_text())["project"]["version"] == "1.0.0"
    assert "\nversion: 1.0.0\n" in (clone / "CITATION.cff").read_text()
    date = git(clone, "log", "-1", "--format=%cs")
    changelog = (clone / "CHANGELOG.md").read_text()
    assert changelog == CHANGELOG.replace("## Unreleased", f"## Unreleased\n\n## 1.0.0 ({date})")
    assert release(clone, "--notes", "1.0.0") == (0, "- New.\n- More.\n")
    assert release(clone, "1.0.1")[1].startswith("error: CHANGELOG.md has nothing under")


def test_a_wrong_version_or_uncommitted_changes_are_refused(clone):
    for version, said in (
        ("one", "is no version"),
        ("0.0.10", "not greater than 0.1.0"),
        ("1.0.0", "not committed"),
    ):
        if version == "1.0.0":
            (clone / "new.py").touch()
        code, words = release(clone, version)
        assert code == 2 and said in words and git(clone, "tag") == ""


# make wheel: what is built for an index

OF_VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
GOOD = f"Metadata-Version: 2.4\nName: lockstep-vision\nVersion: {OF_VERSION}\n"
README = "Description-Content-Type: text/markdown\n\n# Lockstep\n"


def check_wheel(folder):
    command = [sys.executable, ROOT / "launch/check_wheel.py", folder]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (GOOD.replace("lockstep-vision", "lockstep") + README, "is lockstep"),
        (GOOD.replace(f"Version: {OF_VERSION}", "Version: 0.0.1") + README, "not of this version"),
        (GOOD, "has no README"),
        (
            GOOD + "Requires-Dist: torch @ https://example.org/torch.whl\n" + README,
            "an index refuses",
        ),
        (GOOD + "Requires-Dist: torch=2\n" + README, "torch=2"),
    ],
)
def test_metadata_that_an_index_refuses_are_named(metadata, said, tmp_path):
    name = f"lockstep_vision-{OF_VERSION}"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.dist-info/METADATA", metadata)
    refused = check_wheel(tmp_path)
    assert refused.returncode == 1 and said in refused.stderr, refused


@pytest.mark.slow
def test_a_built_wheel_makes_a_project(tmp_path):
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not beside this Python")
    build = [
        uv,
        "build",
        "-q",
        "-p",
        sys.executable,
        "--no-build-isolation",
        "-o",
        tmp_path / "dist",
    ]
    # An sdist is made of a copy, because setuptools leaves a folder behind.
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "source" / name)
    subprocess.run(build, cwd=tmp_path / "source", check=True)
    done = check_wheel(tmp_path / "dist")
    assert done.returncode == 0, done


# make install against a local index: a package whose hash is not the pinned one is refused, with uv
# and with pip.

NAME = "tinything"


def write_wheel(folder):
    """A pure wheel of version 1.0; returns its sha256."""
    info = f"{NAME}-1.0.dist-info"
    files = {
        f"{NAME}.py": "x = 1\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{name},," for name in (*files, f"{info}/RECORD")]
    path = folder / f"{NAME}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join(lines)}.items():
            archive.writestr(name, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def index(tmp_path):
    """(address of a package index on loopback, sha256 of its one package)."""
    folder = tmp_path / "index" / "simple" / NAME
    folder.mkdir(parents=True)
    sha256 = write_wheel(folder)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "index"))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple/", sha256
    server.shutdown()
    server.server_close()


def copied(tmp_path, sha256, with_uv):
    """What make install needs of the repository, with one requirement."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "src").mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "requirements.txt").write_text(f"{NAME}==1.0 \\\n    --hash=sha256:{sha256}\n")
    venv.create(folder / ".venv", with_pip=not with_uv, symlinks=True)
    if with_uv:
        (folder / ".venv/bin/uv").symlink_to(Path(sys.executable).with_name("uv"))
    return folder


def install(folder, index):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    own = {
        "PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(folder / "cache"),
        "PIP_CACHE_DIR": str(folder / "cache"), "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1",
    }  # fmt: skip
    return subprocess.run(
        ["make", "install"], cwd=folder, env={**kept, **own}, capture_output=True, text=True
    )


def installed(folder):
    return list(folder.glob(f".venv/lib/*/site-packages/{NAME}.py"))


@pytest.mark.parametrize(
    "with_uv", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["uv", "pip"]
)
def test_another_hash_is_refused_and_the_pinned_one_installed(with_uv, index, tmp_path):
    if with_uv and not Path(sys.executable).with_name("uv").exists():
        pytest.skip("uv is not beside this Python")
    address, sha256 = index
    folder = copied(tmp_path, "0" * 64, with_uv)
    refused = install(folder, address)
    assert refused.returncode != 0 and "hash" in refused.stderr.lower(), refused
    assert not installed(folder) and not (folder / ".venv/.installed").exists()
    (folder / "requirements.txt").write_text(f"{NAME}==1.0 \\\n    --hash=sha256:{sha256}\n")
    done = install(folder, address)
    assert done.returncode == 0, done
    assert installed(folder) and (folder / ".venv/.installed").exists()


CUDA = (
    "torch==2.1.0",
    "torchvision==0.2.0",
    "triton==3.0",
    "nvidia-cublas==1.0",
    "cuda-bindings==1.0",
    "cuda-toolkit==13.0.3",
)
KEPT = "torchmetrics==1.0", "nvidia-ml-py==13.0"
HASH = f" \\\n    --hash=sha256:{'0' * 64}\n"
TORCH = "torch==2.1.0 torchvision==0.2.0"
AGAIN = "--reinstall-package torch --reinstall-package torchvision"


@pytest.fixture
def stand_in(tmp_path):
    """What make install needs, with a uv that says what it was asked for."""
    folder = copied(tmp_path, "0" * 64, with_uv=True)
    shutil.copytree(ROOT / "src/lockstep/process", folder / "src/lockstep/process")
    (folder / "requirements.txt").write_text(HASH.join([*CUDA, *KEPT, ""]))
    write_tool(folder / ".venv/bin/uv", 'echo "$*" >>asked')
    return folder


def write_tool(path, script):
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def make_install(folder, *variables, path=""):
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}".lstrip(":")}
    return subprocess.run(
        ["make", "install", *variables], cwd=folder, env=environment, capture_output=True, text=True
    )


def asked(folder):
    """The commands that uv got since the last call."""
    path = folder / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.replace("--python .venv/bin/python ", "") for line in lines]


def test_an_unknown_device_is_refused(stand_in):
    refused = make_install(stand_in, "DEVICE=gpu")
    assert refused.returncode and "error: DEVICE=gpu is not known" in refused.stderr
    assert not (stand_in / ".venv/.installed").exists() and asked(stand_in) == []


@pytest.mark.parametrize("device", ["cpu", "cu126", "cu128"])
def test_another_build_has_no_hashes_and_all_else_has(device, stand_in):
    assert make_install(stand_in, f"DEVICE={device}").returncode == 0
    trial, rest, build = asked(stand_in)
    libraries = " --no-deps" if device == "cpu" else ""
    assert trial == f"pip install -q --dry-run --torch-backend {device} {AGAIN}{libraries} {TORCH}"
    assert rest == "pip install --no-deps --require-hashes --compile-bytecode -r .venv/rest.txt"
    assert build == trial.replace("-q --dry-run", "--compile-bytecode")
    assert (stand_in / ".venv/rest.txt").read_text() == HASH.join([*KEPT, ""])


@pytest.mark.parametrize("words", [[], ["DEVICE=cu130"]], ids=["none", "cu130"])
def test_the_pinned_build_comes_with_hashes(words, stand_in):
    assert make_install(stand_in, *words).returncode == 0
    [command] = asked(stand_in)
    assert "--require-hashes" in command and command.endswith("-r requirements.txt")


def test_the_chosen_build_stays_until_another_is_named(stand_in):
    make_install(stand_in, "DEVICE=cu126")
    asked(stand_in)
    make_install(stand_in)
    assert asked(stand_in) == []
    make_install(stand_in, "DEVICE=cpu")
    assert f"--torch-backend cpu {AGAIN}" in asked(stand_in)[-1]
    (stand_in / "requirements.txt").write_text(HASH.join(["torch==2.2.0", ""]))
    os.utime(stand_in / "requirements.txt", (2e9, 2e9))
    make_install(stand_in)
    assert asked(stand_in)[-1].endswith("--torch-backend cpu --no-deps torch==2.2.0")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("cause: Failed to fetch: https://index", "which cannot be reached from here"),
        ("Because there is no version of torch==2.1.0", "has no torch==2.1.0 torchvision==0.2.0"),
    ],
)
def test_an_index_without_the_build_is_one_sentence(answer, said, stand_in):
    write_tool(stand_in / ".venv/bin/uv", f"echo '{answer}' >&2; exit 2")
    refused = make_install(stand_in, "DEVICE=cu126")
    first, *rest = refused.stderr.splitlines()
    assert refused.returncode and first.startswith("error: ") and said in first
    assert all(re.match(r"make(\[[0-9]+\])?: ", line) for line in rest)
    assert not (stand_in / ".venv/.installed").exists()


@pytest.mark.parametrize(
    ("gpus", "device"),
    [("535.54.03, 8.0, NVIDIA A100", "cu126"), ("580.95.05, 7.0, Tesla V100", "cu126"), ("580.95.05, 9.0, H100", "cu130")],
)  # fmt: skip
def test_auto_takes_the_build_for_driver_and_gpus(gpus, device, stand_in):
    tools = stand_in / "tools"
    tools.mkdir()
    write_tool(tools / "nvidia-smi", f"echo '{gpus}'")
    done = make_install(stand_in, "DEVICE=auto", path=tools)
    assert done.returncode == 0 and f"DEVICE=auto chose {device}: driver" in done.stderr
    assert (stand_in / ".venv/.device").read_text().strip() == device
    assert ("--torch-backend cu126" in asked(stand_in)[-1]) == (device == "cu126")


def test_auto_finds_the_package_in_the_wheel_of_a_project(stand_in):
    (stand_in / "vendor").mkdir()
    wheel = shutil.make_archive(stand_in / "vendor/wheel", "zip", stand_in / "src")
    Path(wheel).rename(stand_in / "vendor/lockstep_vision-9.0-py3-none-any.whl")
    shutil.rmtree(stand_in / "src/lockstep")
    write_tool(stand_in / "nvidia-smi", "echo '580.95.05, 6.1, GTX 1080'")
    done = make_install(stand_in, "DEVICE=auto", path=stand_in)
    assert done.returncode == 0 and "DEVICE=auto chose cu126" in done.stderr, done
