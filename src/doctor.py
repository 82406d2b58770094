"""Check this machine, this cluster and this bucket: one sentence for each finding, with its remedy.

    MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=0 \\
        python src/doctor.py trainer=ddp trainer.num_nodes=2

On each node, with the variables and options of the run to come. --json prints a list for scripts.
Exit code 1: there is something to fix. Takes ten seconds at most, and waits for other nodes as long
as the run would.
"""

import json
import logging
import os
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
from typing import Any, NamedTuple

from lockstep.commands.command_line import read_command, take_flag
from lockstep.config.keys import is_equal_on_all_ranks
from lockstep.process.environment import available_cores, environment, network_interface
from lockstep.process.errors import EXIT_FAILED, EXIT_OK, UserError
from lockstep.process.output import print_result
from lockstep.process.script import script
from lockstep.ranks.find import INFINIBAND, Cluster, find_ranks, set_rank_environment
from lockstep.ranks.placement import count_devices_per_rank
from lockstep.records import provenance
from lockstep.records.config import Config
from lockstep.runs.batch_size import resolve_batch
from lockstep.runs.checks import LONGEST_TMPDIR
from lockstep.runs.run import resolve_rank_options

log = logging.getLogger(__name__)

GIB = 2**30
MIB = 2**20
# Less than these is a fault of the machine.
MIN_DISK_BYTES = 5 * GIB
MIN_SHARED_BYTES = GIB // 4
MIN_FILE_HANDLES = 1024
BUCKET_WAIT_S = 6.0
# An earlier date is a clock that was never set.
FIRST_YEAR = 2026
# The message of the network test. The first count connects the ranks, the second one is measured.
TEST_FLOATS = 2**23
TEST_MIB = 4 * TEST_FLOATS // MIB
TEST_COUNTS = (1, 5)
LOOPBACKS = ("127.", "localhost", "::1")


class Finding(NamedTuple):
    """One check.

    Attributes:
        text: what was found.
        remedy: what mends it; empty if `text` tells it already.
    """

    is_fine: bool
    text: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        text = self.text.rstrip(".")
        if self.remedy and not self.is_fine:
            text += f": {self.remedy}"
        return f"{text}."


