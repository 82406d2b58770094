"""A real SLURM of two nodes on this machine: controller, two slurmd, munge.

Needs root and Debian's packages.

with cluster(tmp_path) as slurm: job = slurm.sbatch(...); slurm.wait(job, "COMPLETED")
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lockstep.process.environment import die_with_parent
from ranks import free_port

TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
PLUGINS = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/slurm-wlm")
CONF = """ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket
CryptoType=crypto/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=20
MinJobAge=600
SlurmdParameters=config_overrides
PluginDir={plugins}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why this machine cannot run a SLURM of its own."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a SLURM of the test's own needs root on Linux"
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    return (
        f"{', '.join(tools)} not installed (apt-get install slurmctld slurmd slurm-client munge)"
        if tools
        else None
    )


needs_slurm = pytest.mark.skipif(missing() is not None, reason=str(missing()))
REPOSITORY = Path(__file__).resolve().parents[2]


class Slurm:
    """Commands against this cluster."""

    def __init__(self, folder: Path, master_port: int) -> None:
        self.folder, self.submit_from = folder, folder / "project"
        # Both nodes share one address, and the host's name may resolve to nothing.
        self.environment = {
            **{k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")},
            "SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_PORT": str(master_port),
        }  # fmt: skip

    def install_project(self) -> None:
        """A copy of src, configs and launch to submit from, with this interpreter's packages."""
        for name in ("src", "configs", "launch"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, self.submit_from / name, ignore=ignored)
        shutil.copy(REPOSITORY / "requirements.txt", self.submit_from)
        (self.submit_from / "logs").mkdir()
        (self.submit_from / ".venv").symlink_to(Path(sys.prefix))

    def call(self, *command: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.submit_from,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def run(self, *command: str, check: bool = True) -> str:
        done = self.call(*command)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sbatch(self, *arguments: str) -> str:
        return self.run("sbatch", "--parsable", "--cpus-per-task=1", *arguments).strip()

    def facts(self, job: str) -> dict[str, str]:
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        return self.facts(job)["JobState"]

    def wait(self, job: str, *states: str, seconds: float = 120) -> str:
        pending_since = time.monotonic()
        deadline = pending_since + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"{state} instead of {states}:\n{self.output(job)}"
            # A requeued job waits two minutes by itself. A node refuses one that it ended within
            # the same second.
            pending_since = pending_since if state == "PENDING" else time.monotonic()
            if time.monotonic() > pending_since + 2 and not self.pids(job):
                self.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
            time.sleep(0.2)
        return state

    def wait_until(self, condition, job: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{self.state(job)}:\n{self.output(job)}"
            time.sleep(0.1)

    def output(self, job: str) -> str:
        path = self.submit_from / f"logs/slurm-{job}.out"
        return path.read_text() if path.exists() else "(no output)"

    def pids(self, job: str) -> list[int]:
        """Every process that still carries this job's environment."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (
                    (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
                )
                if f"SLURM_JOB_ID={job}".encode() in words and str(
                    self.folder
                ).encode() in b" ".join(words):
                    found.append(int(entry.name))
        return found


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    for name in ("state", "spool-n1", "spool-n2", "log", "run", "munge"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o755)
    key = folder / "munge/munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    port, port1, port2, master_port = (free_port() for _ in range(4))
    host = socket.gethostname().split(".")[0]
    text = CONF.format(
        folder=folder, port=port, port1=port1, port2=port2, host=host, plugins=PLUGINS
    )
    (folder / "slurm.conf").write_text(text)
    slurm = Slurm(folder, master_port)
    slurm.submit_from.mkdir()
    munge = folder / "munge"
    commands = [
        ["munged", "-F", f"--key-file={key}", f"--socket={munge}/munge.socket", f"--pid-file={munge}/munged.pid",
         f"--log-file={munge}/munged.log", f"--seed-file={munge}/munged.seed", "--force"],
        ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"],
    ]  # fmt: skip
    daemons: list[subprocess.Popen] = []
    try:
        for command in commands:
            with (folder / "log/daemons.txt").open("a") as log:
                daemons.append(subprocess.Popen(
                    command, env=slurm.environment, stdout=log, stderr=log, start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),  # a killed pytest leaves none behind
                ))  # fmt: skip
            time.sleep(0.3)
        deadline = time.monotonic() + 30
        while slurm.run("sinfo", "-h", "-N", "-o", "%T", check=False).split() != ["idle", "idle"]:
            assert time.monotonic() < deadline, (folder / "log/daemons.txt").read_text()
            time.sleep(0.2)
        yield slurm
    finally:
        slurm.run("scancel", "--signal=KILL", "--full", "-u", "root", check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
