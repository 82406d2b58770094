"""Find the largest batch that trains under any trainer, by a few real steps in processes that end.

    python src/find_batch_size.py model=… data=… trainer=…            on the hardware at hand
    python src/find_batch_size.py … trainer=fsdp hardware=g4dn.xlarge --estimate    without it

data.global_batch_size=max in train.py does the same and trains with what was found.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.batch_size.sessions import Largest, find_largest
from lockstep.config.command_line import run_script
from lockstep.config.compose import chosen_options, plain
from lockstep.distributed.cluster import environment
from lockstep.launch.plan import RunPlan
from lockstep.runs.errors import EXIT_OK


def find(cfg: Any) -> int:
    """Search, print, record; returns the exit code."""
    from lockstep.launch.agree import agree_on_run
    from lockstep.launch.plan import resolve_batch, resolve_cluster
    from lockstep.launch.start import begin
    from lockstep.runs.batch import Batch
    from lockstep.runs.config import read_only
    from lockstep.runs.files import utc_now
    from lockstep.runs.folder import RunFolder, new_run_id
    from lockstep.runs.record import update_record
    from lockstep.runs.redact import refuse_secrets

    composed = plain(cfg)
    composed["task_name"], composed["data"]["global_batch_size"] = "find_batch_size", "max"
    refuse_secrets(composed)
    config, choices, environ = read_only(composed), chosen_options(cfg), environment()
    cluster, accelerator = resolve_cluster(config, choices["trainer"], environ)
    if cluster.is_supervisor:
        agree_on_run(config, cluster, accelerator, environ)
    folder = RunFolder(Path(config["paths"]["log_dir"]) / config["task_name"] / "runs" / new_run_id())
    words, batch = tuple(cfg.hydra.overrides.task), resolve_batch(config, cluster)
    plan = RunPlan(config, choices, words, cluster, accelerator, folder, batch, initial_weights=config.get("ckpt_path"))
    largest = find_largest(plan, environ)
    if not cluster.is_rank_zero:
        return EXIT_OK
    fields = largest.record()
    plan = replace(plan, batch=Batch.cut(largest.global_batch_size, cluster.world_size, batch.accumulate))
    begin(plan, fresh=True)
    with update_record(folder.record) as record:
        record.take({"largest_batch": fields, "peak_memory_gib": fields["peak_memory_gib"]})
        record.status, record.phase, record.exit_code, record.finished_at = "finished", "end", EXIT_OK, utc_now()
    print(sentence(largest, plan), flush=True)
    return EXIT_OK


def sentence(largest: Largest, plan: RunPlan) -> str:
    """What was found, in one line."""
    fields, batch = largest.record(), plan.batch
    bound = " (all the data there is)" if fields["bounded_by"] == "data set" else ""
    return (
        f"largest batch {batch.per_device} per device{bound}, {batch.global_size} global = "
        f"{batch.per_device} × {plan.cluster.world_size} × {batch.accumulate} · {fields['probes']} probes, "
        f"{fields['out_of_memory']} out of memory, {fields['seconds']:.0f} s · "
        f"peak {fields['peak_memory_gib']:.3g} of {fields['limit_gib']:.3g} GiB"
    )


def main(argv: list[str]) -> int:
    task = find
    if "--estimate" in argv:
        from lockstep.batch_size.estimate import estimate

        argv, task = [word for word in argv if word != "--estimate"], estimate
    return run_script("train", argv, task, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
