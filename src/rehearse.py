"""Dry run of a training on GPUs before a machine is rented: a few steps on a simulated CUDA driver.

    python src/rehearse.py <overrides of train.py> trainer.memory_limit_gib=16 [--capability=7.5]

Prints what fails with file and line, parameters without a gradient, lines that make the host wait for the device in
every step, and the peak memory with your batch. Exit code 0 only if nothing fails. Needs the package in nullgpu/, Linux
on x86-64 and cc; no GPU. --capability is the GPU's: 8.0 (the default) has bf16, 7.5 (T4) has fp16 only.
"""

import importlib
import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.command_line import run_script
from lockstep.config.compose import plain
from lockstep.config.schema import key_of
from lockstep.runs.environment import environment
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, EXIT_USER_ERROR, UserError

log = logging.getLogger(__name__)

SRC = Path(__file__).resolve().parent
STEPS, FEW_IMAGES, MOST_RANKS = 3, 4, 4
MEMORY_GIB = 16.0  # of a device, unless trainer.memory_limit_gib says otherwise
REPLACED = ("resume", "run_id", "sweep_dir", "ckpt_path", "logger")
TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n((?:[ \t]+.*\n)+)(\S.*(?:\n(?!Traceback|error: )\S.*)?)")
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
NOT_YOURS = ("/site-packages/", "/dist-packages/", "/lib/python3", "/nullgpu/", "<frozen", "<string>")
Line = tuple[str, str]  # ok, FAILED or nothing, and the text
Run = Callable[[list[str], Mapping[str, str], Path], int]  # starts train.py; returns its exit code


def main(argv: list[str]) -> int:
    stated = [word.partition("=")[2] for word in argv if word.startswith("--capability=")]
    words = [word for word in argv if not word.startswith("--capability=")]
    return run_script("train", words, lambda cfg: rehearse(cfg, [*stated, "8.0"][0]), __doc__ or "")


def rehearse(cfg: Any, capability: str) -> int:
    """Print what fails; return the exit code."""
    from lockstep.batch_size.search import run_train

    failed = False
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        for word, text in lines(plain(cfg), list(cfg.hydra.overrides.task), capability, Path(folder), run_train):
            log.info(f"{word:7} {text}")
            failed = failed or word == "FAILED"
    log.info("Something FAILED." if failed else "Nothing failed; nothing was on a GPU, and no speed is seen.")
    return EXIT_FAILED if failed else EXIT_OK


