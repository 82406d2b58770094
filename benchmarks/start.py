"""How long a start takes: --help, --cfg job, the first optimizer step, and the same with two ranks.

    python benchmarks/start.py

Whole processes, in turns. The first step's second counts from the process's start; "bare imports" is a process that
imports what the run needs (torch, lightning.pytorch, hydra, numpy) and does nothing else.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from measuring import HERE, TRAIN, goal_row, in_turns, median, output_of, paired_ratio, places, save, seconds_of

TORCH = [sys.executable, "-c", "import torch"]
IMPORTS = [sys.executable, "-c", "import torch, lightning.pytorch, hydra, numpy"]
FIRST_STEP = [sys.executable, str(HERE / "first_step.py")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    with tempfile.TemporaryDirectory() as scratch:
        first_step(Path(scratch), "trainer=cpu")  # decodes the images once, and warms the disk
        torch, help_s, cfg_s, imports, one, two = in_turns(
            repetitions,
            lambda: seconds_of(TORCH),
            lambda: seconds_of([*TRAIN, "--help"]),
            lambda: seconds_of([*TRAIN, "--cfg", "job"]),
            lambda: seconds_of(IMPORTS),
            lambda: first_step(Path(scratch), "trainer=cpu"),
            lambda: first_step(Path(scratch), "trainer=ddp_sim"),
        )
    ratios = [
        ("--help ÷ import torch", paired_ratio(help_s, torch), 0.3),
        ("--cfg job ÷ import torch", paired_ratio(cfg_s, torch), 0.3),
        ("first optimizer step ÷ bare imports", paired_ratio(one, imports), 1.3),
        ("first step of two ranks ÷ of one", paired_ratio(two, one), 1.2),
    ]
    named = {"import_torch": torch, "help": help_s, "cfg_job": cfg_s, "imports": imports, "first_step": one,
             "first_step_two_ranks": two}  # fmt: skip
    save(
        "start",
        [goal_row(7, f"start: {what}", f"≤ {limit}", ratio, ratio <= limit) for what, ratio, limit in ratios],
        seconds={name: median(values, 3) for name, values in named.items()},
        all_seconds={name: [round(value, 3) for value in values] for name, values in named.items()},
        bytecode=not sys.flags.dont_write_bytecode,
    )


def first_step(scratch: Path, trainer: str) -> float:
    """Seconds from starting the process to the end of its first optimizer step (on rank 0, with all its ranks)."""
    words = ["experiment=quickstart", trainer, "trainer.max_steps=1", "test=false", *places(scratch)]
    started = time.time()
    said = output_of([*FIRST_STEP, *words])
    at = re.search(r"first_step_at (\S+)", said)
    assert at, said
    return float(at.group(1)) - started


if __name__ == "__main__":
    main()
