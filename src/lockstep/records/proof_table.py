"""The table of src/prove.py, with a line for each check. Imports no torch."""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.process.files import write_atomically
from lockstep.records.record import RunRecord, read_record

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
    "compile": "the compiled net, as trainer.compile=true",
}
# These checks run only on GPUs. Nets are rarely compiled for CPUs, and a compilation takes long.
GPU_CHECKS = ("compile",)
MARKS = {True: "equal", False: "DIFFERS", None: "–"}


@dataclass(frozen=True)
class CheckResult:
    """A line of the table. `equal` is None if the check was not made or says nothing."""

    check: str
    equal: bool | None
    first_step: int | None = None
    difference: str | None = None
    cause: str | None = None

    def __str__(self) -> str:
        place = None if self.first_step is None else f"step {self.first_step}"
        notes = filter(None, (place, self.difference, self.cause))
        return f"{MARKS[self.equal]:8} {CHECKS[self.check]:48} {' · '.join(notes)}".rstrip()


def skip_check(check: str, why: str) -> CheckResult:
    """Return the line of a check that does not count."""
    return CheckResult(check, None, cause=why)


def write_table(folder: Path, overrides: list[str], results: list[CheckResult], where: str) -> None:
    """Write prove.json, a list of the lines, and prove.md.

    Args:
        where: a sentence on the machine that ran the checks.
    """
    rows = [asdict(result) for result in results]
    write_atomically(folder / "prove.json", lambda file: json.dump(rows, file, indent=1))
    lines = [
        "# Is the training the same?",
        "",
        f"`python src/prove.py {shlex.join(overrides)}`",
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


def proof_of_run(record: RunRecord, logs: Path) -> dict[str, Any]:
    """Return the newest proof with a run's experiment, model and data, for its page.

    Args:
        logs: the folder that contains prove/.

    Returns:
        command, where (a sentence on the machine) and lines; {} if there is no proof.
    """
    for path in sorted(logs.glob("prove/*/prove.json"), reverse=True):
        reference = path.parent / "train" / "runs" / "reference" / "run.json"
        if reference.exists() and _recipe_names(read_record(reference)) == _recipe_names(record):
            return _read_table(path.parent)
    return {}


def _recipe_names(record: RunRecord) -> list[str | None]:
    return [record.experiment, record.model, record.data]


def _read_table(folder: Path) -> dict[str, Any]:
    rows = json.loads((folder / "prove.json").read_text())
    _, _, command, _, where, *_ = (folder / "prove.md").read_text().splitlines()
    lines = []
    for row in rows:
        result = CheckResult(**row)
        step = "" if result.first_step is None else result.first_step
        cells = [CHECKS[result.check], MARKS[result.equal], step]
        lines.append([*cells, result.difference or "", result.cause or ""])
    return {"command": command.strip("`"), "where": where, "lines": lines}
