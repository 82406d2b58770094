"""Find the largest batch that trains under any trainer, by a few real steps in processes that end.

    python src/find_batch_size.py model=… data=… trainer=…            on the hardware at hand
    python src/find_batch_size.py … trainer=fsdp hardware=g4dn.xlarge --estimate    without it

data.global_batch_size=max in train.py does the same and trains with what was found.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import sys
from pathlib import Path
from typing import Any

from lockstep.batch_size.sessions import find_largest
from lockstep.config.compose import chosen_options, plain, run_door
from lockstep.distributed import cluster as world
from lockstep.runs.errors import EXIT_OK


def find(cfg: Any) -> int:
    """The door's task: search, print, record."""
    from lockstep.launch.launcher import agree_on_run, describe_batch, resolve_cluster
    from lockstep.launch.start import begin
    from lockstep.runs.files import utc_now
    from lockstep.runs.folder import RunFolder, new_run_id
    from lockstep.runs.record import update_record
    from lockstep.runs.redact import refuse_secrets

    config = plain(cfg)
    refuse_secrets(config)
    environment = world.environment()
    config["choices"] = chosen_options(cfg)
    cluster = resolve_cluster(config, environment)
    config["overrides"], config["task_name"] = list(cfg.hydra.overrides.task), "find_batch_size"
    if cluster.is_supervisor:
        agree_on_run(config, cluster, environment)
    largest = find_largest(config, cluster, environment)
    if not cluster.is_rank_zero:
        return EXIT_OK
    fields = largest.record()
    config["data"]["global_batch_size"] = fields["global"]
    describe_batch(config, cluster)
    folder = RunFolder(Path(config["paths"]["log_dir"]) / config["task_name"] / "runs" / new_run_id())
    begin(config, cluster, folder, fresh=True)
    with update_record(folder.record) as record:
        record.take({"largest_batch": fields, "peak_memory_gib": fields["peak_memory_gib"]})
        record.status, record.phase, record.exit_code, record.finished_at = "finished", "end", EXIT_OK, utc_now()
    print(sentence(fields, config, cluster), flush=True)
    return EXIT_OK


def sentence(fields: dict[str, Any], config: dict[str, Any], cluster: Any) -> str:
    """What was found, in one line."""
    accumulate = config["trainer"]["accumulate_grad_batches"]
    bound = " (all the data there is)" if fields["bounded_by"] == "data set" else ""
    return (
        f"largest batch {fields['per_device']} per device{bound}, {fields['global']} global = "
        f"{fields['per_device']} × {cluster.world_size} × {accumulate} · {fields['probes']} probes, "
        f"{fields['out_of_memory']} out of memory, {fields['seconds']:.0f} s · "
        f"peak {fields['peak_memory_gib']:.3g} of {fields['limit_gib']:.3g} GiB"
    )


def main(argv: list[str]) -> int:
    task = find
    if "--estimate" in argv:
        from lockstep.batch_size.estimate import estimate

        argv, task = [word for word in argv if word != "--estimate"], estimate
    return run_door("train", argv, task, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
