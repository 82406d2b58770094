"""Two hosts on this machine: network namespaces that one cable joins, each with its own copy of the
project in a folder that the other cannot see, and a real sshd. Needs root and Debian's iproute2 and
openssh-server.

    with two_hosts(tmp_path) as (one, two): one.start([...])
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "unshare", "nsenter", "mount", "ssh", "ssh-keygen")
SSHD, INTERFACE = "/usr/sbin/sshd", "eth0"


def missing() -> str | None:
    """Why this machine cannot play two hosts."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    tools = [tool for tool in TOOLS if shutil.which(tool) is None] + (
        [] if Path(SSHD).exists() else ["sshd"]
    )
    if tools:
        return f"{', '.join(tools)} not installed (apt-get install iproute2 openssh-server)"
    probe = subprocess.run(
        ["unshare", "-m", "-n", "--propagation", "private", "true"], capture_output=True, text=True
    )
    return None if probe.returncode == 0 else f"no namespaces here: {probe.stderr.strip()}"


needs_hosts = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class Host:
    """One host: a process that only holds its network and mount namespaces, and what is started
    inside.
    """

    def __init__(self, name: str, address: str, home: Path, hidden: Path) -> None:
        self.name, self.address, self.home, self.project = (
            name,
            address,
            home,
            home / f"project-{name}",
        )
        self.holder = subprocess.Popen(
            ["unshare", "-m", "-n", "-u", "--propagation", "private", "sh", "-c",
             f"hostname {name}; ip link set lo up; mount -t tmpfs none {hidden}; echo ready; exec sleep 100000"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.holder.stdout.readline().strip() == "ready"
        self.processes: list[subprocess.Popen] = []

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-m", "-n", "-u", "--", *command]

    def run(self, *command: str) -> str:
        return subprocess.run(
            self.inside(*command), check=True, capture_output=True, text=True
        ).stdout

    def copy_project(self) -> None:
        """As a clone would be: src, configs, requirements.txt.

        The virtual environment is shared.
        """
        for name in ("src", "configs"):
            shutil.copytree(
                REPOSITORY / name, self.project / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(REPOSITORY / "requirements.txt", self.project)
        (self.project / ".venv").symlink_to(Path(sys.prefix))

    def start(self, command: list[str], **environment: str) -> subprocess.Popen:
        """A command in the project's folder; its output goes to home/output.txt."""
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
        with (self.home / "output.txt").open("ab") as file:
            process = subprocess.Popen(
                self.inside("sh", "-c", 'cd "$0" && exec "$@"', str(self.project), *command),
                env={**kept, **environment}, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def output(self) -> str:
        path = self.home / "output.txt"
        return path.read_text() if path.exists() else ""

    def pids(self) -> list[int]:
        """Everything that lives on this host, except the holder and sshd."""
        found, own = [], os.readlink(f"/proc/{self.holder.pid}/ns/net")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.holder.pid:
                with contextlib.suppress(OSError):
                    here = (
                        os.readlink(entry / "ns/net") == own
                        and "sshd" not in (entry / "comm").read_text()
                    )
                    if here and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                        found.append(int(entry.name))
        return found

    def die(self) -> None:
        """kill -9 of everything on this host."""
        for _ in range(3):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(10)

    def is_empty_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.pids()

    def serve_ssh(self, keys: Path) -> None:
        config = self.home / "sshd_config"
        config.write_text(
            f"Port 2222\nListenAddress {self.address}\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/user.pub\n"
            f"PidFile {self.home}/sshd.pid\nStrictModes no\nPermitRootLogin yes\nUsePAM no\nPasswordAuthentication no\n"
        )
        self.run("mkdir", "-p", "/run/sshd")
        self.sshd = subprocess.Popen(
            self.inside(SSHD, "-D", "-e", "-f", str(config)), stderr=subprocess.DEVNULL
        )

    def end(self) -> None:
        self.die()
        if hasattr(self, "sshd"):
            self.sshd.terminate()
            self.sshd.wait(10)
        self.holder.kill()
        self.holder.wait()
        self.holder.stdout.close()


def make_keys(folder: Path) -> None:
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    homes = [folder / "host0-home", folder / "host1-home"]
    for home in homes:
        home.mkdir(parents=True)
    one, two = (Host(f"host{i}", f"10.77.0.{i + 1}", homes[i], hidden=homes[1 - i]) for i in (0, 1))
    try:
        subprocess.run(
            ["ip", "link", "add", "lsveth0", "type", "veth", "peer", "name", "lsveth1"], check=True
        )
        for host, end in ((one, "lsveth0"), (two, "lsveth1")):
            subprocess.run(
                ["ip", "link", "set", end, "netns", str(host.holder.pid), "name", INTERFACE],
                check=True,
            )
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "up")
            host.copy_project()
        yield one, two
    finally:
        for host in (one, two):
            host.end()


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
