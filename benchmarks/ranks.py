"""Every strategy on two cores beside one process with two threads: seconds of a step of the same global batch.

    python benchmarks/ranks.py            # also one rank per core on larger machines: --ranks N

Runs of `python src/train.py` on made-up images, up at once, that take turns of a few steps (step_turns.py), since a
machine that others share changes its speed from one minute to the next. A ratio is the median over the rounds.
Writes results/ranks.json and logbook/measurements/ranks.md.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import HERE, REPOSITORY, goal_row, median, paired_ratio, places, save
from step_turns import Pipe, Turn

WORDS = ["model=vit_tiny_32", "data=synthetic", "data.global_batch_size=64", "data.num_val=640", "test=false",
         "trainer.limit_val_batches=0"]  # fmt: skip
PAGE = REPOSITORY / "logbook" / "measurements" / "ranks.md"
OPTIONS = {
    "one_process": ["trainer=cpu"],
    "accumulation": ["trainer=cpu", "trainer.accumulate_grad_batches=4"],
    "ddp_sim": ["trainer=ddp_sim"],
    "allreduce_sim": ["trainer=allreduce_sim"],
    "fsdp_sim": ["trainer=fsdp_sim"],
    "model_parallel": ["trainer=model_parallel", "trainer.stage_devices=[cpu,cpu]"],
    "model_parallel_4": ["trainer=model_parallel", "trainer.stage_devices=[cpu,cpu]", "trainer.micro_batches=4"],
}
WORDS_OF = {"accumulation": "one process, 4 × 16 images accumulated", "model_parallel": "model parallel, two stages",
            "model_parallel_4": "the same, 4 micro-batches", "one_process": "one process, two threads"}  # fmt: skip
SIDES = list(OPTIONS)
LONGEST_S = 300  # without a word from any of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4, help="in a turn; the first is not counted")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rounds = measure(Path(scratch), arguments.rounds, arguments.steps, arguments.ranks)
    steps = {side: [median(turn) for turn in turns] for side, turns in rounds.items()}
    ddp, fsdp = paired_ratio(steps["one_process"], steps["ddp_sim"]), paired_ratio(steps["fsdp_sim"], steps["ddp_sim"])
    path = save(
        "ranks",
        [
            goal_row(9, "ddp_sim images/s ÷ one process with two threads", "≥ 0.95", ddp, ddp >= 0.95),
            goal_row(9, "fsdp_sim step ÷ ddp_sim step", "≤ 1.2", fsdp, fsdp <= 1.2),
        ],
        model="vit_tiny_32", global_batch=64, ranks=arguments.ranks,
        images_per_s={side: round(64 / median(values), 1) for side, values in steps.items()},
        step_seconds={side: median(values) for side, values in steps.items()},
        all_step_seconds=steps,
    )  # fmt: skip
    PAGE.write_text(page(json.loads(path.read_text())))


def page(content: dict[str, Any]) -> str:
    """The table in markdown, of what results/ranks.json holds."""
    steps, machine = content["all_step_seconds"], content["machine"]
    lines = [
        "# Time of a step by strategy",
        "",
        f"Written by `{content['command']}` on {content['date']}; do not edit. {content['model']}, the same global "
        f"batch of {content['global_batch']} made-up images, {machine['cpu']}, {machine['cores']} cores: ranks are "
        "processes with a core each. Real runs that take turns; a ratio is the median over the rounds.",
        "",
        "| strategy | processes | step, ms | ÷ one process's |",
        "|---|---|---|---|",
    ]
    for side, seconds in steps.items():
        ratio = paired_ratio(seconds, steps["one_process"])
        name, ranks = WORDS_OF.get(side, f"`{side}`"), content["ranks"] if side.endswith("_sim") else 1
        lines.append(f"| {name} | {ranks} | {1000 * content['step_seconds'][side]:.0f} | {ratio:.2f} × |")
    return "\n".join(lines) + "\n"


def measure(folder: Path, rounds: int, steps: int, ranks: int) -> dict[str, list[list[float]]]:
    """Seconds of each counted step, by run and turn."""
    number = {side: ranks if side.endswith("_sim") else 1 for side in SIDES}
    everyone = sum(number.values())
    for name in ["ready", "end", *[f"{side}.{rank}" for side in SIDES for rank in range(number[side])]]:
        os.mkfifo(folder / name)
    ready, runs = Pipe(folder / "ready"), []
    try:
        for i, side in enumerate(SIDES):
            before, after = SIDES[i - 1], SIDES[(i + 1) % len(SIDES)]
            turn = Turn(str(folder), side, number[side], after, number[after], number[before], 5, steps, rounds)
            runs.append(start(turn, side))
            expect(ready, number[side], runs)  # one after the other: a start takes both cores
        for rank in range(number[SIDES[0]]):
            Pipe(folder / f"{SIDES[0]}.{rank}").put(number[SIDES[-1]])
        expect(ready, everyone * rounds, runs)
        Pipe(folder / "end").put(everyone)
        for run in runs:
            if run.wait(LONGEST_S):
                raise SystemExit(f"a run ended with {run.returncode}")
        return {side: json.loads((folder / f"{side}.json").read_text()) for side in SIDES}
    finally:
        for run in runs:
            run.kill()  # its ranks leave with it


def start(turn: Turn, side: str) -> subprocess.Popen[bytes]:
    words = [*WORDS, *places(f"{turn.folder}/{side}"), f"trainer.max_steps={turn.total_steps}"]
    words += [f"data.num_images={64 * turn.total_steps + 640}"]
    words += OPTIONS[side] + ([f"trainer.devices={turn.ranks}"] if side.endswith("_sim") else [])
    return subprocess.Popen(
        [sys.executable, str(HERE / "step_turns.py"), *words],
        cwd=REPOSITORY, env={**os.environ, **turn.environment()}, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def expect(ready: Pipe, count: int, runs: list[subprocess.Popen[bytes]]) -> None:
    """Wait until that many words came from ranks.

    Raises:
        SystemExit: a run ended, or none said anything for long.
    """
    waited = 0
    while count:
        if select.select([ready.handle], [], [], 1)[0]:
            ready.take(1)
            count, waited = count - 1, 0
        else:
            waited += 1
        if waited > LONGEST_S or any(run.poll() is not None for run in runs):
            raise SystemExit("a run ended early, or hangs; its words are above")


if __name__ == "__main__":
    main()
