"""Count the functions and files that a reader passes from the command to Trainer.fit.

    python benchmarks/walk.py [OVERRIDE …]        # of train.py; by default experiment=quickstart

It counts the functions and files of src/ that run before Trainer.fit, and how often the next call is
in another file. Lambdas and comprehensions do not count.
"""

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from measuring import REPOSITORY, folder_overrides

SRC = f"{REPOSITORY / 'src'}{os.sep}"


@dataclass
class Walk:
    """The calls so far, as sys.setprofile reports them."""

    functions: set[tuple[str, str]] = field(default_factory=set)
    switches: int = 0
    last_file: str = ""

    def count(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Count a call of a function of src/."""
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or not code.co_filename.startswith(SRC):
            return
        self.functions.add((code.co_filename, code.co_name))
        if self.last_file and self.last_file != code.co_filename:
            self.switches += 1
        self.last_file = code.co_filename


def main() -> None:
    sys.path.insert(0, SRC)
    import lightning.pytorch as pl

    import train

    walk = Walk()
    folder = tempfile.mkdtemp()

    def report(*_: Any, **__: Any) -> None:
        sys.setprofile(None)
        files = {file for file, _ in walk.functions}
        print(
            f"{len(walk.functions)} functions, {len(files)} files, {walk.switches} switches of "
            "file until Trainer.fit",
            flush=True,
        )
        shutil.rmtree(folder)
        # An exception would be recorded as the error of a failed run.
        os._exit(0)

    pl.Trainer.fit = report  # type: ignore[assignment]
    overrides = sys.argv[1:] or ["experiment=quickstart"]
    sys.argv = [f"{SRC}train.py", *overrides, "trainer.num_threads=1", *folder_overrides(folder)]
    sys.setprofile(walk.count)
    train.main(sys.argv[1:])


if __name__ == "__main__":
    main()
