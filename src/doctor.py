"""Check this machine, this cluster and this bucket: one sentence for each finding, with the command that fixes it.

    MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=0 python src/doctor.py trainer=ddp trainer.num_nodes=2

On each node, with the variables and options of the run to come. --json prints a list for scripts. Exit code 1: there is
something to fix. Takes ten seconds at most, and waits for other nodes as long as the run would.
"""

import json
import logging
import os
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.commands.command_line import run_script
from lockstep.config.compose import chosen_options, plain
from lockstep.config.keys import is_equal_on_all_ranks
from lockstep.launch.launchers import INFINIBAND, Cluster, set_rank_environment
from lockstep.launch.plan import MOST_OF_TMPDIR, resolve_batch, resolve_cluster, resolved
from lockstep.runs import provenance
from lockstep.runs.config import Config
from lockstep.runs.environment import available_cores, environment, network_interface
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, UserError
from lockstep.runs.output import say

log = logging.getLogger(__name__)

Finding = tuple[bool, str, str]  # whether all is well, what was found, and what mends it
GIB = 2**30
DISK, SHARED, HANDLES = 5 * GIB, GIB // 4, 1024  # less is to be mended
BUCKET_WAIT_S = 6.0
FIRST_YEAR = 2026  # an earlier date is a clock that was never set


