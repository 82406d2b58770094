"""Cut a global batch into the batches that one rank computes at a time."""

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.process.errors import UserError

ACCUMULATION = "trainer.accumulate_grad_batches"
# The sizes if a data config has none.
DEFAULT_GLOBAL_BATCH_SIZE = 128
DEFAULT_EVAL_BATCH_SIZE = 512


def states_accumulation(overrides: Iterable[str]) -> bool:
    """Return whether the overrides fix the number of micro-batches."""
    return any(override.lstrip("+").startswith(f"{ACCUMULATION}=") for override in overrides)


@dataclass(frozen=True)
class Batch:
    """A global batch: global_size = per_device × ranks × accumulate.

    Args:
        global_size: images of one optimizer step, over all ranks.
        per_device: images of one micro-batch of one rank.
        accumulate: micro-batches of one optimizer step.
    """

    global_size: int
    per_device: int
    accumulate: int

    @classmethod
    def cut(cls, global_size: int | str | None, world_size: int, accumulate: int) -> "Batch":
        """Return the batch with `accumulate` micro-batches.

        >>> Batch.cut(128, world_size=4, accumulate=8)
        Batch(global_size=128, per_device=4, accumulate=8)

        Raises:
            UserError: it does not divide. The error names the nearest sizes that do.
        """
        size = _validate_size(global_size)
        if accumulate < 1:
            raise UserError(f"{ACCUMULATION}={accumulate}: give a whole number from 1 on.")
        parts = world_size * accumulate
        if size % parts:
            below = size // parts * parts
            near = f"{below} and {below + parts}" if below else str(parts)
            raise UserError(
                f"data.global_batch_size={size} does not divide into {world_size} ranks × "
                f"{accumulate} accumulated batches: the nearest that do are {near}."
            )
        return cls(size, size // parts, accumulate)

    @classmethod
    def cut_to_limit(cls, global_size: int | str | None, world_size: int, limit: float) -> "Batch":
        """Return the batch with the fewest micro-batches of at most `limit` images.

        >>> Batch.cut_to_limit(128, world_size=4, limit=10)
        Batch(global_size=128, per_device=8, accumulate=4)

        Raises:
            UserError: it does not divide. The error names the nearest numbers of ranks.
        """
        size = _validate_size(global_size)
        share, rest = divmod(size, world_size)
        if rest:
            divisors = [ranks for ranks in range(1, size + 1) if size % ranks == 0]
            fewer = [ranks for ranks in divisors if ranks < world_size]
            more = [ranks for ranks in divisors if ranks > world_size]
            near = " and ".join(map(str, [*fewer[-1:], *more[:1]]))
            raise UserError(
                f"data.global_batch_size={size} does not divide over {world_size} ranks: the "
                f"nearest numbers of ranks over which it does are {near}."
            )
        accumulate = _fewest_micro_batches(share, limit)
        return cls(size, share // accumulate, accumulate)


def _fewest_micro_batches(share: int, limit: float) -> int:
    """Return 4 for a rank's share of 32 images and a limit of 10: four times 8 are 32."""
    for number in range(1, share):
        if share % number == 0 and share // number <= limit:
            return number
    return share


def _validate_size(global_size: int | str | None) -> int:
    if isinstance(global_size, bool) or not isinstance(global_size, int) or global_size < 1:
        raise UserError(f"data.global_batch_size={global_size!r}: give a whole number from 1 on.")
    return global_size
