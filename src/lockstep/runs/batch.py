"""How a global batch is cut into what one rank computes at a time."""

from dataclasses import dataclass

from lockstep.runs.errors import UserError


@dataclass(frozen=True)
class Batch:
    """global_size = per_device × ranks × accumulate.

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
        """
        Raises:
            UserError: a size below 1, or one that does not divide; names the nearest ones that do.
        """
        if not isinstance(global_size, int) or isinstance(global_size, bool) or global_size < 1:
            raise UserError(f"data.global_batch_size={global_size!r}: give a whole number from 1 on.")
        if accumulate < 1:
            raise UserError(f"trainer.accumulate_grad_batches={accumulate}: give a whole number from 1 on.")
        parts = world_size * accumulate
        if global_size % parts:
            below = global_size // parts * parts
            near = f"{below} and {below + parts}" if below else str(parts)
            raise UserError(
                f"data.global_batch_size={global_size} does not divide into {world_size} ranks × {accumulate} "
                f"accumulated batches: the nearest that do are {near}."
            )
        return cls(global_size, global_size // parts, accumulate)

    @classmethod
    def of_device(cls, per_device: int, world_size: int, accumulate: int) -> "Batch":
        """The batch that has so many images for each device."""
        return cls.cut(per_device * world_size * accumulate, world_size, accumulate)