def examine(config: Config, trainer_name: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check this node, then the network between the nodes."""
    yield from _machine(config)
    try:
        cluster, accelerator = resolve_cluster(config, trainer_name, environ)
        resolve_batch(config, cluster)
    except UserError as error:
        yield False, str(error), ""
        return
    ranks, cores, address = cluster.devices, available_cores(), cluster.master_addr
    where = f"{cluster.world_size} ranks on {cluster.num_nodes} nodes, this is node {cluster.node_rank}"
    yield True, f"settings: {where} ({cluster.launcher})", ""
    yield cores >= ranks, f"{cores} cores for {ranks} ranks", f"#SBATCH --cpus-per-task, or docker --cpus={ranks}"
    if cluster.num_nodes > 1 and not address.startswith(("127.", "localhost", "::1")):
        mend = "it is this host by its loopback interface; give the address of node 0, or correct /etc/hosts"
        yield network_interface(address) != "lo", f"MASTER_ADDR={address}", mend
    stated, known = environ.get("NCCL_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    matches = str.__eq__ if stated.startswith("=") else str.startswith  # as NCCL does; ^ names those it must not use
    for name in filter(None, [] if stated.startswith("^") else stated.removeprefix("=").split(",")):
        mend = f"there are {', '.join(known)}: unset NCCL_SOCKET_IFNAME"
        yield any(matches(each, name) for each in known), f"NCCL_SOCKET_IFNAME={name}", mend
    yield from _gpus() if accelerator == "gpu" else ()
    yield from _bucket(config["s3"]) if (config.get("s3") or {}).get("uri") else ()
    if cluster.launcher == "nodes" and cluster.num_nodes > 1:
        yield from _other_nodes(resolved(config, cluster, accelerator), cluster, accelerator)


def _machine(config: Config) -> Iterator[Finding]:
    folder, shm, temporary = Path(config["paths"]["log_dir"]).resolve(), Path("/dev/shm"), tempfile.gettempdir()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, may_write = shutil.disk_usage(there).free, there.is_dir() and os.access(there, os.W_OK)
    shared, handles = shutil.disk_usage(shm).free if shm.is_dir() else 0, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield may_write, f"runs are written to {folder}", "it cannot be written, pass paths.log_dir=OTHER"
    yield free > DISK, f"{free / GIB:.0f} GiB free at {folder}", "make room, or pass paths.log_dir=OTHER"
    yield len(temporary) <= MOST_OF_TMPDIR, f"temporary files in {temporary}", "too long, export TMPDIR=/tmp"
    yield shared > SHARED, f"{shared / 2**20:.0f} MiB of shared memory", "docker run --shm-size=8g"
    yield handles < 0 or handles >= HANDLES, f"{handles} file handles", "ulimit -n 65536"
    yield time.gmtime().tm_year >= FIRST_YEAR, f"the clock says {time.strftime('%F %T %Z')}", "timedatectl set-ntp true"


def _gpus() -> Iterator[Finding]:
    import torch

    is_fine, cuda = torch.cuda.is_available(), torch.version.cuda
    mend = f"apt-get install a driver for CUDA {cuda}, or pip install a torch for the driver's CUDA"
    yield is_fine, f"torch {torch.__version__} with CUDA {cuda} {'uses' if is_fine else 'cannot use'} the driver", mend
    if any(INFINIBAND.glob("efa*")):
        mend = "install aws-ofi-nccl, or NCCL uses TCP at a tenth of the speed"
        yield find_library("nccl-net") is not None, "EFA with NCCL's plugin libnccl-net.so", mend


def _bucket(s3: Mapping[str, Any]) -> Iterator[Finding]:
    from lockstep.storage.s3 import Bucket

    mend = "correct s3.endpoint_url, AWS_REGION or the proxy"
    answers: list[Finding] = [(False, f"s3: no answer within {BUCKET_WAIT_S:.0f} s", mend)]

    def write() -> None:
        try:
            Bucket.of(s3).check_writable()
            answers.append((True, f"{s3['uri']} can be written", ""))
        except UserError as error:
            answers.append((False, f"s3: {error}", ""))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(BUCKET_WAIT_S)
    yield answers[-1]


def _other_nodes(config: Config, cluster: Cluster, accelerator: str) -> Iterator[Finding]:
    """Let one process of each node meet the others, and measure their network by gloo, on GPUs by NCCL too."""
    one_each, timeout_s = replace(cluster, devices=1, local_rank=0), config["trainer"]["timeout_s"]
    set_rank_environment(one_each)
    import torch
    import torch.distributed as dist

    from lockstep.launch.process_group import join, meet

    device = torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu")
    try:
        fingerprint = provenance.fingerprint(config, is_equal_on_all_ranks)
        hosts = meet(one_each, timeout_s, fingerprint)["hosts"]
        yield True, f"same code, options and packages on all nodes: {', '.join(hosts)}", ""
        join(one_each, device, min(60.0, timeout_s))
        for place in dict.fromkeys((torch.device("cpu"), device)):
            tensor, name = torch.zeros(2**23, device=place), "NCCL" if place.type == "cuda" else "gloo"  # 32 MiB
            for count in (1, 5):  # the first connects the ranks
                started = time.perf_counter()
                for _ in range(count):
                    dist.all_reduce(tensor)
                tensor[0].item()  # waits for the device
            speed = 32 * count / (time.perf_counter() - started)
            yield True, f"all-reduce of 32 MiB by {name}: {speed:.0f} MiB/s", ""
        dist.barrier()
        dist.destroy_process_group()
    except UserError as error:
        yield False, str(error), ""
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        yield False, f"the ranks' own connections fail ({reason})", "open all ports between the nodes to each other"


def main(argv: list[str]) -> int:
    as_json = "--json" in argv

    def diagnose(cfg: Any) -> int:
        found = []
        for is_fine, said, mend in examine(plain(cfg), chosen_options(cfg)["trainer"], environment()):
            sentence = f"{said.rstrip('.')}{f': {mend}' if mend and not is_fine else ''}."
            found.append({"ok": is_fine, "finding": sentence})
            if not as_json:
                log.info(f"{'ok  ' if is_fine else 'FIX '}  {sentence}")
        if as_json:
            say(json.dumps(found, indent=1, ensure_ascii=False))
        return EXIT_OK if all(each["ok"] for each in found) else EXIT_FAILED

    return run_script("train", [word for word in argv if word != "--json"], diagnose, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
