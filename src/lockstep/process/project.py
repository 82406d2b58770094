"""The folder of the project: a clone, or a project that has lockstep as a package."""

import sys
from pathlib import Path


def project_root() -> Path:
    """Return the folder that holds configs/ and src/.

    The first one that has them counts: this clone, the folder above the running script's, the
    working directory, and the folders above it. In a project made by `make new`, lockstep is an
    installed package, and the script's path tells where the project is.
    """
    clone = Path(__file__).resolve().parents[3]
    folder_of_script = Path(sys.argv[0]).resolve().parents[1:2]
    working_directory = Path.cwd()
    for folder in (clone, *folder_of_script, working_directory, *working_directory.parents):
        if (folder / "configs" / "train.yaml").is_file():
            return folder
    return working_directory


REPOSITORY = project_root()