def examine(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check this node, then the network between the nodes."""
    yield from _check_machine(config)
    try:
        cluster = find_ranks(config, environ)
        resolve_batch(config, cluster)
    except UserError as error:
        yield Finding(False, str(error))
        return

    yield from _check_ranks(cluster)
    yield from _check_interfaces(environ.get("NCCL_SOCKET_IFNAME", ""))
    if cluster.accelerator == "gpu":
        yield from _check_gpus(cluster.ranks_per_node * count_devices_per_rank(config["trainer"]))
    s3 = config.get("s3") or {}
    if s3.get("uri"):
        yield from _check_bucket(s3)
    if cluster.launcher == "nodes" and cluster.num_nodes > 1:
        yield from _check_other_nodes(resolve_rank_options(config, cluster), cluster)


def _check_machine(config: Config) -> Iterator[Finding]:
    """Check the disk, the shared memory, the limits and the clock."""
    yield from _check_log_folder(Path(config["paths"]["log_dir"]).resolve())

    temporary = tempfile.gettempdir()
    yield Finding(
        len(temporary) <= LONGEST_TMPDIR,
        f"temporary files in {temporary}",
        "too long, export TMPDIR=/tmp",
    )
    memory = Path("/dev/shm")
    shared = shutil.disk_usage(memory).free if memory.is_dir() else 0
    yield Finding(
        shared > MIN_SHARED_BYTES,
        f"{shared / MIB:.0f} MiB of shared memory",
        "docker run --shm-size=8g",
    )
    # Windows has no such module, and is refused in a sentence.
    import resource

    # A negative limit means none.
    handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield Finding(
        handles < 0 or handles >= MIN_FILE_HANDLES, f"{handles} file handles", "ulimit -n 65536"
    )
    yield Finding(
        time.gmtime().tm_year >= FIRST_YEAR,
        f"the clock says {time.strftime('%F %T %Z')}",
        "timedatectl set-ntp true",
    )


def _check_log_folder(folder: Path) -> Iterator[Finding]:
    """Check that runs can be written into a folder, which need not exist."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    may_write = existing.is_dir() and os.access(existing, os.W_OK)
    yield Finding(
        may_write,
        f"runs are written to {folder}",
        "it cannot be written, pass paths.log_dir=OTHER",
    )
    free = shutil.disk_usage(existing).free
    yield Finding(
        free > MIN_DISK_BYTES,
        f"{free / GIB:.0f} GiB free at {folder}",
        "make room, or pass paths.log_dir=OTHER",
    )


def _check_ranks(cluster: Cluster) -> Iterator[Finding]:
    """Report the settings, and check the cores and the address of node 0."""
    yield Finding(
        True,
        f"settings: {cluster.world_size} ranks on {cluster.num_nodes} nodes, "
        f"this is node {cluster.node_rank} ({cluster.launcher})",
    )
    ranks = cluster.ranks_per_node
    cores = available_cores()
    yield Finding(
        cores >= ranks,
        f"{cores} cores for {ranks} ranks",
        f"#SBATCH --cpus-per-task, or docker --cpus={ranks}",
    )
    address = cluster.master_addr
    if cluster.num_nodes > 1 and not address.startswith(LOOPBACKS):
        yield Finding(
            network_interface(address) != "lo",
            f"MASTER_ADDR={address}",
            "it is this host by its loopback interface; "
            "give the address of node 0, or correct /etc/hosts",
        )


def _check_interfaces(socket_ifname: str) -> Iterator[Finding]:
    """Check the interfaces that NCCL_SOCKET_IFNAME names.

    As NCCL reads it, = is before whole names, and ^ before those that it must not use.
    """
    if socket_ifname.startswith("^"):
        return
    matches = str.__eq__ if socket_ifname.startswith("=") else str.startswith
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in socket_ifname.removeprefix("=").split(","):
        if name:
            yield Finding(
                any(matches(interface, name) for interface in interfaces),
                f"NCCL_SOCKET_IFNAME={name}",
                f"there are {', '.join(interfaces)}: unset NCCL_SOCKET_IFNAME",
            )


def _check_gpus(devices: int) -> Iterator[Finding]:
    """Check driver, kernels for the first GPUs, and NCCL's plugin where the network is EFA."""
    import torch

    from lockstep.ranks.gpus import refuse_unusable_gpus

    try:
        refuse_unusable_gpus(range(devices))
        build = f"torch {torch.__version__} with CUDA {torch.version.cuda}"
        yield Finding(True, f"{build} uses the driver and has kernels for the GPUs")
    except UserError as error:
        yield Finding(False, str(error))
    if any(INFINIBAND.glob("efa*")):
        yield Finding(
            find_library("nccl-net") is not None,
            "EFA with NCCL's plugin libnccl-net.so",
            "install aws-ofi-nccl, or NCCL uses TCP at a tenth of the speed",
        )


def _check_bucket(s3: Mapping[str, Any]) -> Iterator[Finding]:
    """Write into the bucket, and wait for its answer at most BUCKET_WAIT_S."""
    from lockstep.storage.s3 import Bucket

    answers = [
        Finding(
            False,
            f"s3: no answer within {BUCKET_WAIT_S:.0f} s",
            "correct s3.endpoint_url, AWS_REGION or the proxy",
        )
    ]

    def write() -> None:
        try:
            Bucket.from_config(s3).check_writable()
            answers.append(Finding(True, f"{s3['uri']} can be written"))
        except UserError as error:
            answers.append(Finding(False, f"s3: {error}"))
        except Exception as error:
            # Any other error is an answer too.
            answers.append(Finding(False, f"s3: {type(error).__name__}: {error}"))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(BUCKET_WAIT_S)
    yield answers[-1]


def _check_other_nodes(config: Config, cluster: Cluster) -> Iterator[Finding]:
    """Let one process of each node meet the others, and measure their network.

    It is measured by gloo, and on GPUs by NCCL too.
    """
    one_per_node = replace(cluster, ranks_per_node=1, local_rank=0)
    timeout_s = config["trainer"]["timeout_s"]
    # gloo and NCCL find their network interface by these variables.
    set_rank_environment(one_per_node)
    import torch
    import torch.distributed as dist

    from lockstep.ranks.meeting import meet
    from lockstep.ranks.process_group import create_process_group

    cpu = torch.device("cpu")
    device = torch.device("cuda", 0) if cluster.accelerator == "gpu" else cpu
    try:
        fingerprint = provenance.take_fingerprint(config, is_equal_on_all_ranks)
        hosts = meet(one_per_node, timeout_s, fingerprint).hosts
        yield Finding(True, f"same code, options and packages on all nodes: {', '.join(hosts)}")
        create_process_group(one_per_node, device, min(60.0, timeout_s))
        for measured in dict.fromkeys((cpu, device)):
            yield _measure_network(measured)
        dist.barrier()
        dist.destroy_process_group()
    except UserError as error:
        yield Finding(False, str(error))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        yield Finding(
            False,
            f"the ranks' own connections fail ({reason})",
            "open all ports between the nodes to each other",
        )


def _measure_network(device: Any) -> Finding:
    """Measure an all-reduce of tensors on a device."""
    import torch
    import torch.distributed as dist

    name = "NCCL" if device.type == "cuda" else "gloo"
    tensor = torch.zeros(TEST_FLOATS, device=device)
    seconds = 0.0
    for count in TEST_COUNTS:
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        # Reading a value waits for the device.
        tensor[0].item()
        seconds = time.perf_counter() - started
    speed = TEST_MIB * TEST_COUNTS[-1] / seconds
    return Finding(True, f"all-reduce of {TEST_MIB} MiB by {name}: {speed:.0f} MiB/s")


@script
def main(argv: list[str]) -> int:
    """Log what is fine on this node and what is to be mended; return the exit code."""
    arguments, as_json = take_flag(argv, "--json")
    config = read_command("train", arguments, __doc__ or "").compose()
    findings = []
    for finding in examine(config, environment()):
        findings.append(finding)
        if not as_json:
            mark = "ok  " if finding.is_fine else "FIX "
            log.info(f"{mark}  {finding.sentence}")
    if as_json:
        _print_json(findings)
    return EXIT_OK if all(finding.is_fine for finding in findings) else EXIT_FAILED


def _print_json(findings: list[Finding]) -> None:
    items = [{"ok": finding.is_fine, "finding": finding.sentence} for finding in findings]
    print_result(json.dumps(items, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
