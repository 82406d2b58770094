"""Find the largest batch that trains under any trainer, by short runs of train.py.

    python src/find_batch_size.py model=… data=… trainer=…

It runs on this machine. For GPUs elsewhere:

    python src/find_batch_size.py … trainer=fsdp trainer.memory_limit_gib=16 --estimate

data.global_batch_size=max in train.py does the same and trains with the batch that is found.
"""

import sys

from lockstep.commands.command_line import read_command, take_flag
from lockstep.process.errors import EXIT_OK, UserError
from lockstep.process.script import script
from lockstep.ranks.find import find_ranks
from lockstep.records.config import Config
from lockstep.runs.batch_search import search_largest_batch
from lockstep.runs.batch_size import cut_smallest_batch


@script
def main(argv: list[str]) -> int:
    """Search or estimate, print the largest batch, and return the exit code."""
    arguments, is_estimate = take_flag(argv, "--estimate")
    config = read_command("train", arguments, __doc__ or "").compose()
    if config["choices"]["data"] == "none":
        module = config["task"]["_target_"]
        raise UserError(
            f"With data=none the loaders of {module} decide the batch size, so there is none to "
            "find. Pass data=NAME, or set the size in the module."
        )
    if is_estimate:
        from lockstep.training.memory_estimate import estimate

        return estimate(config)
    return find_largest_batch(config)


def find_largest_batch(config: Config) -> int:
    """Search by short runs on this machine."""
    cluster = find_ranks(config)
    if not cluster.is_rank_zero:
        return EXIT_OK

    smallest = cut_smallest_batch(config, cluster)
    largest = search_largest_batch(config, cluster, smallest)
    per_device = largest["per_device"]
    print(
        f"largest batch {per_device} per device, {largest['global']} global "
        f"= {per_device} × {cluster.world_size} × {smallest.accumulate} "
        f"· limited by the {largest['bounded_by']} "
        f"· peak {largest['peak_memory_gib']:.3g} of {largest['limit_gib']:.3g} GiB"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
