"""trainer.record_hashes=true: what each optimizer step saw and left, as hashes in the run folder's hashes.bin.

    python src/logbook.py first_difference RUN RUN

The hashes are computed on the device and stay there until a log point, which brings them over with one collective.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.callbacks.resume_point import ends_step
from lockstep.callbacks.tensor_hashes import hash_of_each, hashes
from lockstep.runs.step_hashes import Head, add_rows, begin_hashes, joined

LABELS = 0x5DEECE66D  # odd: an image's hash and its label's count differently


class StepHashes(Callback):
    """Of images and labels as the net gets them, micro-batch losses, gradients before clipping, weights and buffers.

    Args:
        path: of hashes.bin.
        global_batch_size: images per optimizer step over all ranks.
        resume_step: rows after this step are of a past that no longer counts; None: a new run.
    """

    def __init__(self, path: Path, global_batch_size: int, resume_step: int | None = None) -> None:
        self.path, self.global_batch_size, self.resume_step = path, global_batch_size, resume_step
        self.images: list[Tensor] = []  # of this step's micro-batches
        self.losses: list[Tensor] = []
        self.gradients: Tensor | None = None
        self.steps: list[int] = []  # of `rows`, which no file holds yet
        self.rows: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.device = trainer.strategy.root_device
        named = list(pl_module.named_parameters())
        self.trained = [parameter for _, parameter in named if parameter.requires_grad]
        self.kept = [tensor for _, tensor in [*named, *pl_module.named_buffers()]]
        if trainer.is_global_zero:
            begin_hashes(self.path, self._head(named, pl_module), self.resume_step)
        if not self.resume_step:
            parts = self.global_batch_size // trainer.world_size + trainer.accumulate_grad_batches
            self._end_step(0, torch.zeros(parts + len(self.trained), dtype=torch.int64, device=self.device))
            self._write(trainer)

    def _head(self, named: list[tuple[str, nn.Parameter]], module: nn.Module) -> Head:
        trained = [name for name, parameter in named if parameter.requires_grad]
        kept = [name for name, _ in [*named, *module.named_buffers()]]
        trained, kept = ([name.removeprefix("net.") for name in names] for names in (trained, kept))
        sharded = any(isinstance(parameter, DTensor) for _, parameter in named)
        return Head(self.global_batch_size, tuple(trained), tuple(kept), sharded)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        images, targets = batch
        self.images.append(hash_of_each(images) + LABELS * hash_of_each(targets))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.gradients = self._of_all([parameter.grad for parameter in self.trained])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(hash_of_each(outputs["loss"].detach().view(1)))
        if not ends_step(trainer):
            return
        if self.gradients is not None:
            parts = [*self.images, *self.losses, self.gradients]
            self._end_step(trainer.global_step, torch.cat([part.to(self.device) for part in parts]))
        self.images, self.losses, self.gradients = [], [], None
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if trainer.global_step % trainer.log_every_n_steps == 0 or batches >= trainer.num_training_batches:
            self._write(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """All ranks: a run that goes on from here goes on in the file."""
        self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    def _end_step(self, step: int, seen: Tensor) -> None:
        """
        Args:
            seen: of images, losses and gradients.
        """
        self.steps.append(step)
        self.rows.append(torch.cat([seen, self._of_all(self.kept)]))

    def _of_all(self, tensors: list[Tensor | None]) -> Tensor:
        """(n,) on the root device, of tensors on any; a model-parallel net has several."""
        devices = dict.fromkeys(tensor.device for tensor in tensors if tensor is not None)
        found = torch.zeros(len(tensors), dtype=torch.int64, device=self.device)
        for device in devices:
            here = [tensor if tensor is not None and tensor.device == device else None for tensor in tensors]
            found += hashes(here).to(self.device, non_blocking=True)
        return found

    def _write(self, trainer: pl.Trainer) -> None:
        """A collective where there are several ranks, and the only wait for the device."""
        if not self.rows:
            return
        ranks = [torch.stack(self.rows)]
        if trainer.world_size > 1:
            ranks = [torch.empty_like(ranks[0]) for _ in range(trainer.world_size)]
            torch.distributed.all_gather(ranks, torch.stack(self.rows))
        if trainer.is_global_zero:
            images = self.global_batch_size // trainer.world_size
            rest = joined(torch.stack(ranks).cpu().numpy(), trainer.accumulate_grad_batches, images)
            add_rows(self.path, np.column_stack([self.steps, rest]))
        self.steps, self.rows = [], []
