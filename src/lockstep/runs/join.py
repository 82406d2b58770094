"""Join the ranks of a run, watch for signals and failures, and leave together."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.seed import seed_everything

from lockstep.callbacks.hang_dump import HangDump
from lockstep.callbacks.interruption import Interruption
from lockstep.checkpoints.resume_point import ends_epoch
from lockstep.process import signals
from lockstep.process.environment import (
    AGENT,
    cores_of_rank,
    environment,
    keep_freed_memory,
)
from lockstep.process.errors import Interrupted, UserError
from lockstep.ranks import heartbeat
from lockstep.ranks.collectives import gather_objects
from lockstep.ranks.failures import explain_failure
from lockstep.ranks.find import Cluster
from lockstep.ranks.gpus import refuse_unusable_gpus
from lockstep.ranks.heartbeat import Heartbeat
from lockstep.ranks.meeting import get_last_meeting
from lockstep.ranks.placement import count_devices_per_rank
from lockstep.ranks.process_group import create_process_group
from lockstep.records import provenance
from lockstep.records.config import Config
from lockstep.runs.run import Run

log = logging.getLogger(__name__)

EXPECTED_WARNINGS = (
    # build.py logs what it means.
    ".*Using `DistributedSampler` with the dataloaders.*",
    # The last step of every epoch is logged, too.
    ".*smaller than the logging interval.*",
    # Lightning 2.6 calls what torch 2.14 has deprecated.
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*functional.all_gather is deprecated.*",
    # For weights of the shape (n, 1, h, w) both layouts mean the same.
    ".*Grad strides do not match bucket view strides.*",
    # With expandable segments torch asks every GPU for this, and only newer ones answer.
    ".*nvmlDeviceGetGpuFabricInfoV failed.*",
    # SimCLR has no validation, even if the data have validation images.
    ".*have no `validation_step`.*",
    # A profiler may see few steps only.
    ".*default schedule will be overridden.*",
    # trainer=cpu means to leave the GPU unused.
    ".*GPU available but not used.*",
    # A start without srun is intended.
    ".*`srun` command is available.*",
    # A test of averaged weights does not need the callback that averaged them.
    ".*callbacks used to create the checkpoint need to be provided.*",
    ".*Found .* module\\(s\\) in eval mode at the start of training.*",
)
# A rank runs its loop, a loader worker, and the threads of NCCL and of the statistics.
MIN_CORES = 3


class StartedRanks(LightningEnvironment):
    """Pass the ranks of the Cluster to Lightning, so that it neither starts nor detects any."""

    creates_processes_externally = True

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster

    def local_rank(self) -> int:
        return self.cluster.local_rank or 0

    def node_rank(self) -> int:
        return self.cluster.node_rank


class RankWatch(HangDump):
    """Write the stack of a rank that hangs, and tell the others how many batches it has had.

    Args:
        on_error: called early with an exception of this rank, because other ranks may wait for it.
        beats: send the number of batches to the other ranks.
    """

    def __init__(
        self,
        folder: Path,
        timeout_s: float,
        on_error: Callable[[BaseException], Any],
        beats: Heartbeat,
    ) -> None:
        super().__init__(folder, timeout_s, on_error)
        self.beats = beats

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._arm()
        self.beats.note_epoch(trainer.current_epoch, batch_idx + 1, is_over=False)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._arm()
        is_over = ends_epoch(trainer)
        # Lightning fetches a batch ahead, so that one more is certain here.
        batches = batch_idx + 1 if is_over else batch_idx + 2
        self.beats.note_epoch(trainer.current_epoch, batches, is_over=is_over)


@contextlib.contextmanager
def join_ranks(run: Run) -> Iterator[None]:
    """Meet the other ranks, watch over each other until the block ends, and leave together.

    An exception that leaves the block carries `culprit`: which rank failed first, on which host, in
    which phase.
    """
    # The imports of torch and Lightning are done.
    signals.raise_if_received()
    prepare_process(run)
    set_breakpoints(run.cluster)
    several = run.cluster.world_size > 1
    with _join_several(run) if several else _join_alone(run):
        yield


@contextlib.contextmanager
def _join_alone(run: Run) -> Iterator[None]:
    """Set up the only rank of a run, with a process group if its strategy needs one."""
    needs_group = (
        run.trainer_config["strategy"] and run.trainer_config["launch"] == "process_per_device"
    )
    if needs_group:
        _create_group(run)
    try:
        run.hosts = [provenance.describe_host(run.cluster.node_rank)]
        run.interruption = Interruption()
        yield
    finally:
        if needs_group:
            dist.destroy_process_group()


@contextlib.contextmanager
def _join_several(run: Run) -> Iterator[None]:
    """Create the process group and the heartbeat, and name the rank that fails first."""
    cluster = run.cluster
    timeout_s = run.trainer_config["timeout_s"]
    store = _create_group(run)
    errors = dist.PrefixStore("errors", store)
    beats = Heartbeat(
        dist.PrefixStore("beats", store.clone()),
        dist.PrefixStore("errors", store.clone()),
        cluster.rank,
        cluster.world_size,
        interval_s=heartbeat.INTERVAL_S,
        lost_after_s=heartbeat.LOST_AFTER_S,
    )
    # After these collectives every rank has constructed its heartbeat.
    hosts = gather_objects(provenance.describe_host(cluster.node_rank))
    pids = gather_objects(os.getpid())
    beats.start()

    host_names = [str(host["host"]) for host in hosts]

    def explain(error: BaseException) -> BaseException:
        return explain_failure(error, errors, cluster, host_names, beats.gather_epochs)

    run.hosts = hosts[:: cluster.ranks_per_node]
    run.interruption = Interruption(timeout_s)
    run.hang_dump = RankWatch(run.folder.path, timeout_s, explain, beats)
    run.heartbeat = beats
    meeting = get_last_meeting()
    if meeting is not None:
        meeting.heartbeat = beats
    try:
        yield
        dist.barrier()
    except BaseException as error:
        cause = error
        if isinstance(error, Interrupted) and error.is_agreed:
            failure = _wait_to_leave(beats)
            if failure is None:
                raise
            cause = failure
        reason: Any = explain(cause)
        reason.hung_pid = _find_hung_pid(reason, host_names, pids, cluster.rank)
        raise reason  # noqa: B904 it names its cause itself
    finally:
        beats.end()
    dist.destroy_process_group()


def _create_group(run: Run) -> dist.Store:
    """Create the process group of all ranks; return the store of this start."""
    timeout_s = run.trainer_config["timeout_s"]
    several_devices = count_devices_per_rank(run.trainer_config) > 1
    return create_process_group(
        run.cluster, device_of(run), timeout_s, several_devices=several_devices
    )


def _wait_to_leave(beats: Heartbeat) -> RuntimeError | None:
    """Wait for all ranks after a stop on which they agreed; return what failed meanwhile.

    torch's agent kills the others 30 s after the first rank has ended, which is too early for a
    large checkpoint.
    """
    try:
        beats.wait_for_all()
    except RuntimeError as error:
        return error
    return None


def _find_hung_pid(
    reason: BaseException, hosts: list[str], pids: list[int], rank: int
) -> int | None:
    """Return the process of the rank that hangs, if it is on the host of this rank."""
    culprit = getattr(reason, "culprit", None)
    if culprit is None or culprit["kind"] != "hangs":
        return None
    hung_rank = culprit["rank"]
    return pids[hung_rank] if hosts[hung_rank] == hosts[rank] else None


def device_of(run: Run) -> torch.device:
    """Return the device of this rank's data and of the first layers of its net."""
    process_devices = run.trainer_config.get("process_devices")
    if isinstance(process_devices, list):
        name = str(process_devices[0])
        return torch.device("cuda:0" if name == "cuda" else name)
    if run.cluster.accelerator == "gpu":
        first = (run.cluster.local_rank or 0) * count_devices_per_rank(run.trainer_config)
        return torch.device("cuda", first)
    return torch.device("cpu")


