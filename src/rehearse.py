"""Dry run of a training on GPUs before a machine is rented.

    python src/rehearse.py <overrides of train.py> trainer.memory_limit_gib=16 [--capability=7.5]

It takes a few steps on a simulated CUDA driver, and prints what fails with file and line,
parameters without a gradient, lines that make the host wait for the device in every step, and the
peak memory with your batch. Exit code 0 only if nothing fails. Needs the package in nullgpu/, Linux
on x86-64 and cc; no GPU. --capability is the GPU's: 8.0 (the default) has bf16, 7.5 (T4) has fp16
only; one that the installed torch has no kernels for, such as 7.0 (V100), is refused.
"""

import importlib
import json
import logging
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.commands.command_line import read_command
from lockstep.config.overrides import SHORT_RUN_OVERRIDES, overrides_of_short_run
from lockstep.process.environment import environment
from lockstep.process.errors import EXIT_FAILED, EXIT_OK, EXIT_USER_ERROR, UserError
from lockstep.process.script import script
from lockstep.ranks.placement import count_devices_per_rank, count_ranks_of_node
from lockstep.records.batch import DEFAULT_GLOBAL_BATCH_SIZE, Batch
from lockstep.runs.batch_search import run_train
from lockstep.runs.batch_size import is_lockstep_data

log = logging.getLogger(__name__)

SRC = Path(__file__).resolve().parent
STEPS = 3
FEW_IMAGES = 4
MAX_RANKS = 4
MEMORY_GIB = 16.0
CUDA_GIB = 0.6
NCCL_TIMEOUT_S = 20
MESSAGE_LENGTH = 400  # characters
TRACEBACK = re.compile(
    r"Traceback \(most recent call last\):\n"
    r"((?:[ \t]+.*\n)+)"
    r"(\S.*(?:\n(?!Traceback|error: )\S.*)?)"
)
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
NULLGPU_MESSAGE = re.compile("nullgpu: .*(?:differ|collective).*")
NOT_OF_USER = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/nullgpu/",
    "<frozen",
    "<string>",
    f"{SRC}/lockstep/",
    f"{SRC}/train.py",
    f"{SRC}/rehearse.py",
)
FIXED = {
    **SHORT_RUN_OVERRIDES,
    "trainer.max_epochs": 1,
    "trainer.limit_val_batches": 1,
    "trainer.limit_test_batches": 1,
    "trainer.num_sanity_val_steps": 0,
    "trainer.log_every_n_steps": 1000,
    "run_id": "dry-run",
    "+callbacks.dry_run._target_": "lockstep.callbacks.unused_parameters.UnusedParameters",
}
# So train.py refuses parameters without a gradient under DDP.
NO_GRADIENT = "get no gradient in a step"
# A function that starts train.py with overrides, variables and a file for its output, and returns
# its exit code.
StartTraining = Callable[[list[str], Mapping[str, str], Path], int]


class Line(NamedTuple):
    """A line of the report; its mark is ok, FAILED or empty."""

    mark: str
    text: str


class Fault(NamedTuple):
    """A traceback of a run: the last line of the user's code in it, or "", and its message."""

    line: str
    message: str


