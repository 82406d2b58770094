"""The ranks of a run from the moment they meet until they part: hosts, heartbeats, signals."""

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment

from lockstep.callbacks.heartbeat import SILENT_AFTER_S, Watch
from lockstep.callbacks.interruption import Interruption
from lockstep.config.instantiate import check_targets
from lockstep.distributed.cluster import Cluster, environment, supervisor_port
from lockstep.distributed.failures import report_failure
from lockstep.distributed.process_group import check_all_equal, join, own_connection
from lockstep.runs import provenance
from lockstep.runs.folder import RunFolder
from lockstep.runs.provenance import available_cores
from lockstep.strategies.model_parallel import checked_devices
from lockstep.training.share_checkpoint import share_checkpoint

EXPECTED_WARNINGS = (
    ".*recommended to use `self.log.*sync_dist=True.*",  # the module reduces its counts before it logs them
    ".*smaller than the logging interval.*",  # every epoch's last step is a log point too
    ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning 2.6 on torch 2.14
    ".*`broadcast_buffers` is deprecated.*",  # Lightning 2.6 on torch 2.14
    ".*Grad strides do not match bucket view strides.*",  # (n, 1, h, w) weights: both layouts mean the same there
    ".*`srun` command is available.*",  # whoever starts without it means to
    ".*callbacks used to create the checkpoint need to be provided.*",  # the average of weights, at the test
    ".*Found .* module\\(s\\) in eval mode at the start of training.*",
)


@dataclass
class World:
    """What watches over a run from before its parts are built: hosts, signals, and with several ranks heartbeats."""

    hosts: list[dict[str, Any]]
    interruption: Interruption = field(default_factory=Interruption)
    watch: Watch | None = None


class StartedRanks(ClusterEnvironment):
    """Tells Lightning what the Cluster knows, so that it neither launches nor detects anything by itself."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.cluster.master_addr

    @property
    def main_port(self) -> int:
        return self.cluster.master_port or 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.cluster.world_size

    def set_world_size(self, size: int) -> None:
        assert size == self.cluster.world_size, (size, self.cluster)

    def global_rank(self) -> int:
        return self.cluster.rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.cluster.rank, (rank, self.cluster)

    def local_rank(self) -> int:
        return self.cluster.local_rank or 0

    def node_rank(self) -> int:
        return self.cluster.node_rank


@contextlib.contextmanager
def enter_world(config: dict[str, Any], cluster: Cluster, folder: RunFolder) -> Iterator[World]:
    """Meet the other ranks, watch over each other until the block ends, and leave together.

    An exception that leaves the block carries `culprit`: which rank failed first, on which host, in which phase.
    """
    check_targets(config)
    prepare_process(config, cluster)
    if cluster.world_size == 1:
        yield World([provenance.host(cluster.node_rank)])
        return
    timeout_s = config["trainer"]["timeout_s"]
    start = join(cluster, device_of(config, cluster), timeout_s)
    report = functools.partial(report_failure, folder=folder, cluster=cluster)
    world = World([], Interruption(timeout_s), Watch(folder.path, timeout_s, report, supervisor_port()))
    connection = own_connection(cluster, start, SILENT_AFTER_S)
    world.watch.begin(connection, cluster.rank, cluster.world_size, world.interruption)
    try:
        everyone = check_all_equal(config, cluster)
        world.hosts = [dict(list(host.items())[3:]) for host in everyone[:: cluster.devices]]
        share_checkpoint(config, cluster, folder)
        yield world
        torch.distributed.barrier()
    except BaseException as error:
        raise world.watch.explain(error)  # noqa: B904 it names its cause itself
    finally:
        world.watch.end()
    torch.distributed.destroy_process_group()


def device_of(config: dict[str, Any], cluster: Cluster) -> torch.device:
    """Where this rank's data lie and its net begins."""
    if config["trainer"]["accelerator"] != "gpu":
        return torch.device("cpu")
    if stages := config["trainer"].get("stage_devices"):
        return torch.device("cuda", checked_devices(stages)[0].index or 0)
    return torch.device("cuda", cluster.local_rank or 0)


def prepare_process(config: dict[str, Any], cluster: Cluster) -> None:
    threads = config["trainer"]["num_threads"]
    if threads == "auto":
        cores, own = available_cores(), int(environment().get("SLURM_CPUS_PER_TASK") or 0)
        bound = cluster.launcher == "slurm" and cores <= own  # to this task's cores already
        threads = cores if bound else max(1, cores // cluster.devices)
    torch.set_num_threads(threads)
    torch.manual_seed(config["seed"])
    if config["trainer"]["accelerator"] == "gpu":
        torch.set_float32_matmul_precision(config["trainer"].get("matmul_precision", "high"))
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
