"""Peaks of tracked bytes of real ranks under any trainer, for tests and tables of the batch search."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranks import run_ranks

if TYPE_CHECKING:
    from lockstep.launch.plan import RunPlan

AMPLE_GIB = 64.0


def planned(overrides: list[str], folder: Path, ranks: int | None = None) -> "RunPlan":
    """The plan of a training with these overrides, as the launch makes it, with the smallest batch.

    Args:
        ranks: on this machine, instead of what the overrides ask for.
    """
    from lockstep.config.compose import chosen_options, compose, plain
    from lockstep.distributed.cluster import Cluster
    from lockstep.launch.plan import RunPlan, resolve_cluster
    from lockstep.runs.batch import Batch
    from lockstep.runs.config import read_only
    from lockstep.runs.folder import RunFolder

    cfg = compose("train", [*overrides, f"paths.data_dir={folder}/data", f"paths.log_dir={folder}/logs"])
    config, choices = read_only(plain(cfg)), chosen_options(cfg)
    cluster, accelerator = resolve_cluster(config, choices["trainer"], {})
    if ranks is not None:
        cluster = Cluster("none", 1, ranks, 0, None if ranks > 1 else 0, "127.0.0.1", None)
    batch = Batch.of_device(1, cluster.world_size, config["trainer"]["accumulate_grad_batches"])
    return RunPlan(config, choices, tuple(overrides), cluster, accelerator, RunFolder(folder), batch)


def changed(plan: "RunPlan", group: str, **options: Any) -> "RunPlan":
    """The plan with other options in a group of its config."""
    from lockstep.runs.config import read_only

    config = {**plan.config, group: {**plan.config[group], **options}}
    return replace(plan, config=read_only(config))


def _peaks(plan: "RunPlan", folder: str, batches: list[int]) -> list[dict[str, int]]:
    from lockstep.batch_size.probe import GIB, Prober
    from lockstep.batch_size.sessions import SessionFiles
    from lockstep.distributed.cluster import PLAN_FILE, Wanted, environment
    from lockstep.distributed.launchers import describe

    own = describe({**environment(), PLAN_FILE: "none"}, Wanted())
    plan = replace(changed(plan, "trainer", memory_limit_gib=AMPLE_GIB), cluster=own)
    prober = Prober(plan, SessionFiles(Path(folder)))
    prober.prepare()
    return [{phase: round(share * AMPLE_GIB * GIB) for phase, share in prober.train(b).items()} for b in batches]


def peaks(plan: "RunPlan", folder: Path, world_size: int, batches: list[int]) -> list[list[dict[str, int]]]:
    """For each rank and batch: the bytes at the peak of each phase of two real steps and a validation."""
    return run_ranks(
        _peaks, world_size, plan, str(folder), batches, distributed=False, timeout_s=120 + 60 * len(batches)
    )
