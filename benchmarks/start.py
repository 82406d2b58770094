"""Measure how long --help, --cfg job and the first optimizer step with one and two ranks take.

    python benchmarks/start.py

The processes are measured whole and in turns. The first step counts from the start of the process to the end of its
first optimizer step; "bare imports" is a process that imports torch, lightning.pytorch, hydra and
numpy and does nothing else.
"""

import os
import re
import sys
import tempfile
import time
from functools import partial

from measuring import (
    TRAIN,
    build_goal_row,
    folder_overrides,
    measure_command_s,
    measure_in_turns,
    median,
    paired_ratio,
    run_for_output,
    save,
)

TORCH = [sys.executable, "-c", "import torch"]
IMPORTS = [sys.executable, "-c", "import torch, lightning.pytorch, hydra, numpy"]
FIRST_STEP = "--first-step"
ROUNDS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # This run decodes the images, and warms the disk.
        measure_first_step_s(scratch, "trainer=cpu")
        torch, help_s, cfg_s, imports, one, two = measure_in_turns(
            ROUNDS,
            partial(measure_command_s, TORCH),
            partial(measure_command_s, [*TRAIN, "--help"]),
            partial(measure_command_s, [*TRAIN, "--cfg", "job"]),
            partial(measure_command_s, IMPORTS),
            partial(measure_first_step_s, scratch, "trainer=cpu"),
            partial(measure_first_step_s, scratch, "trainer=ddp_sim"),
        )
    ratios = [
        ("--help ÷ import torch", paired_ratio(help_s, torch), 0.3),
        ("--cfg job ÷ import torch", paired_ratio(cfg_s, torch), 0.3),
        ("first optimizer step ÷ bare imports", paired_ratio(one, imports), 1.3),
        ("first step of two ranks ÷ of one", paired_ratio(two, one), 1.2),
    ]
    all_seconds = {
        "import_torch": torch,
        "help": help_s,
        "cfg_job": cfg_s,
        "imports": imports,
        "first_step": one,
        "first_step_two_ranks": two,
    }
    goals = [
        build_goal_row(f"start: {what}", f"≤ {limit}", ratio, ratio <= limit)
        for what, ratio, limit in ratios
    ]
    medians = {name: median(values, 3) for name, values in all_seconds.items()}
    save(
        "start",
        goals,
        seconds=medians,
        all_seconds=all_seconds,
        bytecode=not sys.flags.dont_write_bytecode,
    )


def measure_first_step_s(scratch: str, trainer: str) -> float:
    """Return the seconds from the start of a process to the end of its first optimizer step.

    If there are several ranks, rank 0 prints the time of the step.
    """
    overrides = [
        "experiment=quickstart",
        trainer,
        "trainer.max_steps=1",
        "test=false",
        *folder_overrides(scratch),
    ]
    started = time.time()
    output = run_for_output([sys.executable, __file__, FIRST_STEP, *overrides])
    match = re.search(r"first_step_at (\S+)", output)
    assert match, output
    return float(match[1]) - started


def train_and_print_first_step(overrides: list[str]) -> int:
    """Run train.py with a hook after the first optimizer step.

    A process that starts ranks gets no hook, because it must not import torch.
    """
    import train

    if "trainer=ddp_sim" not in overrides or "LOCKSTEP_AGENT" in os.environ:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def print_time(*_: object) -> None:
            handle.remove()
            print(f"first_step_at {time.time()!r}", flush=True)

        handle = register_optimizer_step_post_hook(print_time)
    return train.main(overrides)


if __name__ == "__main__":
    if sys.argv[1:2] == [FIRST_STEP]:
        sys.exit(train_and_print_first_step(sys.argv[2:]))
    main()
