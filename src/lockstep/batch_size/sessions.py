"""Runs the probes of a batch search in fresh child processes that end together; imports no torch.

A session is one child for each rank of this node; where torchrun or SLURM starts the ranks, each rank starts its own
child and keeps its own files. The children probe batch after batch until one of them runs out of memory; then all end,
and the next session goes on. Every node does the same by itself: what to probe follows from the probes so far.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.batch_size.search import MAX_OUT_OF_MEMORY, Found, Probe, found, next_batch
from lockstep.distributed.cluster import PLAN_FILE, SUPERVISOR_PID, Cluster
from lockstep.distributed.supervisor import free_port
from lockstep.launch.plan import RunPlan, write_plan
from lockstep.runs.config import Config
from lockstep.runs.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from lockstep.runs.files import write_atomically

log = logging.getLogger(__name__)

EXIT_OUT_OF_MEMORY = 77
EXIT_PEER_ENDED = 78  # another rank ran out, or is gone without a word, as one is that its kernel killed
EXIT_PEER_FAILED = 79  # another rank said that it failed, and not for memory
POLL_S = 0.02
CULPRIT_S = 5.0  # a rank that only noticed may end before the one that failed
State = dict[str, Any]  # of a search, as in SessionFiles.state
SRC = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SessionFiles:
    """What parent and children tell each other through."""

    folder: Path

    @property
    def plan(self) -> Path:
        return self.folder / "plan.yaml"

    @property
    def state(self) -> Path:
        """{probes, bound, least, limit_gib, attempt, known, writer}: written by the child of local rank `writer`."""
        return self.folder / "state.json"

    @property
    def error(self) -> Path:
        """The sentence of a UserError in a child."""
        return self.folder / "error.txt"

    @property
    def log(self) -> Path:
        return self.folder / "ranks.log"


@dataclass(frozen=True)
class Largest:
    """The result of a search, as it goes into a record.

    Args:
        known: the global batch that a run was started with, where one of its processes knew it: nothing was searched.
    """

    found: Found
    per_device: int
    global_batch_size: int
    seconds: float
    limit_gib: float
    known: int | None = None

    def record(self) -> dict[str, Any]:
        best = max((p.largest_share for p in self.found.probes if p.batch == self.per_device), default=0.0)
        error = self.found.prediction_error
        return {
            "per_device": self.per_device,
            "global": self.global_batch_size,
            "probes": len(self.found.probes),
            "out_of_memory": self.found.out_of_memory,
            "seconds": round(self.seconds, 2),
            "peak_memory_gib": round(best * self.limit_gib, 4),
            "limit_gib": round(self.limit_gib, 4),
            "prediction_error": None if error is None else round(error, 5),
            "bounded_by": "data set" if self.found.at_bound else "memory",
            "tried": [
                [probe.batch, round(probe.largest_share, 4) if probe.shares else None] for probe in self.found.probes
            ],
        }


def find_largest(
    plan: RunPlan,
    environment: Mapping[str, str],
    command: list[str] | None = None,
    known: int | None = None,
) -> Largest:
    """The largest batch that a training can take on its cluster.

    Args:
        plan: of that training; how large its batch is does not matter.
        command: what a child is started with.
        known: the global batch of a run that goes on, where this process knows it; the others then learn of it.
    Raises:
        UserError: not one image fits, or what the config asks for cannot be.
        SystemExit: a signal asked to stop; no child lives any more.
    """
    began = time.perf_counter()
    files = SessionFiles(Path(tempfile.mkdtemp(prefix="lockstep-batch-")))
    command = command or [sys.executable, "-m", "lockstep.batch_size.probe"]
    try:
        with stopped_by_signals():
            state = _search(plan, environment, command, files, known)
    finally:
        shutil.rmtree(files.folder, ignore_errors=True)
    if state["known"]:
        return Largest(Found(0, ()), 0, 0, time.perf_counter() - began, 0.0, state["known"])
    result = found([from_json(probe) for probe in state["probes"]], state["bound"])
    if result.batch == 0:
        raise UserError(_nothing_fits(state, plan))
    parts = plan.cluster.world_size * plan.batch.accumulate
    seconds = time.perf_counter() - began
    batch = result.batch - result.batch % 2 if mixes(plan.config) and result.batch > 1 else result.batch
    return Largest(result, batch, batch * parts, seconds, state["limit_gib"])


def _search(
    plan: RunPlan, environment: Mapping[str, str], command: list[str], files: SessionFiles, known: int | None
) -> State:
    cluster = plan.cluster
    write_plan(plan, files.plan)
    empty: State = {"probes": [], "bound": None, "least": 1, "limit_gib": None, "attempt": None}
    write_state(files, {**empty, "known": known, "writer": cluster.local_rank or 0})
    for session in range(MAX_OUT_OF_MEMORY + 1):
        codes = _run_session(cluster, environment, command, files, session)
        state = read_state(files)
        if all(code == EXIT_OK for code in codes):
            return state
        _check(codes, state, files, plan)
        state["probes"].append({"batch": state["attempt"], "shares": None})
        if cluster.is_rank_zero:
            log.info(line_of(from_json(state["probes"][-1]), state["limit_gib"]))
        state["attempt"] = None  # a later session may end before it tries anything
        write_state(files, state)
        probes = [from_json(probe) for probe in state["probes"]]
        if next_batch(probes, bound=state["bound"], least=state["least"]) is None:
            return state
    return state


def _run_session(
    cluster: Cluster, environment: Mapping[str, str], command: list[str], files: SessionFiles, session: int
) -> list[int]:
    """Start the children, end all as soon as one has failed; their exit codes, the one that tells most first."""
    port = free_port() if cluster.master_port is None else cluster.master_port + 1 + session
    inherited = {k: v for k, v in environment.items() if not k.startswith("TORCHELASTIC_")}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SRC), environment.get("PYTHONPATH")]))
    local_ranks = range(cluster.devices) if cluster.is_supervisor else [cluster.local_rank or 0]
    children: list[subprocess.Popen] = []
    said = len(read_state(files)["probes"])
    try:
        with files.log.open("ab") as ranks_log:
            for local_rank in local_ranks:
                own = cluster.rank_environment(local_rank, port) | {PLAN_FILE: str(files.plan)}
                own[SUPERVISOR_PID] = str(os.getpid())
                children.append(
                    subprocess.Popen(
                        command, env=inherited | own, stdin=subprocess.DEVNULL, stdout=ranks_log,
                        stderr=ranks_log, process_group=0,
                    )
                )  # fmt: skip
        codes: list[int] = []
        noticed_at: float | None = None
        while len(codes) < len(children) and all(
            code in (EXIT_OK, EXIT_PEER_ENDED, EXIT_PEER_FAILED) for code in codes
        ):
            if any(code != EXIT_OK for code in codes):
                noticed_at = noticed_at or time.monotonic()
                if time.monotonic() > noticed_at + CULPRIT_S:
                    break
            time.sleep(POLL_S)
            said = say_new(files, said) if cluster.is_rank_zero else said
            codes = [child.returncode for child in children if child.poll() is not None]
        return sorted(codes, key=tells_most)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
        for child in children:
            child.wait()


def say_new(files: SessionFiles, said: int) -> int:
    """A line for each probe after the first `said`; returns how many there are."""
    state = read_state(files)
    for probe in state["probes"][said:]:
        log.info(line_of(from_json(probe), state["limit_gib"]))
    return len(state["probes"])


def line_of(probe: Probe, limit_gib: float) -> str:
    images = f"{probe.batch} image{'s' * (probe.batch != 1)} per device"
    if probe.shares is None:
        return f"{images}: out of memory"
    return f"{images}: {probe.largest_share * limit_gib:.3g} of {limit_gib:.3g} GiB"


def tells_most(code: int) -> int:
    """Sorts exit codes: memory, then any other failure of a rank, then what ranks say that only noticed one."""
    if code in (EXIT_OUT_OF_MEMORY, -signal.SIGKILL):
        return 0
    return {EXIT_PEER_FAILED: 2, EXIT_PEER_ENDED: 3, EXIT_OK: 4}.get(code, 1)


def _check(codes: list[int], state: State, files: SessionFiles, plan: RunPlan) -> None:
    """Return where the session ended by a rank that ran out of memory; raise what ended it otherwise."""
    cluster = plan.cluster
    if codes[0] == -signal.SIGKILL and plan.accelerator == "gpu":  # its batch lies in the GPU's memory, not in this
        raise UserError(
            "A probe of the batch search was killed (SIGKILL), as a system does whose own memory, not that of its "
            "GPUs, has run out: end other work on this machine, or take fewer devices."
        )
    sees_all_ranks = cluster.num_nodes == 1 and cluster.is_supervisor
    ran_out = [EXIT_OUT_OF_MEMORY, -signal.SIGKILL, *([] if sees_all_ranks else [EXIT_PEER_ENDED])]
    if state["attempt"] is not None and codes[0] in ran_out:
        return
    if codes[0] == EXIT_USER_ERROR and files.error.exists():
        raise UserError(files.error.read_text())
    tail = "\n".join(files.log.read_text(errors="replace").splitlines()[-30:])
    raise RuntimeError(f"A probe of the batch search ended with exit code {codes[0]}:\n{tail}")


def mixes(config: Config) -> bool:
    """Whether images are mixed in pairs, so that each device takes an even number."""
    augmentation = config["augmentation"]
    return max(augmentation.get("mixup_alpha", 0), augmentation.get("cutmix_alpha", 0)) > 0


def _nothing_fits(state: State, plan: RunPlan) -> str:
    config = plan.config
    images = "one image" if state["least"] == 1 else f"{state['least']} images, the fewest that the net takes,"
    return (
        f"Not even {images} for each device fits into {state['limit_gib']:.3g} GiB with "
        f"model={plan.model_name} and data.eval_batch_size={config['data'].get('eval_batch_size')}: "
        "take a smaller model or eval batch, trainer=fsdp over more devices, or more memory."
    )


class stopped_by_signals:
    """A context in which signals that ask for an end raise SystemExit, so that what it holds is ended and removed."""

    def __enter__(self) -> None:
        def stop(number: int, _frame: Any) -> None:
            raise SystemExit(128 + number)

        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup means it
            numbers.append(signal.SIGHUP)
        self.previous: dict[int, Callable[..., Any] | int | None] = {n: signal.signal(n, stop) for n in numbers}

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def write_state(files: SessionFiles, state: State) -> None:
    write_atomically(files.state, lambda file: json.dump(state, file))


def read_state(files: SessionFiles) -> State:
    return json.loads(files.state.read_text())


def from_json(probe: Mapping[str, Any]) -> Probe:
    return Probe(probe["batch"], probe["shares"])
