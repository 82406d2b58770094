"""How long a start takes: --help, --cfg job, the first optimizer step, and the same with two ranks.

    python benchmarks/start.py

Whole processes, in turns. The first step counts from the start of the process to the end of its
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
    goal_row,
    in_turns,
    median,
    output_of,
    paired_ratio,
    save,
    seconds_of,
)

TORCH = [sys.executable, "-c", "import torch"]
IMPORTS = [sys.executable, "-c", "import torch, lightning.pytorch, hydra, numpy"]
FIRST_STEP = "--first-step"
ROUNDS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        first_step(scratch, "trainer=cpu")  # decodes the images once, and warms the disk
        torch, help_s, cfg_s, imports, one, two = in_turns(
            ROUNDS,
            partial(seconds_of, TORCH),
            partial(seconds_of, [*TRAIN, "--help"]),
            partial(seconds_of, [*TRAIN, "--cfg", "job"]),
            partial(seconds_of, IMPORTS),
            partial(first_step, scratch, "trainer=cpu"),
            partial(first_step, scratch, "trainer=ddp_sim"),
        )
    ratios = [
        ("--help ÷ import torch", paired_ratio(help_s, torch), 0.3),
        ("--cfg job ÷ import torch", paired_ratio(cfg_s, torch), 0.3),
        ("first optimizer step ÷ bare imports", paired_ratio(one, imports), 1.3),
        ("first step of two ranks ÷ of one", paired_ratio(two, one), 1.2),
    ]
    named = {"import_torch": torch, "help": help_s, "cfg_job": cfg_s, "imports": imports, "first_step": one,
             "first_step_two_ranks": two}  # fmt: skip
    goals = [
        goal_row(f"start: {what}", f"≤ {limit}", ratio, ratio <= limit)
        for what, ratio, limit in ratios
    ]
    medians = {name: median(values, 3) for name, values in named.items()}
    save(
        "start",
        goals,
        seconds=medians,
        all_seconds=named,
        bytecode=not sys.flags.dont_write_bytecode,
    )


def first_step(scratch: str, trainer: str) -> float:
    """Return the seconds from starting the process to the end of its first optimizer step, on rank
    0.
    """
    words = [
        "experiment=quickstart",
        trainer,
        "trainer.max_steps=1",
        "test=false",
        *folder_overrides(scratch),
    ]
    started = time.time()
    said = output_of([sys.executable, __file__, FIRST_STEP, *words])
    at = re.search(r"first_step_at (\S+)", said)
    assert at, said
    return float(at.group(1)) - started


def train_and_print_first_step(words: list[str]) -> int:
    """Run train.py with a hook after the first optimizer step.

    A process that starts ranks imports no torch for it.
    """
    import train

    if "trainer=ddp_sim" not in words or "LOCKSTEP_AGENT" in os.environ:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def tell(*_: object) -> None:
            handle.remove()
            print(f"first_step_at {time.time()!r}", flush=True)

        handle = register_optimizer_step_post_hook(tell)
    return train.main(words)


if __name__ == "__main__":
    if sys.argv[1:2] == [FIRST_STEP]:
        sys.exit(train_and_print_first_step(sys.argv[2:]))
    main()
