"""Run what needs GPUs on null GPUs: torch's own CUDA code over a driver that computes on the CPU
(nullgpu/).

    environment = null_gpus(devices=2)                                   # for a subprocess of your
    own done = run_on_null_gpus("train", "trainer=ddp", logs=tmp_path, devices=2)         # as
    runs.run_script value = call_on_null_gpus(function, argument, devices=2)             # in a
    process of its own

The last two fork from a server with torch and Lightning imported, one for each process of the
tests.
"""

import atexit
import functools
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import local_ranks
import nullgpu
import ranks
import runs

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
TIMEOUT_S = 280.0

needs_null_gpus = pytest.mark.skipif(bool(nullgpu.missing()), reason=str(nullgpu.missing()))


def null_gpus(**options: Any) -> dict[str, str]:
    """Return the environment of a subprocess; `options` are those of nullgpu.environment."""
    own = nullgpu.environment(**options)
    code = (ranks.SRC, REPOSITORY / "tests/harness", HERE)
    return {**os.environ, **own, "PYTHONPATH": ":".join([own["PYTHONPATH"], *map(str, code)])}


def settings(**options: Any) -> dict[str, str]:
    """Return the variables that the driver reads when a process first asks for a device."""
    return {
        name: value
        for name, value in nullgpu.environment(**options).items()
        if name.startswith("NULLGPU_")
    }


def run_on_null_gpus(
    script: str,
    *argv: str,
    logs: Path,
    environment: dict[str, str] | None = None,
    before: Any = None,
    **options: Any,
) -> runs.FinishedScript:
    """A script as runs.run_script runs it; `options` are those of null_gpus."""
    return _server().call(
        runs.run_script,
        script,
        *argv,
        logs=logs,
        environment={**settings(**options), **(environment or {})},
        before=before,
    )


def nodes_on_null_gpus(
    *argv: str, logs: Path, num_nodes: int = 2, devices: int = 2
) -> list[runs.FinishedScript]:
    """train.py on several nodes that share this machine, each with its own GPUs and folder.

    The nodes in order.
    """
    return _server().call(_nodes, argv, logs, num_nodes, devices)


def _nodes(
    argv: tuple[str, ...], logs: Path, num_nodes: int, devices: int
) -> list[runs.FinishedScript]:
    port, started = ranks.free_port(), []
    for node in range(num_nodes):
        gpus = ",".join(str(node * devices + index) for index in range(devices))
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node)}
        environment = {**settings(devices=num_nodes * devices), **own, "CUDA_VISIBLE_DEVICES": gpus}
        options = (f"trainer.num_nodes={num_nodes}", f"trainer.devices={devices}")
        started.append(
            runs.start_script(
                "train", *argv, *options, logs=logs / f"node{node}", environment=environment
            )
        )
    return [one.done() for one in started]


def call_on_null_gpus(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`function(*arguments)` in a process of its own; both and the result can be pickled."""
    inner = functools.partial(_with_environment, settings(**options), function)
    return _server().call(local_ranks.run_ranks, inner, 1, *arguments)[0]


def ranks_on_null_gpus(
    function: Callable[..., Any], world_size: int, *arguments: Any, **options: Any
) -> list[Any]:
    """`function(*arguments)` in each of several ranks, each with its device, in an NCCL group.

    The results in order.
    """
    inner = functools.partial(_in_nccl_group, settings(devices=world_size, **options), function)
    return _server().call(local_ranks.run_ranks, inner, world_size, *arguments)


def _with_environment(
    environment: dict[str, str], function: Callable[..., Any], _: Any, *arguments: Any
) -> Any:
    os.environ.update(environment)
    return function(*arguments)


def _in_nccl_group(
    environment: dict[str, str], function: Callable[..., Any], _: Any, *arguments: Any
) -> Any:
    import torch

    os.environ.update(environment)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return function(*arguments)


class Server:
    """A process with null GPUs in which functions are called one after the other."""

    def __init__(self) -> None:
        self.connection, there = multiprocessing.Pipe()
        command = [sys.executable, __file__, str(there.fileno())]
        self.process = subprocess.Popen(command, env=null_gpus(), pass_fds=[there.fileno()])
        there.close()

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        timeout_s = named.get("timeout_s", TIMEOUT_S)
        self.connection.send((function, arguments, named))
        assert self.connection.poll(timeout_s), f"no answer within {timeout_s} s"
        succeeded, value = self.connection.recv()
        assert succeeded, value
        return value

    def end(self) -> None:
        self.connection.close()
        self.process.wait(10)


@functools.cache
def _server() -> Server:
    server = Server()
    atexit.register(server.end)
    return server


def serve(connection: Connection) -> None:
    """Answer calls until the other end is closed."""
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments, named = pickle.loads(message)
            answer = (True, function(*arguments, **named))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
