"""make install against a local index: a package whose hash is not the pinned one is refused, with uv and with pip."""

import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from functools import partial
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "index")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple/", sha256
    server.shutdown()
    server.server_close()


def clone(tmp_path, sha256, with_uv):
    """What make install needs of the repository, with one requirement."""
    folder = tmp_path / "clone"
    shutil.copytree(REPOSITORY / "launch", folder / "launch")
    (folder / "src").mkdir()
    shutil.copy(REPOSITORY / "Makefile", folder)
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
    return subprocess.run(["make", "install"], cwd=folder, env={**kept, **own}, capture_output=True, text=True)


def installed(folder):
    return list(folder.glob(f".venv/lib/*/site-packages/{NAME}.py"))


@pytest.mark.parametrize("with_uv", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["uv", "pip"])
def test_another_hash_is_refused_and_the_pinned_one_installed(with_uv, index, tmp_path):
    if with_uv and not Path(sys.executable).with_name("uv").exists():
        pytest.skip("uv is not beside this Python")
    address, sha256 = index
    folder = clone(tmp_path, "0" * 64, with_uv)
    refused = install(folder, address)
    assert refused.returncode != 0 and "hash" in refused.stderr.lower(), refused
    assert not installed(folder) and not (folder / ".venv/.installed").exists()
    (folder / "requirements.txt").write_text(f"{NAME}==1.0 \\\n    --hash=sha256:{sha256}\n")
    done = install(folder, address)
    assert done.returncode == 0, done
    assert installed(folder) and (folder / ".venv/.installed").exists()


CUDA = "torch==2.1.0", "torchvision==0.2.0", "triton==3.0", "nvidia-cublas==1.0", "cuda-bindings==1.0"
KEPT = "torchmetrics==1.0", "nvidia-ml-py==13.0"


def test_without_cuda_only_pytorch_has_no_hash_and_the_choice_stays(tmp_path):
    """A uv in its place says what it was asked for."""
    folder = clone(tmp_path, "0" * 64, with_uv=True)
    (folder / ".venv/bin/uv").unlink()
    line = f" \\\n    --hash=sha256:{'0' * 64}\n"
    (folder / "requirements.txt").write_text(line.join([*CUDA, *KEPT, ""]))
    (folder / ".venv/bin/uv").write_text('#!/bin/sh\necho "$*" >>asked\n')
    (folder / ".venv/bin/uv").chmod(0o755)
    make = partial(subprocess.run, cwd=folder, capture_output=True, text=True)
    refused = make(["make", "install", "DEVICE=gpu"])
    assert "error: DEVICE=gpu is not known" in refused.stderr and not (folder / ".venv/.installed").exists()
    assert make(["make", "install", "DEVICE=cpu"]).returncode == 0
    own, rest = (folder / "asked").read_text().splitlines()
    assert own.endswith("--no-deps --torch-backend cpu torch==2.1.0 torchvision==0.2.0")
    assert "--require-hashes" in rest and rest.endswith("-r .venv/cpu.txt")
    assert (folder / ".venv/cpu.txt").read_text() == line.join([*KEPT, ""])
    (folder / "requirements.txt").write_text(line.join(["torch==2.2.0", ""]))
    os.utime(folder / "requirements.txt", (2e9, 2e9))
    make(["make", "install"])
    assert "--torch-backend cpu torch==2.2.0" in (folder / "asked").read_text()
