"""Two ranks on two cores: ddp_sim against one process with two threads, and fsdp_sim's step against ddp_sim's.

    python benchmarks/ranks.py            # also one rank per core on larger machines: --ranks N

Whole runs of `python src/train.py` on made-up images, in turns; each one's own record says its images/s and step time.
"""

import argparse
import tempfile

from measuring import goal_row, in_turns, median, paired_ratio, run_record, save

WORDS = ["model=vit_tiny_32", "data=synthetic", "data.global_batch_size=64", "test=false", "trainer.max_epochs=1",
         "trainer.limit_val_batches=0"]  # fmt: skip
SIDES = {"one_process": ["trainer=cpu"], "ddp_sim": ["trainer=ddp_sim"], "fsdp_sim": ["trainer=fsdp_sim"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:

        def images_per_s(side: str) -> float:
            extra = [] if side == "one_process" else [f"trainer.devices={arguments.ranks}"]
            extra += [f"data.num_images={64 * arguments.steps + 640}", "data.num_val=640"]
            record = run_record(scratch, [*WORDS, *SIDES[side], *extra])
            figures = {"images_per_s": record["images_per_s"], "step_s": record["throughput"]["step_seconds"]["p50"]}
            found[side].append(figures)
            return figures["images_per_s"]

        in_turns(arguments.repetitions, *[lambda side=side: images_per_s(side) for side in SIDES])
    rates = {side: [f["images_per_s"] for f in rows] for side, rows in found.items()}
    steps = {side: [f["step_s"] for f in rows] for side, rows in found.items()}
    ddp, fsdp = paired_ratio(rates["ddp_sim"], rates["one_process"]), paired_ratio(steps["fsdp_sim"], steps["ddp_sim"])
    save(
        "ranks",
        [
            goal_row(9, "ddp_sim images/s ÷ one process with two threads", "≥ 0.95", ddp, ddp >= 0.95),
            goal_row(9, "fsdp_sim step ÷ ddp_sim step", "≤ 1.2", fsdp, fsdp <= 1.2),
        ],
        model="vit_tiny_32", global_batch=64, ranks=arguments.ranks,
        images_per_s={side: median(values, 1) for side, values in rates.items()},
        step_seconds={side: median(values) for side, values in steps.items()},
        all=found,
    )  # fmt: skip


if __name__ == "__main__":
    main()
