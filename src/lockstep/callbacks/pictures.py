"""Two pictures of a run: batch.png, the first training batch, and mistakes.png, of the test."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.data.pictures import (
    MAX_SHEET_IMAGES,
    images_of,
    is_mask,
    small_images,
    small_mask,
    write_batch,
    write_mistakes,
)

log = logging.getLogger(__name__)

BATCH = "batch.png"
MISTAKES = "mistakes.png"
NO_POSITION = -1


class Pictures(pl.Callback):
    """Write what the net sees, and where it is wrong. Rank 0 writes.

    batch.png is the first training batch of rank 0, before its step. mistakes.png are the test
    images of all ranks with the largest loss, if test_step returns {"losses": (B,),
    "predictions": (B, …)}, the predictions as predict_step returns them.

    It draws no random number, and until the end of a test it waits for no device and no other rank.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        # Losses, positions, images, targets and predictions of the worst images of this rank.
        self.worst: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        path = self.folder / BATCH
        is_first = trainer.global_step == 0 and batch_idx == 0
        if is_first and trainer.is_global_zero:
            data = getattr(trainer, "datamodule", None)
            _try(lambda: write_batch(path, batch, data), path)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.worst = []

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        parts = _tested(outputs, batch)
        # Of several loaders only the first one's images are drawn.
        if not parts or dataloader_idx:
            return
        losses = parts[0].detach().float()
        positions = torch.full_like(losses, NO_POSITION, dtype=torch.int64)
        if hasattr(trainer.test_dataloaders, "positions"):
            positions = trainer.test_dataloaders.positions(batch_idx).to(losses.device)
        worst = _largest([losses, positions, *(part.detach() for part in parts[1:])])
        worst[2] = small_images(worst[2])
        worst[3:] = [small_mask(part) if is_mask(part) else part for part in worst[3:]]
        if self.worst:
            worst = _largest([torch.cat(pair) for pair in zip(self.worst, worst, strict=True)])
        self.worst = worst

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        worst = of_all_ranks(trainer, self.worst)
        self.worst = []
        if worst and trainer.is_global_zero:
            path = self.folder / MISTAKES
            data = getattr(trainer, "datamodule", None)
            _try(lambda: write_mistakes(path, worst, data), path)


def _try(write: Callable[[], Any], path: Path) -> None:
    """Call a function that writes a picture, of which no error ends a run."""
    try:
        write()
    except Exception as error:
        log.warning(f"{path.name} was not written ({type(error).__name__}: {error}).")


def _tested(outputs: Any, batch: Any) -> list[Tensor]:
    """Return losses, images, targets and predictions of a batch; [] if test_step gives none."""
    images = images_of(batch)
    if not isinstance(outputs, dict) or images is None:
        return []
    parts = [outputs.get("losses"), images, batch[1], outputs.get("predictions")]
    tensors = [part for part in parts if isinstance(part, Tensor) and part.ndim]
    is_whole = len(tensors) == len(parts) and all(len(part) == len(images) for part in tensors)
    return tensors if is_whole and tensors[0].ndim == 1 else []


def _largest(parts: list[Tensor]) -> list[Tensor]:
    """Return the images with the largest losses, the largest first. A nan counts as the largest."""
    best = parts[0].topk(min(MAX_SHEET_IMAGES, len(parts[0]))).indices
    return [part[best] for part in parts]


def of_all_ranks(trainer: pl.Trainer, worst: list[Tensor]) -> list[Tensor]:
    """Return the images with the largest losses over all ranks. It is a collective.

    Each rank fills in its own images, and the sum over the ranks has all of them.
    """
    if trainer.world_size == 1:
        return worst
    reduce = trainer.strategy.reduce
    first = trainer.global_rank * MAX_SHEET_IMAGES
    # The last number counts the ranks that have tested an image of any kind.
    losses = torch.zeros(
        trainer.world_size * MAX_SHEET_IMAGES + 1, device=trainer.strategy.root_device
    )
    losses[first : first + MAX_SHEET_IMAGES] = -torch.inf
    if worst:
        losses[first : first + len(worst[0])] = worst[0].float()
        losses[-1] = 1
    losses = reduce(losses, reduce_op="sum")
    if losses[-1] < trainer.world_size:
        return []

    largest, places = losses[:-1].topk(MAX_SHEET_IMAGES)
    is_mine = places // MAX_SHEET_IMAGES == trainer.global_rank
    rows = places[is_mine] - first
    is_image = largest > -torch.inf
    shared = []
    for part in worst:
        whole = part.new_zeros(MAX_SHEET_IMAGES, *part.shape[1:])
        # A rank may have fewer images than places.
        is_filled = rows < len(part)
        whole[is_mine.nonzero().flatten()[is_filled]] = part[rows[is_filled]]
        shared.append(reduce(whole, reduce_op="sum")[is_image | largest.isnan()])
    return shared
