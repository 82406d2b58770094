"""What the README's first commands take in a fresh clone: GB fetched, GB on the disk, seconds.

    python benchmarks/install.py

The wheels are fetched once into a folder (what is fetched is their sum), then `make install` runs with an empty cache,
then `make train`. Seconds depend on the network; the sizes do not. Needs 15 GB of disk for as long as it runs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_readme import NO_GOAL
from measuring import REPOSITORY, goal_row, save

DOWNLOAD = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r"]


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        clone, wheels, cache = (Path(scratch) / name for name in ("clone", "wheels", "cache"))
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True)
        subprocess.run([*DOWNLOAD, "requirements.txt", "-d", str(wheels)], cwd=clone, check=True)
        installing = seconds(["make", "install"], clone, cache)
        training = seconds(["make", "train"], clone, cache)
        fetched, installed = gigabytes(wheels), gigabytes(clone / ".venv")
    measured = {
        "GB that make install fetches": (fetched, "GB"),
        "GB that its .venv takes": (installed, "GB"),
        "make install, nothing cached": (installing, "s"),
        "make train in an installed clone": (training, "s"),
    }
    save("install", [
        goal_row(17, f"first commands: {what}", NO_GOAL, figure, True, unit=unit)
        for what, (figure, unit) in measured.items()
    ])  # fmt: skip


def seconds(command: list[str], folder: Path, cache: Path) -> float:
    """Of a whole process, with caches of its own; its output only where it fails."""
    started = time.perf_counter()
    told = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "UV_CACHE_DIR": str(cache)}
    )
    if told.returncode:
        sys.exit(f"{' '.join(command)} ended with {told.returncode}:\n{told.stdout}{told.stderr}")
    return round(time.perf_counter() - started)


def gigabytes(folder: Path) -> float:
    """Of its files, each counted once, 10^9 bytes."""
    return round(sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 1e9, 1)


if __name__ == "__main__":
    main()
