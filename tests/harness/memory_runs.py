"""Peaks of tracked bytes of real ranks under any trainer, for tests and tables of the batch search."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranks import run_ranks

if TYPE_CHECKING:
    from lockstep.launch.plan import RunPlan

AMPLE_GIB = 64.0
ANSWER_S = 1800.0


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


def _allocator_peaks(cases: list[tuple["RunPlan", int]], folder: str, environment_of: dict[str, str]) -> list[Any]:
    import os

    os.environ.update(environment_of)
    import torch

    # Gradients have no values here, and a scaler that finds no numbers among them would leave its steps out
    step = "_maybe_opt_step"
    assert hasattr(torch.amp.GradScaler, step)
    setattr(torch.amp.GradScaler, step, lambda scaler, optimizer, state, *args, **named: optimizer.step(*args, **named))
    from lockstep.batch_size.probe import Prober
    from lockstep.batch_size.sessions import SessionFiles
    from lockstep.distributed.cluster import PLAN_FILE, Wanted, adopt, environment
    from lockstep.distributed.launchers import describe

    own = describe({**environment(), PLAN_FILE: "none"}, Wanted())
    adopt(own, os.environ)
    prober = Prober(replace(cases[0][0], cluster=own), SessionFiles(Path(folder)))
    prober.prepare()
    return [_allocator_peak(prober, replace(plan, cluster=own), batch) for plan, batch in cases]


def _allocator_peak(prober: Any, plan: "RunPlan", batch: int) -> tuple[int, int] | str:
    """Bytes, allocated and reserved, at the peak of two steps and a validation; or why this case is refused."""
    import torch

    from lockstep.runs.errors import UserError

    prober.plan = plan
    peak = Peak(prober.meter)
    prober.meter.reset = peak.reset
    try:
        prober.train(batch)
    except UserError as error:
        return str(error)
    peak.reset()
    torch.cuda.empty_cache()
    return peak.allocated, peak.reserved


class Peak:
    """The largest of what the allocator says before each reset."""

    def __init__(self, meter: Any) -> None:
        self.meter, self.allocated, self.reserved = meter, 0, 0

    def reset(self) -> None:
        import torch

        self.allocated = max(self.allocated, *self.meter.peaks().values())
        self.reserved = max(self.reserved, *self.meter.reserved().values())
        torch.cuda.reset_peak_memory_stats()


def allocator_peaks(cases: list[tuple["RunPlan", int]], folder: Path, world_size: int) -> list[Any]:
    """Of rank 0 on null GPUs, for each plan and batch: bytes allocated and reserved at the peak, or a refusal."""
    import null_gpus

    environment_of = null_gpus.settings(world_size, memory_gib=AMPLE_GIB, compute=False, forgets=True)
    arguments = (run_ranks, _allocator_peaks, world_size, cases, str(folder), environment_of)
    return null_gpus.server_call(ANSWER_S, *arguments, distributed=False)[0]
