"""Join the ranks of a run, watch for signals and failures, and leave together."""

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.seed import seed_everything

from lockstep.callbacks.hang_dump import HangDump
from lockstep.callbacks.interruption import Interruption
from lockstep.launch.failures import with_culprit
from lockstep.launch.launchers import Cluster
from lockstep.launch.plan import RunPlan
from lockstep.launch.process_group import join
from lockstep.ranks.collectives import gather_objects
from lockstep.runs import provenance, signals
from lockstep.runs.environment import cores_of_rank
from lockstep.runs.errors import UserError

log = logging.getLogger(__name__)

EXPECTED_WARNINGS = (
    ".*Using `DistributedSampler` with the dataloaders.*",  # build.py logs what it means
    ".*recommended to use `self.log.*sync_dist=True.*",  # the module reduces its counts before it logs them
    ".*smaller than the logging interval.*",  # every epoch's last step is a log point too
    ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning 2.6 on torch 2.14
    ".*`broadcast_buffers` is deprecated.*",  # Lightning 2.6 on torch 2.14
    ".*Grad strides do not match bucket view strides.*",  # (n, 1, h, w) weights: both layouts mean the same there
    ".*nvmlDeviceGetGpuFabricInfoV failed.*",  # torch asks it of every GPU where segments expand; only newer ones know
    ".*have no `validation_step`.*",  # SimCLR validates nothing, whatever the data hold
    ".*functional.all_gather is deprecated.*",  # Lightning 2.6 on torch 2.14
    ".*default schedule will be overridden.*",  # a profiler of few steps
    ".*GPU available but not used.*",  # trainer=cpu means it
    ".*`srun` command is available.*",  # a start without srun is intended
    ".*callbacks used to create the checkpoint need to be provided.*",  # the average of weights, at the test
    ".*Found .* module\\(s\\) in eval mode at the start of training.*",
)


@dataclass
class RankSession:
    """The objects that this rank shares with the others before its parts are built.

    Args:
        plan: the plan of rank 0, with its checkpoint.
        hosts: a description of each node.
        hang_dump: the callback that writes the stack of a rank that hangs; None for a single rank.
        patient_group: a process group of all ranks whose collectives may take a day.
    """

    plan: RunPlan
    hosts: list[dict[str, Any]]
    interruption: Interruption = field(default_factory=Interruption)
    hang_dump: HangDump | None = None
    patient_group: Any = None

    def wait_for_all(self) -> None:
        """Wait until every rank has come here, however long the slowest takes to download and decode its images."""
        if self.patient_group is not None:
            arrived = torch.distributed.barrier(self.patient_group, async_op=True)
            while not arrived.is_completed():  # a signal is handled between two looks
                time.sleep(0.02)
            arrived.wait()


class StartedRanks(LightningEnvironment):
    """Pass the ranks of the Cluster to Lightning, so that it neither starts nor detects any by itself."""

    creates_processes_externally = True

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster

    def local_rank(self) -> int:
        return self.cluster.local_rank or 0

    def node_rank(self) -> int:
        return self.cluster.node_rank


MIN_CORES = 3  # the loop, a loader worker, and the threads of NCCL and of the statistics


@contextlib.contextmanager
def joined_ranks(plan: RunPlan) -> Iterator[RankSession]:
    """Meet the other ranks, watch over each other until the block ends, and leave together.

    An exception that leaves the block carries `culprit`: which rank failed first, on which host, in which phase.
    """
    cluster, timeout_s = plan.cluster, plan.trainer["timeout_s"]
    signals.check()  # the imports of torch and Lightning are done
    prepare_process(plan)
    set_breakpoints(cluster)
    if cluster.world_size == 1:
        with contextlib.ExitStack() as alone:
            if plan.trainer["strategy"] and plan.trainer["launch"] == "process_per_device":
                join(cluster, device_of(plan), timeout_s)
                alone.callback(torch.distributed.destroy_process_group)
            yield RankSession(plan, [provenance.host(cluster.node_rank)])
        return
    store = join(cluster, device_of(plan), timeout_s)
    patient_group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))
    hosts = gather_objects(provenance.host(cluster.node_rank))
    pids = gather_objects(os.getpid())
    names = [str(host["host"]) for host in hosts]
    dump = HangDump(plan.folder.path, timeout_s, lambda error: with_culprit(error, store, cluster, names))
    try:
        yield RankSession(plan, hosts[:: cluster.devices], Interruption(timeout_s), dump, patient_group)
        torch.distributed.barrier()
    except BaseException as error:
        if getattr(error, "agreed", False):  # the first to end leaves the others 30 s, too few for a large checkpoint
            try:
                torch.distributed.barrier(patient_group)
                raise
            except RuntimeError as broken:  # another rank failed while it saved
                error = broken
        reason: Any = with_culprit(error, store, cluster, names)
        culprit = getattr(reason, "culprit", None)
        if culprit and culprit["kind"] == "hangs" and names[culprit["rank"]] == names[cluster.rank]:
            reason.hung_pid = pids[culprit["rank"]]
        raise reason  # noqa: B904 it names its cause itself
    torch.distributed.destroy_process_group()


def device_of(plan: RunPlan) -> torch.device:
    """Return the device of this rank's data and of the first layers of its net."""
    stages = plan.trainer.get("stage_devices")
    name = str(stages[0]) if stages else f"cuda:{plan.cluster.local_rank or 0}" if plan.accelerator == "gpu" else "cpu"
    return torch.device("cuda:0" if name == "cuda" else name)


def set_breakpoints(cluster: Cluster) -> None:
    """Let breakpoint() open the debugger of rank 0 on a terminal; other ranks wait for it in their next collective.

    Without a terminal, breakpoint() raises UserError on rank 0.
    """

    def refuse(*_: Any, **__: Any) -> None:
        if cluster.is_rank_zero:
            raise UserError("breakpoint() of several ranks needs a terminal: debug with trainer=cpu, in one process.")

    if cluster.world_size > 1 and not (cluster.is_rank_zero and sys.stdin.isatty()):
        sys.breakpointhook = refuse


def prepare_process(plan: RunPlan) -> None:
    """Set threads, seed and the precision of products of this process.

    Raises:
        UserError: the driver shows GPUs that torch cannot use.
    """
    own, own_cores = plan.trainer, cores_of_rank()
    torch.set_num_threads(own_cores if own["num_threads"] == "auto" else own["num_threads"])
    seed_everything(plan.config["seed"], verbose=False)  # the order of Lightning's own samplers too
    if plan.accelerator == "gpu":
        if not torch.cuda.is_available():
            raise UserError(
                f"The driver shows GPUs, but torch {torch.__version__} cannot use them: update the driver, or install "
                "a torch for its CUDA; trainer=cpu does without."
            )
        if own_cores < MIN_CORES and plan.cluster.is_rank_zero:
            log.warning(f"Each rank has {own_cores} CPU core(s), too few for a GPU: give it 8 (--cpus-per-task=8).")
        torch.backends.cudnn.benchmark = own["deterministic"] is not True
        torch.set_float32_matmul_precision(own.get("matmul_precision", "high"))
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.callbacks.model_summary").setLevel(logging.INFO)  # who adds it wants to see it
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
