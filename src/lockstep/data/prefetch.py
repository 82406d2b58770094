"""Copy the next batch to a GPU while the step computes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection


def prefetched(batches: Iterator[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield each batch on a GPU; a thread makes its successor meanwhile and copies it on a stream of its own.

    Args:
        batches: dicts with tensors in CPU memory, pinned where they are large.
    """
    stream = torch.cuda.Stream(device)

    def copy_next() -> dict[str, Any] | None:
        with torch.cuda.stream(stream):  # and its device, which pinned memory belongs to
            batch = next(batches, None)
            return None if batch is None else move_data_to_device(batch, device)

    with ThreadPoolExecutor(1, "next batch") as thread:
        coming = thread.submit(copy_next)
        while (batch := coming.result()) is not None:
            computing = torch.cuda.current_stream(device)
            computing.wait_stream(stream)
            coming = thread.submit(copy_next)
            # Its memory is not given to a later copy before the step is done with it.
            apply_to_collection(batch, torch.Tensor, torch.Tensor.record_stream, computing)
            yield batch
