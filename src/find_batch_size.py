"""Find the largest batch that trains under any trainer, by short runs of train.py.

    python src/find_batch_size.py model=… data=… trainer=…            on this machine
    python src/find_batch_size.py … trainer=fsdp trainer.memory_limit_gib=16 --estimate    for GPUs elsewhere

data.global_batch_size=max in train.py does the same and trains with the batch that is found.
"""

import sys
from pathlib import Path
from typing import Any

from lockstep.commands.command_line import run_script
from lockstep.config.compose import whole_config


def find(cfg: Any) -> int:
    """Search, print the largest batch, and return the exit code."""
    from lockstep.batch_size.search import search
    from lockstep.launch.plan import RunPlan, resolve_batch, resolve_cluster
    from lockstep.runs.environment import environment
    from lockstep.runs.folder import RunFolder

    config = whole_config(cfg)
    config["data"]["global_batch_size"] = "max"
    cluster, accelerator = resolve_cluster(config, config["choices"]["trainer"], environment())
    if not cluster.is_rank_zero:
        return 0
    batch = resolve_batch(config, cluster)
    found = search(RunPlan(config, cluster, accelerator, RunFolder(Path()), batch))
    per_device, peak, limit = found["per_device"], found["peak_memory_gib"], found["limit_gib"]
    print(
        f"largest batch {per_device} per device, {found['global']} global = {per_device} × {cluster.world_size} × "
        f"{batch.accumulate} · limited by the {found['bounded_by']} · peak {peak:.3g} of {limit:.3g} GiB"
    )
    return 0


def main(argv: list[str]) -> int:
    task = find
    if "--estimate" in argv:
        from lockstep.batch_size.estimate import estimate

        argv, task = [word for word in argv if word != "--estimate"], estimate
    return run_script("train", argv, task, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
