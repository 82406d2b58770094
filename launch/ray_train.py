"""Train on a Ray cluster: an actor on each node starts src/train.py there, again for as long as it ends with 75.

    uv pip install -r requirements-ray.txt          in the environment that runs Ray, on every node
    python launch/ray_train.py --nodes 2 --gpus 4 -- trainer=ddp data=cifar10 s3.uri=s3://bucket/runs

Every node needs the repository at the same path as here with `make install` done. RUN_ID=… in front goes on with a run.
A lost node is waited for: Ray grants the nodes anew once it has as many. SIGTERM and Ctrl-C save, and end with 75.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FINISHED, INTERRUPTED, LOST = 0, 75, -1


class Node:
    """One node of the run; `stop` is heard while `train` waits."""

    process: subprocess.Popen | None = None
    stopped = False

    def address(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    def train(self, words: list[str], settings: dict[str, str]) -> int:
        command = [".venv/bin/python", "src/train.py", *words]
        self.process = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **settings})
        if self.stopped:  # before it had begun
            self.stop()
        return self.process.wait()

    def stop(self) -> None:
        self.stopped = True
        if self.process:
            self.process.terminate()


def goes_on(codes: list[int]) -> bool:
    """Whether the run is started again: a node was lost, or all that did not finish were interrupted and saved."""
    return LOST in codes or (INTERRUPTED in codes and {*codes} <= {FINISHED, INTERRUPTED})


def exit_code(codes: list[int]) -> int:
    """The first failure's, else 75 where one was interrupted or lost."""
    failed = [code for code in codes if code not in (FINISHED, INTERRUPTED, LOST)]
    return next(iter(failed), FINISHED if {*codes} == {FINISHED} else INTERRUPTED)


def train_once(nodes: int, gpus: int, words: list[str], asked: list[int]) -> list[int]:
    """Exit codes of the nodes; LOST of one that went away with its actor."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1, "GPU": gpus}] * nodes, strategy="STRICT_SPREAD")
    try:
        ready = group.ready()
        while not ray.wait([ready], timeout=1)[0]:
            if asked:
                return [INTERRUPTED]
        places = [PlacementGroupSchedulingStrategy(group, number) for number in range(nodes)]
        make = ray.remote(max_concurrency=2, num_cpus=1, num_gpus=gpus)(Node)
        actors = [make.options(scheduling_strategy=place).remote() for place in places]
        settings = {
            "MASTER_PORT": "29500", "MASTER_ADDR": master_of(actors),
            **{name: os.environ[name] for name in ("MASTER_PORT", "RUN_ID") if name in os.environ},
        }  # fmt: skip
        runs = [actor.train.remote(words, {**settings, "NODE_RANK": str(rank)}) for rank, actor in enumerate(actors)]
        waiting = runs
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1)
            while asked:
                asked.pop()
                [actor.stop.remote() for actor in actors]
        return [code_of(run) for run in runs]
    except ray.exceptions.RayActorError:
        return [LOST]  # before it had begun
    finally:
        remove_placement_group(group)


def master_of(actors: list[Any]) -> str:
    import ray

    return ray.get(actors[0].address.remote())


def code_of(run: Any) -> int:
    import ray

    try:
        return ray.get(run)
    except ray.exceptions.RayActorError:
        return LOST


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=0, help="of each node, one rank on each")
    parser.add_argument("words", nargs="*", help="options of train.py, after --")
    given = parser.parse_args(argv)
    import ray

    ray.init(address="auto", log_to_driver=True)
    stopped: list[int] = []
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: (stopped.append(received), asked.append(received)))
    os.environ.setdefault("RUN_ID", time.strftime("ray-%Y-%m-%d_%H-%M-%S"))
    words = [f"trainer.num_nodes={given.nodes}", *[f"trainer.devices={given.gpus}"] * bool(given.gpus), "resume=auto"]
    while True:
        codes = train_once(given.nodes, given.gpus, [*words, *given.words], asked)
        print(f"{os.environ['RUN_ID']}: exit codes {codes}", flush=True)
        if stopped or not goes_on(codes):
            return exit_code(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
