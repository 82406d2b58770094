"""Cut a global batch into what one rank computes at a time."""

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.process.errors import UserError

ACCUMULATION = "trainer.accumulate_grad_batches"
DEFAULT_GLOBAL_BATCH_SIZE, DEFAULT_EVAL_BATCH_SIZE = 128, 512  # where a data config does not state them


def states_accumulation(words: Iterable[str]) -> bool:
    """Return whether a command line says how many micro-batches a step has: then nothing else decides it."""
    return any(word.lstrip("+").startswith(f"{ACCUMULATION}=") for word in words)


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
        """Return the batch with so many micro-batches; raise UserError with the nearest sizes if it does not divide."""
        size, parts = _checked(global_size), world_size * accumulate
        if accumulate < 1:
            raise UserError(f"{ACCUMULATION}={accumulate}: give a whole number from 1 on.")
        if size % parts:
            below = size // parts * parts
            near = f"{below} and {below + parts}" if below else str(parts)
            raise UserError(
                f"data.global_batch_size={size} does not divide into {world_size} ranks × {accumulate} "
                f"accumulated batches: the nearest that do are {near}."
            )
        return cls(size, size // parts, accumulate)

    @classmethod
    def within(cls, global_size: int | str | None, world_size: int, limit: float) -> "Batch":
        """Return the batch with the fewest micro-batches of at most `limit` images; raise UserError as `cut`."""
        size = _checked(global_size)
        share, rest = divmod(size, world_size)
        if rest or not share:
            whole = [ranks for ranks in range(1, size + 1) if size % ranks == 0]
            near = [r for r in whole if r < world_size][-1:] + [r for r in whole if r > world_size][:1]
            raise UserError(
                f"data.global_batch_size={size} does not divide over {world_size} ranks: the nearest numbers of "
                f"ranks over which it does are {' and '.join(map(str, near))}."
            )
        accumulate = next(k for k in range(1, share + 1) if share % k == 0 and share // k <= limit)
        return cls(size, share // accumulate, accumulate)


def _checked(global_size: int | str | None) -> int:
    if not isinstance(global_size, int) or isinstance(global_size, bool) or global_size < 1:
        raise UserError(f"data.global_batch_size={global_size!r}: give a whole number from 1 on.")
    return global_size
