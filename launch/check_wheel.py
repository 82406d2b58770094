"""Check the wheel and the sdist in dist/: their metadata, and a project made from the wheel.

    python launch/check_wheel.py dist      make wheel does it

The environment of the project has no package but the wheel.
"""

import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.metadata import Metadata
from project import DISTRIBUTION, STEM, Refused, run

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")


def metadata_of(path: Path) -> Metadata:
    """Return the metadata of a wheel or an sdist.

    Raises:
        ExceptionGroup: the metadata are not valid.
    """
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            text = archive.read(name)
    else:
        folder = path.name.removesuffix(".tar.gz")
        with tarfile.open(path) as archive:
            file = archive.extractfile(f"{folder}/PKG-INFO")
            assert file is not None
            text = file.read()
    return Metadata.from_email(text, validate=True)


def check_metadata(path: Path, version: str) -> None:
    try:
        metadata = metadata_of(path)
    except ExceptionGroup as group:
        faults = "; ".join(map(str, group.exceptions))
        raise Refused(f"{path.name} has metadata that an index refuses: {faults}") from None
    if (metadata.name, str(metadata.version)) != (DISTRIBUTION, version):
        raise Refused(f"{path.name} is {metadata.name} {metadata.version}, not of this version.")
    if not metadata.description or metadata.description_content_type != "text/markdown":
        raise Refused(f"{path.name} has no README.")
    addresses = [str(each) for each in metadata.requires_dist or [] if each.url]
    if addresses:
        raise Refused(f"{path.name} requires {', '.join(addresses)}, which an index refuses.")


def check_command(wheel: Path) -> None:
    """Make a project with the wheel's command, in an environment that has only the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        run(UV, "venv", "-q", "-p", sys.executable, environment, cwd=ROOT)
        run(UV, "pip", "install", "-q", "-p", environment, "--no-deps", wheel, cwd=ROOT)
        run(environment / "bin/lockstep-vision", "new", "birds", cwd=Path(folder))
        project = Path(folder) / "birds"
        [vendored] = (project / "vendor").glob(f"{STEM}-*.whl")
        run(UV, "pip", "install", "-q", "-p", environment, "--no-deps", vendored, cwd=project)


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    try:
        paths = [folder / f"{STEM}-{version}-py3-none-any.whl", folder / f"{STEM}-{version}.tar.gz"]
        for path in paths:
            check_metadata(path, version)
        check_command(paths[0].resolve())
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{paths[0]} and {paths[1]} are fit for an index, and the wheel makes a project.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
