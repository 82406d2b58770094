"""Write checkpoint files atomically, and read them once for all ranks."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from lockstep.checkpoints.load import Checkpoint, load_on_all_ranks
from lockstep.process.errors import UserError
from lockstep.process.files import write_atomically


class CheckpointFiles(CheckpointIO):
    """Write a checkpoint beside its target and rename it; load it on rank 0 and broadcast it.

    Attributes:
        write: called on rank 0 in place of writing a file; None to write the file.
    """

    write: Callable[[Checkpoint, Path], object] | None = None

    @contextmanager
    def redirect_writes(self, write: Callable[[Checkpoint, Path], object]) -> Iterator[None]:
        """Call `write` in place of writing a file until the block ends."""
        self.write = write
        try:
            yield
        finally:
            self.write = None

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: Any, storage_options: Any = None
    ) -> None:
        write = self.write or write_checkpoint
        write(checkpoint, Path(path))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> Checkpoint:
        return load_on_all_ranks(path, map_location or "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def check_loadable(checkpoint: Checkpoint) -> None:
    """Check before the first checkpoint is written that a resume can read what a module adds.

    Raises:
        UserError: the module's on_save_checkpoint adds an object that `weights_only=True` refuses.
    """
    file = io.BytesIO()
    without_tensors = apply_to_collection(checkpoint, torch.Tensor, lambda _: torch.empty(0))
    torch.save(without_tensors, file)
    file.seek(0)
    refused_types = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if refused_types:
        raise UserError(
            f"on_save_checkpoint adds {refused_types[0]}, which is not loaded from files (it could "
            "run code): store numbers, texts, tensors, lists and dicts."
        )


def write_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint into a file beside the path, sync it to the disk, and rename it."""
    write_atomically(path, lambda file: torch.save(checkpoint, file), binary=True)


def copy_to_host(checkpoint: Any, copy_cpu_tensors: bool = False) -> Any:
    """Return a checkpoint with all tensors in CPU memory.

    Copies from a GPU are queued and waited for once. Tied weights stay one tensor, so that a file
    holds them once.

    Args:
        copy_cpu_tensors: also copy tensors that are in CPU memory, because training goes on
            changing them.
    """
    copier = HostCopier(copy_cpu_tensors)
    content = copier.copy(checkpoint)
    copier.wait()
    return content


class HostCopier:
    """Copy nested values to host memory, each tensor once."""

    def __init__(self, copy_cpu_tensors: bool) -> None:
        self.copy_cpu_tensors = copy_cpu_tensors
        self.copies: dict[tuple[Any, ...], torch.Tensor] = {}
        # Pinned memory makes a copy from a GPU asynchronous, but torch keeps it for the next
        # checkpoint. A quarter of the free memory leaves room for the loader's workers.
        self.bytes_to_pin = 0
        if copy_cpu_tensors:
            self.bytes_to_pin = psutil.virtual_memory().available // 4

    def copy(self, value: Any) -> Any:
        """Return a value with its tensors on the host; containers are copied."""
        if isinstance(value, dict):
            # A copy keeps the class of the dict. Counter.update, as of MultiStepLR's milestones,
            # would add to its numbers.
            copied = copy.copy(value)
            for key, item in value.items():
                copied[key] = self.copy(item)
            return copied
        if type(value) in (list, tuple):
            return type(value)(map(self.copy, value))
        if isinstance(value, torch.Tensor) and (value.is_cuda or self.copy_cpu_tensors):
            return self.copy_tensor(value)
        return value

    def copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor, the same one for a tensor of the same memory."""
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self.copies:
            is_pinned = tensor.is_cuda and tensor.nbytes <= self.bytes_to_pin
            if is_pinned:
                self.bytes_to_pin -= tensor.nbytes
            host_tensor = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
            self.copies[key] = host_tensor.copy_(tensor.detach(), non_blocking=True)
        return self.copies[key]

    def wait(self) -> None:
        """Wait until the copies from all GPUs are complete."""
        for device in {key[0] for key in self.copies if key[0].type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
