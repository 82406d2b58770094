"""Is this machine, this cluster, this bucket ready? One sentence per finding, with the mend.

MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=0 python src/doctor.py trainer=ddp trainer.num_nodes=2

On each node, with the variables and options of the run to come.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config.command_line import run_script
from lockstep.config.compose import chosen_options, plain
from lockstep.distributed.cluster import Cluster, adopt, environment
from lockstep.distributed.preflight import Finding, free_disk, own_address, stale_ranks
from lockstep.runs import provenance
from lockstep.runs.config import Config, read_only
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, UserError

log = logging.getLogger(__name__)

NO_FILES = ("digits", "synthetic")  # come with a package, or from nothing


def examine(config: Config, trainer_name: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """(fine, sentence) for each check: of this node, then of the others where there are."""
    from lockstep.launch.plan import resolve_batch, resolve_cluster, resolved

    yield from stale_ranks(environ)
    try:
        cluster, accelerator = resolve_cluster(config, trainer_name, environ)
        resolve_batch(config, cluster)
        words = f"{cluster.world_size} ranks on {cluster.num_nodes} nodes, this is node {cluster.node_rank}"
        yield True, f"settings: {words} ({cluster.launcher})."
    except UserError as error:
        yield False, str(error)
        return
    yield own_address(cluster, environ)
    yield free_disk(Path(config["paths"]["log_dir"]))
    yield _packages()
    yield _data(config)
    yield from _gpus() if accelerator == "gpu" else ()
    yield from _bucket(config.get("s3") or {})
    if cluster.num_nodes > 1 and cluster.is_supervisor:
        yield from _other_nodes(resolved(config, cluster, accelerator), cluster)


def _packages() -> Finding:
    missing = [name for name, version in provenance.versions().items() if version == "missing"]
    if missing:
        return False, f"{', '.join(missing)} not installed: run make install."
    return True, "packages installed."


def _data(config: Config) -> Finding:
    """Whether the data lies here already; a node without a network cannot fetch it."""
    root = str(config["data"].get("root") or config["paths"]["data_dir"])
    name = config["data"].get("name", "")
    folder, words = Path(root), f"data={name}"
    if root.startswith("s3:"):
        return True, f"{words}: the first run copies {root} to this disk."
    if name in NO_FILES or (folder.is_dir() and any(folder.iterdir())):
        return True, f"{words}: ready."
    return True, f"{words}: {folder} is empty, so the first run fetches the data, and needs a network for it."


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        words = f"torch {torch.__version__} cannot use them: update the driver, or install a torch for its CUDA"
        yield False, f"the driver shows GPUs, but {words}."
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        fine = free > 0.9 * total
        words = "" if fine else ": another process is using it"
        yield fine, f"GPU {index} {name}: {free / 2**30:.0f} of {total / 2**30:.0f} GiB free{words}."


def _bucket(s3: Mapping[str, Any]) -> Iterator[Finding]:
    if not s3.get("uri"):
        return
    from lockstep.storage.s3 import Bucket

    try:
        is_conditional = Bucket.of(s3).check_writable()
        words = "" if is_conditional else ", by one process of a run at a time: the store has no conditional writes"
        yield True, f"{s3['uri']} can be written{words}."
    except UserError as error:
        yield False, f"s3: {error}."


def _other_nodes(config: Config, cluster: Cluster) -> Iterator[Finding]:
    from lockstep.distributed.rendezvous import agree

    try:
        mine, timeout_s = provenance.fingerprint(config), config["trainer"]["timeout_s"]
        answer = agree(cluster, mine, None, timeout_s)
    except UserError as error:
        yield False, str(error)
        return
    for node in answer.nodes:
        offset = abs(node.clock_offset_s)
        yield offset < 5, f"node {node.node_rank} is {node.host}, its clock within {max(offset, 0.1):.1f} s."
    yield True, "same code, options and packages on all nodes."
    yield from _all_reduce(config, cluster)


def _all_reduce(config: Config, cluster: Cluster) -> Iterator[Finding]:
    """Latency and bandwidth between the nodes, one process a node, over gloo."""
    one_each = replace(cluster, devices=1, local_rank=0)
    adopt(one_each)
    import torch
    import torch.distributed as dist

    from lockstep.distributed.process_group import join

    try:
        join(one_each, torch.device("cpu"), min(60.0, config["trainer"]["timeout_s"]))
        tensor = torch.zeros(8 * 2**20)
        small, large = (
            _seconds(lambda: dist.all_reduce(torch.zeros(1)), 20),
            _seconds(lambda: dist.all_reduce(tensor), 3),
        )
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, UserError) as error:
        reason = str(error).splitlines()[0]
        yield False, f"the ranks' own connections fail ({reason}): open all ports between the nodes to each other."
        return
    yield True, f"all-reduce: {small * 1e3:.2f} ms latency, {tensor.nbytes / large / 2**20:.0f} MiB/s for 32 MiB."


def _seconds(action: Callable[[], Any], times: int) -> float:
    action()
    started = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - started) / times


def diagnose(cfg: Any) -> int:
    bad = 0
    for fine, sentence in examine(read_only(plain(cfg)), chosen_options(cfg)["trainer"], environment()):
        log.info(f"{'ok  ' if fine else 'MEND'}  {sentence}")
        bad += not fine
    return EXIT_FAILED if bad else EXIT_OK


def main(argv: list[str]) -> int:
    return run_script("train", argv, diagnose, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
