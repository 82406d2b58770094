"""`python src/train.py`, telling what steps 55 to 95 read from tensors and sent to other ranks; syncs.py runs it.

    python benchmarks/sync_count.py model=small_cnn data=synthetic

Log points lie at steps 50 and 100, so none is among them.
"""

import json
import sys
from collections import Counter
from typing import Any

from measuring import REPOSITORY  # noqa: F401 puts src/ on the path

import train
from lockstep.distributed.cluster import plan_file

FIRST, LAST = 55, 95
SUPERVISES = "trainer=ddp_sim" in sys.argv and not plan_file()
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


def in_optimizer(event: Any) -> bool:
    """The fused kernel reads its step counters, which on a CPU lie in the host's memory and on a GPU are not read."""
    while event is not None:
        if event.name.startswith("Optimizer.step#"):
            return True
        event = event.cpu_parent
    return False


def count_between_log_points() -> None:
    """By torch's own means: a mode that sees every call on a tensor, and the profiler for what C++ calls."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.overrides import TorchFunctionMode

    class Reads(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: Counter[str] = Counter()

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(function, "__name__", "")
            if name in READS:
                self.found[name] += 1
            return function(*args, **(kwargs or {}))

    reads, steps = Reads(), Counter()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def after_step(*_: object) -> None:
        steps["done"] += 1
        if steps["done"] == FIRST:
            profiler.start()
            reads.__enter__()

    def before_step(*_: object) -> None:
        if steps["done"] == LAST:
            steps["done"] += 1  # once
            reads.__exit__(None, None, None)
            profiler.stop()
            calls = Counter(event.name for event in profiler.events())
            told = {
                "steps": LAST - FIRST,
                "reads": dict(reads.found),
                "local_scalar_dense": sum(
                    event.name == "aten::_local_scalar_dense" and not in_optimizer(event) for event in profiler.events()
                ),
                "collectives": {name: n for name, n in calls.items() if name.startswith("c10d::")},
                "optimizer_steps_seen": sum(n for name, n in calls.items() if name.startswith("Optimizer.step#")),
            }
            print(f"between_log_points {json.dumps(told)}", flush=True)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


if __name__ == "__main__":
    if not SUPERVISES:
        count_between_log_points()
    sys.exit(train.main(sys.argv[1:]))
