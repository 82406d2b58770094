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


def test_a_release_is_a_commit_and_a_tag_with_its_version_everywhere(clone):
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


def test_a_version_that_cannot_be_and_changes_that_are_not_committed_are_refused(clone):
    for version, said in (
        ("one", "is no version"),
        ("0.0.10", "not greater than 0.1.0"),
        ("1.0.0", "not committed"),
    ):
        if version == "1.0.0":
            (clone / "new.py").touch()
        code, words = release(clone, version)
        assert code == 2 and said in words and git(clone, "tag") == ""


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
)
KEPT = "torchmetrics==1.0", "nvidia-ml-py==13.0"


def test_without_cuda_only_pytorch_has_no_hash_and_the_choice_stays(tmp_path):
    """A uv in its place says what it was asked for."""
    folder = copied(tmp_path, "0" * 64, with_uv=True)
    (folder / ".venv/bin/uv").unlink()
    line = f" \\\n    --hash=sha256:{'0' * 64}\n"
    (folder / "requirements.txt").write_text(line.join([*CUDA, *KEPT, ""]))
    (folder / ".venv/bin/uv").write_text('#!/bin/sh\necho "$*" >>asked\n')
    (folder / ".venv/bin/uv").chmod(0o755)
    make = partial(subprocess.run, cwd=folder, capture_output=True, text=True)
    refused = make(["make", "install", "DEVICE=gpu"])
    assert (
        "error: DEVICE=gpu is not known" in refused.stderr
        and not (folder / ".venv/.installed").exists()
    )
    assert make(["make", "install", "DEVICE=cpu"]).returncode == 0
    own, rest = (folder / "asked").read_text().splitlines()
    assert own.endswith("--no-deps --torch-backend cpu torch==2.1.0 torchvision==0.2.0")
    assert "--require-hashes" in rest and rest.endswith("-r .venv/cpu.txt")
    assert (folder / ".venv/cpu.txt").read_text() == line.join([*KEPT, ""])
    (folder / "requirements.txt").write_text(line.join(["torch==2.2.0", ""]))
    os.utime(folder / "requirements.txt", (2e9, 2e9))
    make(["make", "install"])
    assert "--torch-backend cpu torch==2.2.0" in (folder / "asked").read_text()
