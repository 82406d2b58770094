"""Check this machine, this cluster and this bucket: one sentence for each finding, with what to do.

MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=0 python src/doctor.py trainer=ddp trainer.num_nodes=2

On each node, with the variables and options of the run to come.
"""

import logging
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.commands.command_line import run_script
from lockstep.config.compose import chosen_options, plain
from lockstep.launch.launchers import Cluster, faults, set_rank_environment
from lockstep.launch.plan import resolve_batch, resolve_cluster, resolved
from lockstep.runs import provenance
from lockstep.runs.config import Config
from lockstep.runs.environment import environment
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, UserError

log = logging.getLogger(__name__)

Finding = tuple[bool, str]  # whether all is well, and one sentence with what to do
FREE_DISK_GIB = 5.0


def examine(config: Config, trainer_name: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield (fine, sentence) for each check of this node, then of the network between the nodes."""
    try:
        cluster, accelerator = resolve_cluster(config, trainer_name, environ)
        resolve_batch(config, cluster)
    except UserError as error:
        yield False, str(error)
        return
    where = f"{cluster.world_size} ranks on {cluster.num_nodes} nodes, this is node {cluster.node_rank}"
    yield True, f"settings: {where} ({cluster.launcher})."
    yield from ((False, sentence) for sentence in faults(cluster, environ))
    folder = Path(config["paths"]["log_dir"]).resolve()
    free_gib = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / 2**30
    mend = "" if free_gib > FREE_DISK_GIB else ": make room, or set paths.log_dir to another disk"
    yield not mend, f"{free_gib:.0f} GiB free at {folder}{mend}."
    missing = [name for name, version in provenance.versions().items() if version == "missing"]
    yield not missing, f"{', '.join(missing)} not installed: run make install." if missing else "packages installed."
    yield True, _data(config)
    yield from _gpus() if accelerator == "gpu" else ()
    yield from _bucket(config.get("s3") or {})
    if cluster.launcher == "nodes" and cluster.num_nodes > 1:
        yield from _other_nodes(resolved(config, cluster, accelerator), cluster)


def _data(config: Config) -> str:
    """Say whether the data lie here already: a node without a network cannot fetch them."""
    root = str(config["data"].get("root") or config["paths"]["data_dir"])
    folder, name = Path(root), f"data={config['data']['name']}"
    if root.startswith("s3:"):
        return f"{name}: the first run copies {root} to this disk."
    if config["data"]["name"] in ("digits", "synthetic") or (folder.is_dir() and any(folder.iterdir())):
        return f"{name}: ready."
    return f"{name}: {folder} is empty, so the first run fetches the data, and needs a network for it."


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        reason = f"torch {torch.__version__} cannot use them: update the driver, or install a torch for its CUDA"
        yield False, f"the driver shows GPUs, but {reason}."
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        fine = free > 0.9 * total
        used = "" if fine else ": another process is using it"
        name = torch.cuda.get_device_name(index)
        yield fine, f"GPU {index} {name}: {free / 2**30:.0f} of {total / 2**30:.0f} GiB free{used}."


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
    """Let one process of each node meet the others, and measure their network by gloo."""
    one_each = replace(cluster, devices=1, local_rank=0)
    set_rank_environment(one_each)
    import torch
    import torch.distributed as dist

    from lockstep.launch.process_group import join, meet

    try:
        hosts = meet(one_each, config["trainer"]["timeout_s"], provenance.fingerprint(config))["hosts"]
        yield True, f"same code, options and packages on all nodes: {', '.join(hosts)}."
        join(one_each, torch.device("cpu"), min(60.0, config["trainer"]["timeout_s"]))
        times = []
        for tensor, repeats in ((torch.zeros(1), 20), (torch.zeros(8 * 2**20), 3)):
            dist.all_reduce(tensor)
            started = time.perf_counter()
            for _ in range(repeats):
                dist.all_reduce(tensor)
            times.append((time.perf_counter() - started) / repeats)
        dist.barrier()
        dist.destroy_process_group()
    except UserError as error:
        yield False, str(error)
        return
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        yield False, f"the ranks' own connections fail ({reason}): open all ports between the nodes to each other."
        return
    yield True, f"all-reduce: {times[0] * 1e3:.2f} ms latency, {32 / times[1]:.0f} MiB/s for 32 MiB."


def diagnose(cfg: Any) -> int:
    bad = 0
    for fine, sentence in examine(plain(cfg), chosen_options(cfg)["trainer"], environment()):
        log.info(f"{'ok  ' if fine else 'FIX '}  {sentence}")
        bad += not fine
    return EXIT_FAILED if bad else EXIT_OK


def main(argv: list[str]) -> int:
    return run_script("train", argv, diagnose, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
