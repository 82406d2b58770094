"""The command of the installed package.

    lockstep-vision new birds [FOLDER]     make a project of your own, in a new folder
    lockstep-vision doctor [options]       check this machine, network and bucket, without a project

In a project the scripts do the rest: python src/train.py --help
"""

import os
import runpy
import sys
from pathlib import Path

from lockstep.process.errors import EXIT_OK, EXIT_USER_ERROR

PACKAGE = Path(__file__).resolve().parents[1]


def template() -> Path:
    """Return the folder with the files of a new project: in the wheel, or this repository."""
    installed = PACKAGE / "template"
    return installed if installed.is_dir() else PACKAGE.parents[1]


def main(argv: list[str] | None = None) -> int:
    """Run a command of the command line; return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    match arguments:
        case ["new", name] if not name.startswith("-"):
            return new(name, name)
        case ["new", name, folder]:
            return new(name, folder)
        case ["doctor", *options]:
            return doctor(options)
        case [] | ["--help" | "-h"]:
            print((__doc__ or "").strip())
            return EXIT_OK
    print(
        f"error: lockstep-vision {' '.join(arguments)} is no command: type lockstep-vision new "
        "birds, or lockstep-vision doctor.",
        file=sys.stderr,
    )
    return EXIT_USER_ERROR


def new(name: str, folder: str) -> int:
    script = template() / "launch" / "project.py"
    if not script.is_file():
        print(
            "error: This wheel was made for one project and has no files of another: install "
            "lockstep-vision from an index or a release.",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    return int(runpy.run_path(str(script))["main"](["new", name, folder]))


def doctor(options: list[str]) -> int:
    """Run the template's doctor.py, which ends this process with its exit code.

    Runs would go to logs/ of the working directory.
    """
    source = template() / "src"
    if not any(option.startswith("paths.log_dir=") for option in options):
        options = [*options, f"paths.log_dir={os.getcwd()}/logs"]
    sys.path.insert(0, str(source))
    sys.argv = [str(source / "doctor.py"), *options]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
