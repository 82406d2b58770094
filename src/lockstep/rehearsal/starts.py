"""Runs train.py on null GPUs in processes of its own and gathers what they leave. Imports no torch."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lockstep.rehearsal.faults import Fault, fault_in
from lockstep.rehearsal.words import RUN_ID, Rehearsal
from lockstep.runs.config import Config
from lockstep.runs.environment import die_with_parent, environment
from lockstep.runs.errors import EXIT_USER_ERROR, UserError
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import read_json

DRIVER = REPOSITORY / "nullgpu"
TRAIN = REPOSITORY / "src" / "train.py"
FIND_BATCH_SIZE = REPOSITORY / "src" / "find_batch_size.py"
LIMIT_S = 900.0  # of one start; a laptop of two cores may carry four ranks
TOO_LONG = -1
Run = Callable[[list[str], dict[str, str], Path], int]  # words of train.py, variables, file for its output → exit code
OF_OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Started:
    """How one start ended.

    Args:
        syncs: synchronisations within training steps by line, of the rank with the most.
        watched: the notes of each rank's Watch.
    """

    fault: Fault | None
    record: Config
    syncs: Counter = field(default_factory=Counter)
    watched: list[Config] = field(default_factory=list)


def variables_of_null_gpus() -> dict[str, str]:
    """The environment by which a process finds null GPUs; builds them where that was not done yet.

    Raises:
        UserError: what is missing here, and what to install.
    """
    asked = subprocess.run([sys.executable, str(DRIVER / "nullgpu_build.py")], capture_output=True, text=True)
    if asked.returncode:
        raise UserError(f"Null GPUs cannot be built here: {asked.stderr.strip().splitlines()[-1]}")
    answer = json.loads(asked.stdout)
    if answer.get("missing"):
        raise UserError(f"No rehearsal here: {answer['missing']}.")
    variables: dict[str, str] = answer["variables"]
    return variables


def settings(hardware: Config, devices: int, compute: bool, folder: Path) -> dict[str, str]:
    """What a null GPU says that it is.

    Args:
        hardware: the node of configs/hardware/.
        compute: kernels' results are right; without, they are zero and cost no time.
    """
    return {
        "NULLGPU_DEVICES": str(devices),
        "NULLGPU_NAME": str(hardware["gpu"]),
        "NULLGPU_MEMORY_GIB": str(hardware["gpu_memory_gib"]),
        "NULLGPU_CAPABILITY": str(float(hardware["gpu_capability"])),
        "NULLGPU_COMPUTE": str(int(compute)),
        "NULLGPU_SYNCS": str(folder),
        "NULLGPU_NCCL_TIMEOUT_S": "20",
    }


def in_a_process(words: list[str], variables: dict[str, str], output: Path) -> int:
    """train.py as a user starts it; its exit code.

    Args:
        variables: of its environment, beside those of this process.
        output: file for what it writes.
    """
    inherited = {name: value for name, value in environment().items() if name not in OF_OTHERS}
    inherited.update(variables)
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(TRAIN), *words],
            env=inherited,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return TOO_LONG
        finally:
            process.kill()  # its ranks end with it
            process.wait()


def estimated_largest(words: list[str]) -> str | None:
    """What `find_batch_size.py --estimate` says of these options; None where it does not know the trainer."""
    command = [sys.executable, str(FIND_BATCH_SIZE), *words, "--estimate"]
    own = partial(die_with_parent, os.getpid())
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, preexec_fn=own)
    said = [line for line in done.stdout.splitlines() if line.startswith("estimated largest batch")]
    return said[-1] if said else None


def start(rehearsal: Rehearsal, words: list[str], folder: Path, variables: dict[str, str], run: Run) -> Started:
    """One start of train.py to its end.

    Args:
        folder: for all that it writes.
        variables: of the null GPUs.
        run: as `in_a_process`.
    Raises:
        UserError: train.py refused what it was asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "output.txt"
    code = run(words, variables, output)
    text = output.read_text()
    left = folder / "logs" / "train" / "runs" / RUN_ID
    texts = {0: text, **{_rank(path): path.read_text() for path in left.glob("rank*.log")}}
    record = read_json(left / "run.json") if (left / "run.json").exists() else {}
    last = (text.strip().splitlines() or [f"no word; exit code {code}"])[-1]
    if code == EXIT_USER_ERROR:
        raise UserError(last.removeprefix("error: "))
    fault = None
    if code:
        said = f"it did not end within {LIMIT_S:.0f} s" if code == TOO_LONG else last
        fault = fault_in(texts) or Fault(said, None)
    return Started(fault, record, _most(folder), _watched(folder))


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank"))


def _most(folder: Path) -> Counter:
    """By line the count of the rank that has the most."""
    counts: Counter = Counter()
    for path in folder.glob("steps-rank*.json"):
        counts |= Counter(json.loads(path.read_text()))
    return counts


def _watched(folder: Path) -> list[Config]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("watch-rank*.json"))]