def set_breakpoints(cluster: Cluster) -> None:
    """Let breakpoint() open the debugger of rank 0 on a terminal.

    Other ranks wait for it in their next collective. Without a terminal, breakpoint() raises
    UserError on rank 0.
    """

    def refuse(*_: Any, **__: Any) -> None:
        if cluster.is_rank_zero:
            raise UserError(
                "breakpoint() of several ranks needs a terminal: debug with trainer=cpu, in one "
                "process."
            )

    has_debugger = cluster.is_rank_zero and sys.stdin.isatty()
    if cluster.world_size > 1 and not has_debugger:
        sys.breakpointhook = refuse


def count_threads(trainer: Config) -> int:
    """Return the CPU threads of this rank: trainer.num_threads, OMP_NUM_THREADS, or its cores."""
    if trainer["num_threads"] != "auto":
        return int(trainer["num_threads"])
    environ = environment()
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not threads.isdigit() or threads == "0":
        return cores_of_rank()
    # torchrun sets 1 for several ranks on a node where the user has set nothing.
    is_torchrun = "TORCHELASTIC_RUN_ID" in environ and AGENT not in environ
    if is_torchrun and threads == "1" and environ.get("LOCAL_WORLD_SIZE") != "1":
        return cores_of_rank()
    return int(threads)


def prepare_process(run: Run) -> None:
    """Set the threads, the seed and the precision of matrix products of this process.

    Raises:
        UserError: the driver shows GPUs that torch cannot use.
    """
    torch.set_num_threads(count_threads(run.trainer_config))
    # The order of Lightning's own samplers follows the seed too.
    seed_everything(run.config["seed"], verbose=False)
    if run.cluster.accelerator == "gpu":
        _prepare_gpu(run)
    else:
        keep_freed_memory()
    # While algorithms are deterministic, PyTorch fills new memory with NaN to reveal who reads it.
    # That slows every step on a CPU and changes no result: only an explicit `true` keeps it.
    is_strict = run.trainer_config["deterministic"] is True
    torch.utils.deterministic.fill_uninitialized_memory = is_strict  # type: ignore[attr-defined]

    # A user who adds the callback ModelSummary wants to see its table.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.callbacks.model_summary").setLevel(logging.INFO)
    ignore_expected_warnings()


def ignore_expected_warnings() -> None:
    """Silence warnings of libraries that ask the user for nothing."""
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)


def _prepare_gpu(run: Run) -> None:
    """Check that torch can use the GPU, and set the precision of its matrix products."""
    first = device_of(run).index or 0
    refuse_unusable_gpus(range(first, first + count_devices_per_rank(run.trainer_config)))
    cores = cores_of_rank()
    if cores < MIN_CORES and run.cluster.is_rank_zero:
        log.warning(
            f"Each rank has {cores} CPU core(s), too few for a GPU: give it 8 (--cpus-per-task=8)."
        )
    torch.backends.cudnn.benchmark = run.trainer_config["deterministic"] is not True
    torch.set_float32_matmul_precision(run.trainer_config.get("matmul_precision", "high"))