def lines(config: Any, words: list[str], capability: str, folder: Path, run: Run) -> Iterator[Line]:
    """Run train.py twice: few images with right results, then the whole batch for its memory.

    Raises:
        UserError: train.py refuses the options, the trainer uses no GPU, or the driver cannot be built here.
    """
    try:
        nullgpu = importlib.import_module("nullgpu")
    except ModuleNotFoundError:
        raise UserError("A dry run needs the simulated CUDA driver: pip install ./nullgpu") from None
    if missing := nullgpu.missing():
        raise UserError(f"No dry run here: {missing}.")
    trainer, data = config["trainer"], config["data"]
    if trainer["accelerator"] == "cpu":
        raise UserError("This trainer uses no GPU: pass trainer=gpu, ddp or fsdp.")
    if data.get("global_batch_size") == "max":
        raise UserError("data.global_batch_size=max: pass the number that find_batch_size.py --estimate prints.")
    nodes = trainer["num_nodes"] if trainer["num_nodes"] != "auto" else 1
    devices = trainer["devices"] if trainer["devices"] != "auto" else 2
    one_process = trainer["launch"] == "one_process"
    world_size, ranks = (1, 1) if one_process else (devices * nodes, min(devices * nodes, MOST_RANKS))
    accumulate = trainer["accumulate_grad_batches"]
    per_device = max(data.get("global_batch_size", 128) // (world_size * accumulate), 1)
    memory_gib = trainer["memory_limit_gib"] or MEMORY_GIB
    yield "", f"{per_device} images per device, {ranks} of {world_size} ranks on simulated GPUs of {memory_gib:g} GiB"

    def start(name: str, images: int, compute: bool, **more: Any) -> tuple[int, Path]:
        changes = {
            "data.global_batch_size": images * ranks * accumulate,
            **({} if one_process else {"trainer.devices": ranks, "trainer.num_nodes": 1}),
            "trainer.max_epochs": 1, "trainer.max_steps": -1, "trainer.max_time": "null", "trainer.compile": False,
            "trainer.limit_train_batches": STEPS * accumulate, "trainer.limit_val_batches": 1,
            "trainer.limit_test_batches": 1, "trainer.num_sanity_val_steps": 0, "trainer.check_val_every_n_epoch": 1,
            "trainer.val_check_interval": 1.0, "trainer.log_every_n_steps": 1000, "trainer.timeout_s": 60,
            **({"model.pretrained": False} if "pretrained" in config["model"] else {}),
            "run_id": "rehearsal", "logbook": "null", "s3.uri": "null", "paths.log_dir": folder / name,
            "+callbacks.rehearsal._target_": "lockstep.callbacks.unused_parameters.UnusedParameters",
            "+callbacks.rehearsal.path": folder / name / "unused.json", **more,
        }  # fmt: skip
        kept = [word for word in words if key_of(word) not in changes and key_of(word).split(".")[0] not in REPLACED]
        (folder / name).mkdir()
        simulated = nullgpu.environment(
            max(devices, ranks), memory_gib, compute, capability, syncs=folder / name, nccl_timeout_s=20
        )
        overrides = [*kept, *(f"{key}={value}" for key, value in changes.items())]
        simulated["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a rank waits for a collective at the line that calls it
        return run(overrides, {**environment(), **simulated}, folder / name / "output"), folder / name

    few = {"data.eval_batch_size": FEW_IMAGES} if "eval_batch_size" in data else {}
    code, place = start("few", min(FEW_IMAGES, per_device), True, **few)
    yield _outcome(f"{STEPS} steps, a validation, a checkpoint and a test with few images", code, place)
    unused: dict[str, str] = json.loads(_text(place / "unused.json") or "{}")
    known = (trainer["strategy"] or {}).get("find_unused_parameters")
    yield from (("" if known else "FAILED", f"no gradient for {name}: {where}") for name, where in unused.items())
    if code:
        return
    for text, count in _synchronisations(place).items():
        word = "" if text.startswith("GradScaler") else "FAILED"  # torch's own check for overflow in fp16
        yield word, f"the host waits for the device {count // STEPS} times a step: {text}"
    code, place = start("whole", per_device, False, **{"test": "false", "callbacks.checkpoints": "null"})
    if "became nan" not in _text(place / "output"):  # where nothing is computed, losses are what lay in the memory
        yield _outcome(f"{STEPS} steps and a validation with {per_device} images per device", code, place)
    record = json.loads(_text(place / "train/runs/rehearsal/run.json") or "{}")
    if peak := record.get("peak_memory_gib"):
        yield "", f"peak memory of a rank: {peak:.2f} GiB, and about 0.6 for CUDA, of {memory_gib:g} GiB"


def _outcome(what: str, code: int, place: Path) -> Line:
    """
    Raises:
        UserError: train.py refused the options.
    """
    if code == EXIT_OK:
        return "ok", what
    text = _text(place / "output")
    if code == EXIT_USER_ERROR:
        raise UserError(text.strip().splitlines()[-1].removeprefix("error: "))
    logs = {path.stem.removeprefix("rank"): path.read_text() for path in sorted(place.glob("train/runs/*/rank*.*"))}
    faults = [fault for rank, text in {"0": text, **logs}.items() for fault in _faults(text, rank)]
    stacks = (_yours(reversed(FRAME.findall(path.read_text()))) for path in sorted(place.glob("stack-rank*.txt")))
    waits = "".join(f"; a rank was at {line}" for line in stacks if line)
    with_line = [fault for fault in faults if not fault.startswith("not in your code")]
    return "FAILED", f"{what}: {next(iter(with_line or faults), text.strip().splitlines()[-1:])}{waits}"


def _faults(text: str, rank: str) -> Iterator[str]:
    """Each traceback in the output of a rank: the innermost line of the user's code, and the exception."""
    said = [line for line in re.findall(r"nullgpu: .*", text) if "differ" in line or "collective" in line]
    for frames, message in TRACEBACK.findall(text):
        where = _yours(FRAME.findall(frames)) or "not in your code"
        yield f"{where} · rank {rank} · {' '.join([*message.split(), *dict.fromkeys(said)])[:400]}"


def _yours(frames: Iterable[tuple[str, str]]) -> str:
    """Return file:line of the last frame that is neither of a library nor of Lockstep; nothing if none is."""
    found = ""
    for name, line in frames:
        path = Path(name)
        is_script = path.parent == SRC and path.stem in ("train", "rehearse")
        if not (any(part in name for part in NOT_YOURS) or path.is_relative_to(SRC / "lockstep") or is_script):
            found = f"{name.removeprefix(f'{SRC.parent}/')}:{line}"
    return found


def _synchronisations(place: Path) -> dict[str, int]:
    """Return the lines that synchronise in every step, with the largest count of a rank."""
    counts: dict[str, int] = {}
    for path in place.glob("steps-rank*.json"):
        for line, count in json.loads(path.read_text()).items():
            counts[line] = max(count, counts.get(line, 0))
    return {line: count for line, count in counts.items() if count >= STEPS}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
