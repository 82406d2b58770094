"""`python src/train.py` with the wall clock told after the first optimizer step; start.py runs it.

python benchmarks/first_step.py experiment=quickstart
"""

import os
import sys
import time

from measuring import REPOSITORY  # noqa: F401 puts src/ on the path

import train

SUPERVISES = "trainer=ddp_sim" in sys.argv and "LOCKSTEP_AGENT" not in os.environ


def tell_first_step() -> None:
    """torch's public hook that every optimizer calls after its step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def tell(*_: object) -> None:
        handle.remove()
        print(f"first_step_at {time.time()!r}", flush=True)

    handle = register_optimizer_step_post_hook(tell)


if __name__ == "__main__":
    if not SUPERVISES:  # a supervisor imports no torch, here as in the real door
        tell_first_step()
    sys.exit(train.main(sys.argv[1:]))