@dataclass(frozen=True)
class Rehearsal:
    """The training of a config on simulated GPUs.

    Attributes:
        overrides: the user's.
        devices: the simulated GPUs of one node.
    """

    config: Any
    overrides: list[str]
    capability: str
    run: StartTraining
    nullgpu: Any
    devices: int
    num_nodes: int

    @property
    def is_one_process(self) -> bool:
        return self.config["trainer"]["launch"] == "one_process"

    @property
    def world_size(self) -> int:
        if self.is_one_process:
            return 1
        return count_ranks_of_node(self.devices, self.devices_per_rank) * self.num_nodes

    @property
    def devices_per_rank(self) -> int:
        """The GPUs of a rank."""
        return count_devices_per_rank(self.config["trainer"])

    @property
    def ranks(self) -> int:
        """The simulated ranks."""
        return min(self.world_size, MAX_RANKS)

    @property
    def accumulate(self) -> int:
        return self.config["trainer"]["accumulate_grad_batches"]

    @property
    def memory_gib(self) -> float:
        return self.config["trainer"]["memory_limit_gib"] or MEMORY_GIB

    @property
    def per_device(self) -> int:
        """The images of one device in a micro-batch."""
        global_batch_size = self.config["data"].get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE)
        return max(global_batch_size // (self.world_size * self.accumulate), 1)

    def start(self, folder: Path, images: int, compute: bool, **options: Any) -> int:
        """Run train.py and return its exit code.

        Args:
            folder: gets its output and its run.
            images: of one device.
            compute: whether results are computed, on the CPU.
            options: overrides for this start.
        """
        folder.mkdir()
        changes = self._changes(folder, images) | options
        overrides = overrides_of_short_run(self.overrides, changes)
        simulated = self.nullgpu.environment(
            max(self.devices, self.ranks * self.devices_per_rank),
            self.memory_gib,
            compute,
            self.capability,
            syncs=folder,
            nccl_timeout_s=NCCL_TIMEOUT_S,
        )
        # A rank waits for a collective at the line that calls it.
        simulated["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        return self.run(overrides, {**environment(), **simulated}, folder / "output")

    def _changes(self, folder: Path, images: int) -> dict[str, Any]:
        changes: dict[str, Any] = {
            **FIXED,
            "data.global_batch_size": images * self.ranks * self.accumulate,
            "trainer.limit_train_batches": STEPS * self.accumulate,
        }
        if not self.is_one_process:
            changes["trainer.devices"] = self.ranks * self.devices_per_rank
            changes["trainer.num_nodes"] = 1
        if "pretrained" in self.config["model"]:
            changes["model.pretrained"] = False
        changes["paths.log_dir"] = folder
        changes["+callbacks.dry_run.path"] = folder / "unused.json"
        return changes


def rehearse_training(
    config: Any, overrides: list[str], capability: str, folder: Path, run: StartTraining
) -> Iterator[Line]:
    """Run train.py twice: few images with computed results, then the whole batch for its memory.

    Raises:
        UserError: train.py refuses the options, the trainer uses no GPU, or the driver cannot be
            built here.
    """
    nullgpu = _import_driver()
    _check_config(config)
    trainer = config["trainer"]
    devices = trainer["devices"]
    if devices == "auto":
        devices = 2 * count_devices_per_rank(trainer)
    num_nodes = 1 if trainer["num_nodes"] == "auto" else trainer["num_nodes"]
    rehearsal = Rehearsal(config, overrides, capability, run, nullgpu, devices, num_nodes)
    if trainer["devices"] != "auto" and is_lockstep_data(config):
        # The runs below have batches of their own, which always divide.
        global_batch_size = config["data"].get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE)
        Batch.cut(global_batch_size, rehearsal.world_size, rehearsal.accumulate)
    yield Line(
        "",
        f"{rehearsal.per_device} images per device, {rehearsal.ranks} of {rehearsal.world_size} "
        f"ranks on simulated GPUs of {rehearsal.memory_gib:g} GiB",
    )

    code = yield from _train_few_images(rehearsal, folder / "few")
    if code == EXIT_OK:
        yield from _report_host_waits(folder / "few")
        yield from _train_whole_batch(rehearsal, folder / "whole")


def _import_driver() -> Any:
    """Return the package nullgpu."""
    try:
        nullgpu = importlib.import_module("nullgpu")
    except ModuleNotFoundError:
        raise UserError(
            "A dry run needs the simulated CUDA driver: pip install ./nullgpu"
        ) from None
    missing = nullgpu.missing()
    if missing:
        raise UserError(f"No dry run here: {missing}.")
    return nullgpu


def _check_config(config: Any) -> None:
    if config["trainer"]["accelerator"] == "cpu":
        raise UserError("This trainer uses no GPU: pass trainer=gpu, ddp or fsdp.")
    if config["data"].get("global_batch_size") == "max":
        raise UserError(
            "data.global_batch_size=max: pass the number that find_batch_size.py --estimate prints."
        )


def _train_few_images(rehearsal: Rehearsal, folder: Path) -> Generator[Line, None, int]:
    """Train on few images, with computed results; return the exit code."""
    config = rehearsal.config
    options = {}
    if "eval_batch_size" in config["data"]:
        options["data.eval_batch_size"] = FEW_IMAGES
    images = min(FEW_IMAGES, rehearsal.per_device)
    code = rehearsal.start(folder, images, True, **options)

    unused = _read_json(folder / "unused.json")
    is_allowed = (config["trainer"]["strategy"] or {}).get("find_unused_parameters")
    mark = "" if is_allowed else "FAILED"
    for name, line in unused.items():
        yield Line(mark, f"no gradient for {name}: {line}")

    # They are listed already.
    if not (unused and NO_GRADIENT in (folder / "output").read_text()):
        task = f"{STEPS} steps, a validation, a checkpoint and a test with few images"
        yield _describe_outcome(task, code, folder)
    return code


def _report_host_waits(folder: Path) -> Iterator[Line]:
    """Report each line that synchronises at every step, by the largest count of a rank."""
    counts: Counter[str] = Counter()
    for path in folder.glob("steps-rank*.json"):
        counts |= Counter(_read_json(path))
    for line, count in counts.items():
        if count < STEPS:
            continue
        # torch itself checks for overflow in fp16.
        mark = "" if line.startswith("GradScaler") else "FAILED"
        yield Line(mark, f"the host waits for the device {count // STEPS} times a step: {line}")


def _train_whole_batch(rehearsal: Rehearsal, folder: Path) -> Iterator[Line]:
    """Train on whole batches without computed results, and report the peak memory."""
    per_device = rehearsal.per_device
    options = {"test": "false", "callbacks.checkpoints": "null"}
    # Nothing is computed: losses are random memory, and may be nan.
    options["+callbacks.dry_run.checks_loss"] = "false"
    code = rehearsal.start(folder, per_device, False, **options)

    task = f"{STEPS} steps and a validation with {per_device} images per device"
    yield _describe_outcome(task, code, folder)
    peak = _read_json(folder / "train/runs/dry-run/run.json").get("peak_memory_gib")
    if peak:
        yield Line(
            "",
            f"peak memory of a rank: {peak:.2f} GiB, and about {CUDA_GIB} for CUDA, "
            f"of {rehearsal.memory_gib:g} GiB",
        )


def _describe_outcome(task: str, code: int, folder: Path) -> Line:
    """Return ok, or the first fault of a run in the user's code.

    Raises:
        UserError: train.py refused the options.
    """
    last_line = (folder / "output").read_text().strip().rpartition("\n")[2]
    if code == EXIT_OK:
        return Line("ok", task)
    if code == EXIT_USER_ERROR:
        raise UserError(last_line.removeprefix("error: "))

    faults = [*_read_faults(folder), Fault("", last_line)]
    fault = next((fault for fault in faults if fault.line), faults[0])
    waits = "".join(f"; a rank was at {line}" for line in _find_waiting_lines(folder))
    place = fault.line or "not in your code"
    return Line("FAILED", f"{task}: {place} · {fault.message}{waits}")


def _read_faults(folder: Path) -> list[Fault]:
    """Return the fault of each traceback in the output of the ranks."""
    faults = []
    for path in (folder / "output", *sorted(folder.glob("train/runs/*/rank*.*"))):
        text = path.read_text()
        rank = path.stem.removeprefix("rank").replace("output", "0")
        driver_messages = dict.fromkeys(NULLGPU_MESSAGE.findall(text))
        for frames, message in TRACEBACK.findall(text):
            sentence = " ".join([*message.split(), *driver_messages])[:MESSAGE_LENGTH]
            line = _find_user_line(FRAME.findall(frames))
            faults.append(Fault(line, f"rank {rank} · {sentence}"))
    return faults


def _find_waiting_lines(folder: Path) -> list[str]:
    """Return the lines of the user's code in which ranks hung."""
    lines = []
    for path in sorted(folder.glob("stack-rank*.txt")):
        # faulthandler writes the innermost frame first.
        line = _find_user_line(reversed(FRAME.findall(path.read_text())))
        if line:
            lines.append(line)
    return lines


def _find_user_line(frames: Iterable[tuple[str, str]]) -> str:
    """Return file:line of the last frame that is neither of a library nor of Lockstep; else ""."""
    user_line = ""
    for name, line in frames:
        if not any(part in name for part in NOT_OF_USER):
            user_line = f"{name.removeprefix(f'{SRC.parent}/')}:{line}"
    return user_line


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


@script
def main(argv: list[str]) -> int:
    """Train a few steps on simulated GPUs and log what was seen; return the exit code."""
    arguments = [word for word in argv if not word.startswith("--capability=")]
    capabilities = [word.partition("=")[2] for word in argv if word.startswith("--capability=")]
    capability = capabilities[0] if capabilities else "8.0"

    config = read_command("train", arguments, __doc__ or "").compose()
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        report = rehearse_training(config, config["overrides"], capability, Path(folder), run_train)
        for line in report:
            log.info(f"{line.mark:7} {line.text}")
            has_failed |= line.mark == "FAILED"
    if has_failed:
        log.info("Something FAILED.")
        return EXIT_FAILED
    log.info("Nothing failed. Nothing ran on a GPU, and no speed was measured.")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
