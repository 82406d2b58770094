"""Find the largest batch that trains under any trainer, by short runs of train.py.

    python src/find_batch_size.py model=… data=… trainer=…

It runs on this machine. For GPUs elsewhere:

    python src/find_batch_size.py … trainer=fsdp trainer.memory_limit_gib=16 --estimate

data.global_batch_size=max in train.py does the same and trains with the batch that is found.
"""

import sys
from pathlib import Path
from typing import Any

from lockstep.commands.command_line import run_script
from lockstep.config.compose import whole_config


def find(cfg: Any) -> int:
    """Search, print the largest batch, and return the exit code."""
    from lockstep.process.environment import environment
    from lockstep.records.folder import RunFolder
    from lockstep.runs.batch_search import search
    from lockstep.runs.plan import RunPlan, resolve_batch, resolve_cluster

    config = whole_config(cfg)
    config["data"]["global_batch_size"] = "max"
    trainer_name = config["choices"]["trainer"]
    cluster, accelerator = resolve_cluster(config, trainer_name, environment())
    if not cluster.is_rank_zero:
        return 0

    batch = resolve_batch(config, cluster)
    largest = search(RunPlan(config, cluster, accelerator, RunFolder(Path()), batch))
    per_device = largest["per_device"]
    print(
        f"largest batch {per_device} per device, {largest['global']} global "
        f"= {per_device} × {cluster.world_size} × {batch.accumulate} "
        f"· limited by the {largest['bounded_by']} "
        f"· peak {largest['peak_memory_gib']:.3g} of {largest['limit_gib']:.3g} GiB"
    )
    return 0


def main(argv: list[str]) -> int:
    task = find
    if "--estimate" in argv:
        from lockstep.training.memory_estimate import estimate

        task = estimate
    words = [word for word in argv if word != "--estimate"]
    return run_script("train", words, task, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
