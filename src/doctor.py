"""Check this machine, this cluster and this bucket: one sentence for each finding, with the command that mends it.

    MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=0 python src/doctor.py trainer=ddp trainer.num_nodes=2

On each node, with the variables and options of the run to come. --json prints a list for scripts. Exit code 1: there is
something to mend. Takes ten seconds at most, and waits for other nodes as long as the run would.
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
from lockstep.launch.launchers import INFINIBAND, Cluster, set_rank_environment
from lockstep.launch.plan import MOST_OF_TMPDIR, resolve_batch, resolve_cluster, resolved
from lockstep.runs import provenance
from lockstep.runs.config import Config
from lockstep.runs.environment import available_cores, environment, network_interface
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, UserError
from lockstep.runs.output import say

log = logging.getLogger(__name__)

Finding = tuple[bool, str]  # whether all is well, and one sentence with what to do
GIB = 2**30
DISK, SHARED, HANDLES = 5 * GIB, GIB // 4, 1024  # less is to be mended
BUCKET_WAIT_S, SKEW_S = 6.0, 60.0
FIRST_YEAR = 2026  # an earlier date is a clock that was never set


def found(fine: bool, said: str, mend: str) -> Finding:
    return fine, f"{said}." if fine else f"{said}: {mend}."


def examine(config: Config, trainer_name: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield (fine, sentence) for each check of this node, then of the network between the nodes."""
    yield from _machine(config)
    try:
        cluster, accelerator = resolve_cluster(config, trainer_name, environ)
        resolve_batch(config, cluster)
    except UserError as error:
        yield False, str(error)
        return
    where = f"{cluster.world_size} ranks on {cluster.num_nodes} nodes, this is node {cluster.node_rank}"
    yield True, f"settings: {where} ({cluster.launcher})."
    cores, ranks = available_cores(), cluster.devices
    yield found(
        cores >= ranks, f"{cores} cores for {ranks} ranks", f"#SBATCH --cpus-per-task, or docker --cpus={ranks}"
    )
    address = cluster.master_addr
    if cluster.num_nodes > 1 and not address.startswith(("127.", "localhost", "::1")):
        is_loopback = network_interface(address) == "lo"
        mend = "it is this host by its loopback interface; give the address of node 0, or correct /etc/hosts"
        yield found(not is_loopback, f"MASTER_ADDR={address}", mend)
    known = ", ".join(name for _, name in socket.if_nameindex())
    for name in filter(None, environ.get("NCCL_SOCKET_IFNAME", "").lstrip("=^").split(",")):
        yield found(name in known, f"NCCL_SOCKET_IFNAME={name}", f"there are {known}: unset NCCL_SOCKET_IFNAME")
    yield from _gpus() if accelerator == "gpu" else ()
    yield from _bucket(config.get("s3") or {})
    if cluster.launcher == "nodes" and cluster.num_nodes > 1:
        yield from _other_nodes(resolved(config, cluster, accelerator), cluster, accelerator)


def _machine(config: Config) -> Iterator[Finding]:
    folder, shm = Path(config["paths"]["log_dir"]).resolve(), Path("/dev/shm")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, may_write = shutil.disk_usage(there).free, there.is_dir() and os.access(there, os.W_OK)
    yield found(may_write, f"runs are written to {folder}", "it cannot be written, pass paths.log_dir=OTHER")
    yield found(free > DISK, f"{free / GIB:.0f} GiB free at {folder}", "make room, or pass paths.log_dir=OTHER")
    temporary = tempfile.gettempdir()
    yield found(len(temporary) <= MOST_OF_TMPDIR, f"temporary files in {temporary}", "too long, export TMPDIR=/tmp")
    shared = shutil.disk_usage(shm).free if shm.is_dir() else 0
    yield found(shared > SHARED, f"{shared / 2**20:.0f} MiB of shared memory", "docker run --shm-size=8g")
    handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield found(handles < 0 or handles >= HANDLES, f"{handles} file handles", "ulimit -n 65536")
    is_set = time.gmtime().tm_year >= FIRST_YEAR
    yield found(is_set, f"the clock says {time.strftime('%F %T %Z')}", "timedatectl set-ntp true")
    missing = ", ".join(name for name, version in provenance.versions().items() if version == "missing")
    yield found(not missing, missing and f"{missing} not installed" or "packages installed", "make install")
    root = str(config["data"].get("root") or config["paths"]["data_dir"])
    is_here = config["data"]["name"] in ("digits", "synthetic") or (Path(root).is_dir() and any(Path(root).iterdir()))
    place = "ready" if is_here else f"the first run fetches {root}, and needs a network for it"
    yield True, f"data={config['data']['name']}: {place}."


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        mend = f"apt-get install a driver for CUDA {torch.version.cuda}, or pip install a torch for the driver's CUDA"
        yield False, f"the driver shows GPUs, but torch {torch.__version__} cannot use them: {mend}."
        return
    if any(INFINIBAND.glob("efa*")):
        mend = "install aws-ofi-nccl, or NCCL goes by TCP at a tenth of the speed"
        yield found(find_library("nccl-net") is not None, "EFA with NCCL's plugin libnccl-net.so", mend)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        said = f"GPU {index} {torch.cuda.get_device_name(index)}: {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        yield found(free > 0.9 * total, said, "nvidia-smi names the process that uses it; end it")


