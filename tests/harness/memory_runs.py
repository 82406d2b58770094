"""Peaks of tracked bytes of real ranks under any trainer, for tests and tables of the batch search."""

from pathlib import Path
from typing import Any

from ranks import run_ranks

AMPLE_GIB = 64.0


def composed(overrides: list[str], folder: Path) -> dict[str, Any]:
    """The plain config of these overrides, resolved for this machine as the launch does it."""
    from lockstep.config.compose import compose, plain
    from lockstep.launch.launcher import resolve_cluster

    paths = [f"paths.data_dir={folder}/data", f"paths.log_dir={folder}/logs"]
    cfg = compose("train", [*overrides, *paths])
    config = plain(cfg)
    config["choices"] = {key: value for key, value in cfg.hydra.runtime.choices.items() if not key.startswith("hydra")}
    resolve_cluster(config, {})
    return config


def _peaks(config: dict[str, Any], folder: str, batches: list[int]) -> list[dict[str, int]]:
    from lockstep.batch_size.probe import GIB, Prober
    from lockstep.batch_size.sessions import SessionFiles
    from lockstep.distributed import cluster as world

    environment = {**world.environment(), world.SUPERVISED_CONFIG: "none"}
    own = world.describe(environment, devices=None, num_nodes=None, several_processes=True, machine=1)
    config["trainer"]["memory_limit_gib"] = AMPLE_GIB
    prober = Prober(config, own, SessionFiles(Path(folder)))
    prober.prepare()
    return [{phase: round(share * AMPLE_GIB * GIB) for phase, share in prober.train(b).items()} for b in batches]


def peaks(config: dict[str, Any], folder: Path, world_size: int, batches: list[int]) -> list[list[dict[str, int]]]:
    """For each rank and batch: the bytes at the peak of each phase of two real steps and a validation."""
    return run_ranks(
        _peaks, world_size, config, str(folder), batches, distributed=False, timeout_s=120 + 60 * len(batches)
    )
