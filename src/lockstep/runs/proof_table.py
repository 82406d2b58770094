"""The table of src/prove.py: a line for each check."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.process.files import write_atomically
from lockstep.runs.recording import Difference

CHECKS = {
    "repeat": "two runs of the same command",
    "resume_step": "stopped within an epoch, resumed",
    "resume_epoch": "killed between epochs, resumed",
    "accumulate": "two micro-batches in place of one batch",
    "ddp": "two ranks by DDP",
    "fsdp": "two ranks by FSDP",
    "workers": "two more loader workers",
    "metric": "the metric of the best checkpoint on two ranks",
    "eval": "eval.py of the best checkpoint",
}
MARKS = {True: "equal", False: "DIFFERS", None: "–"}


@dataclass(frozen=True)
class Result:
    """A line of the table; `equal` is None where the two cannot be equal."""

    check: str
    equal: bool | None
    first_step: int | None = None
    difference: str | None = None
    cause: str | None = None

    def __str__(self) -> str:
        place = None if self.first_step is None else f"step {self.first_step}"
        notes = filter(None, (place, self.difference, self.cause))
        return f"{MARKS[self.equal]:8} {CHECKS[self.check]:48} {' · '.join(notes)}".rstrip()


def nothing(check: str, why: str) -> Result:
    """Return the line of a check that is not counted."""
    return Result(check, None, cause=why)


def differs(check: str, difference: Difference, cause: str) -> Result:
    return Result(check, False, difference.step, str(difference), cause)


def write_table(folder: Path, overrides: list[str], results: list[Result], where: str) -> None:
    """Write prove.json, a list of the lines, and prove.md.

    Args:
        where: a sentence that says what it ran on.
    """
    rows = [asdict(result) for result in results]
    write_atomically(folder / "prove.json", lambda file: json.dump(rows, file, indent=1))
    lines = [
        "# Is the training the same?",
        "",
        f"`python src/prove.py {' '.join(overrides)}`",
        "",
        where,
        "",
        "| check | result | first step | difference | cause |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        step = "" if result.first_step is None else result.first_step
        mark = MARKS[result.equal] if result.equal is not False else "**differs**"
        cells = [CHECKS[result.check], mark, step, result.difference or "", result.cause or ""]
        texts = [str(cell).replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(texts)} |")
    text = "\n".join(lines) + "\n"
    write_atomically(folder / "prove.md", lambda file: file.write(text))