def _bucket(s3: Mapping[str, Any]) -> Iterator[Finding]:
    if not s3.get("uri"):
        return
    from lockstep.storage.s3 import Bucket

    said = [(False, f"s3: no answer within {BUCKET_WAIT_S:.0f} s: correct s3.endpoint_url, AWS_REGION or the proxy.")]

    def write() -> None:
        try:
            is_conditional = Bucket.of(s3).check_writable()
            words = "" if is_conditional else ", by one process of a run at a time: it has no conditional writes"
            said.append((True, f"{s3['uri']} can be written{words}."))
        except UserError as error:
            said.append((False, f"s3: {error}."))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(BUCKET_WAIT_S)
    yield said[-1]


def _other_nodes(config: Config, cluster: Cluster, accelerator: str) -> Iterator[Finding]:
    """Let one process of each node meet the others, and measure their network by gloo, on GPUs by NCCL too."""
    one_each = replace(cluster, devices=1, local_rank=0)
    set_rank_environment(one_each)
    import torch
    import torch.distributed as dist

    from lockstep.launch.process_group import join, meet

    device = torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu")
    try:
        hosts = meet(one_each, config["trainer"]["timeout_s"], provenance.fingerprint(config))["hosts"]
        yield True, f"same code, options and packages on all nodes: {', '.join(hosts)}."
        join(one_each, device, min(60.0, config["trainer"]["timeout_s"]))
        clocks = torch.zeros(cluster.num_nodes, dtype=torch.float64)
        clocks[cluster.node_rank] = time.time()
        dist.all_reduce(clocks)
        skew = float(clocks.max() - clocks.min())
        yield found(skew < SKEW_S, f"clocks differ by {skew:.1f} s", "timedatectl set-ntp true")
        for place in dict.fromkeys((torch.device("cpu"), device)):
            large = torch.zeros(2**23, device=place)  # 32 MiB
            times = []
            for tensor in (large, large[:1], large):  # the first connects the ranks
                started = time.perf_counter()
                for _ in range(5):
                    dist.all_reduce(tensor)
                tensor[0].item()  # waits for the device
                times.append((time.perf_counter() - started) / 5)
            said = f"{times[1] * 1e3:.2f} ms latency, {32 / times[2]:.0f} MiB/s for 32 MiB"
            yield True, f"all-reduce by {'NCCL' if place.type == 'cuda' else 'gloo'}: {said}."
        dist.barrier()
        dist.destroy_process_group()
    except UserError as error:
        yield False, str(error)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        yield False, f"the ranks' own connections fail ({reason}): open all ports between the nodes to each other."


def main(argv: list[str]) -> int:
    as_json = "--json" in argv

    def diagnose(cfg: Any) -> int:
        lines = []
        for fine, sentence in examine(plain(cfg), chosen_options(cfg)["trainer"], environment()):
            lines.append({"ok": fine, "finding": sentence})
            if not as_json:
                log.info(f"{'ok  ' if fine else 'FIX '}  {sentence}")
        if as_json:
            say(json.dumps(lines, indent=1, ensure_ascii=False))
        return EXIT_OK if all(each["ok"] for each in lines) else EXIT_FAILED

    return run_script("train", [word for word in argv if word != "--json"], diagnose, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
