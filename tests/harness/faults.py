"""Faults that a test plants in a door's process, and so in the ranks forked from it: run_door(…, before=fault)."""

import os
import signal
from typing import Any


def _wrap(owner: Any, name: str, extra: Any) -> None:
    original = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        extra(self, *arguments)
        return original(self, *arguments, **options)

    setattr(owner, name, wrapped)


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def signal_at_step(step: int, number: int = signal.SIGTERM, rank: int = 0, hook: str = "on_train_batch_end") -> None:
    """This rank sends itself a signal when `step` optimizer steps are done, or at that call of another hook."""
    from lockstep.callbacks import interruption
    from lockstep.callbacks.interruption import Interruption

    seen = [0]
    interruption.VOTE_INTERVAL_S = 0.02  # an epoch of a test is over in less than a second

    def fault(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        seen[0] += 1
        at = trainer.global_step if hook == "on_train_batch_end" else seen[0]
        if _rank() == rank and at == step and trainer.state.fn != "validate":
            os.kill(os.getpid(), number)

    _wrap(Interruption, hook, fault)
