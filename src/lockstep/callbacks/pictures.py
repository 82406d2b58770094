"""Draw two pictures of a run: batch.png of the first training batch, and mistakes.png of a test."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lockstep.data.pictures import (
    MAX_SHEET_IMAGES,
    NO_POSITION,
    TestedImages,
    find_images,
    is_mask,
    shrink_images,
    shrink_mask,
    write_batch,
    write_mistakes,
)

log = logging.getLogger(__name__)

BATCH = "batch.png"
MISTAKES = "mistakes.png"


class Pictures(pl.Callback):
    """Write pictures of what the net sees, and of its mistakes. Rank 0 writes them.

    batch.png shows the first training batch of rank 0 before its step. mistakes.png shows the test
    images of all ranks with the largest loss. It needs a test_step that returns {"losses": (B,),
    "predictions": (B, …)}, with predictions as predict_step returns them.

    The callback draws no random number. Until the end of a test it waits neither for the device nor
    for other ranks.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.worst_images: TestedImages | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        path = self.folder / BATCH
        is_first = trainer.global_step == 0 and batch_idx == 0
        if is_first and trainer.is_global_zero:
            data = getattr(trainer, "datamodule", None)
            _write_or_warn(lambda: write_batch(path, batch, data), path)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.worst_images = None

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        tested = _collect_tested_images(outputs, batch)
        # If there are several loaders, only images of the first one are drawn.
        if tested is None or dataloader_idx:
            return
        if hasattr(trainer.test_dataloaders, "positions"):
            positions = trainer.test_dataloaders.positions(batch_idx)
            positions = positions.to(tested.losses.device)
            tested = TestedImages(tested.losses, positions, *tested[2:])
        worst_images = _shrink_pictures(_keep_largest_losses(tested))
        if self.worst_images:
            pairs = zip(self.worst_images, worst_images, strict=True)
            worst_images = _keep_largest_losses(TestedImages(*map(torch.cat, pairs)))
        self.worst_images = worst_images

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        worst_images = gather_largest_losses(trainer, self.worst_images or ())
        self.worst_images = None
        if worst_images and trainer.is_global_zero:
            path = self.folder / MISTAKES
            data = getattr(trainer, "datamodule", None)
            _write_or_warn(lambda: write_mistakes(path, TestedImages(*worst_images), data), path)


def _write_or_warn(write: Callable[[], Any], path: Path) -> None:
    """Call a function that writes a picture. Its errors are logged and do not end the run."""
    try:
        write()
    except Exception as error:
        log.warning(f"{path.name} was not written ({type(error).__name__}: {error}).")


def _collect_tested_images(outputs: Any, batch: Any) -> TestedImages | None:
    """Return the images of a batch with the losses and predictions of test_step; None without."""
    images = find_images(batch)
    if not isinstance(outputs, dict) or images is None:
        return None
    parts = [outputs.get("losses"), images, batch[1], outputs.get("predictions")]
    tensors = [part.detach() for part in parts if isinstance(part, Tensor) and part.ndim]
    is_whole = len(tensors) == len(parts) and all(len(part) == len(images) for part in tensors)
    if not is_whole or tensors[0].ndim != 1:
        return None
    losses = tensors[0].float()
    positions = torch.full_like(losses, NO_POSITION, dtype=torch.int64)
    return TestedImages(losses, positions, *tensors[1:])


def _keep_largest_losses(tested: TestedImages) -> TestedImages:
    """Return the images with the largest losses, the largest first. A nan is the largest loss."""
    largest = tested.losses.topk(min(MAX_SHEET_IMAGES, len(tested.losses))).indices
    return TestedImages(*(part[largest] for part in tested))


def _shrink_pictures(tested: TestedImages) -> TestedImages:
    """Return tested images with images and masks as small as the sheet shows them."""
    return TestedImages(
        tested.losses,
        tested.positions,
        images=shrink_images(tested.images),
        targets=shrink_mask(tested.targets) if is_mask(tested.targets) else tested.targets,
        predictions=(
            shrink_mask(tested.predictions) if is_mask(tested.predictions) else tested.predictions
        ),
    )


def gather_largest_losses(trainer: pl.Trainer, worst_images: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the images with the largest losses over all ranks. It is a collective.

    Each rank fills its own slots and leaves zeros in the slots of the others, so that the sum over
    the ranks has all images. With 16 images on a sheet, rank 0 has the slots 0 to 15, and rank 1
    the slots 16 to 31.
    """
    if trainer.world_size == 1:
        return worst_images
    reduce = trainer.strategy.reduce
    first_slot = trainer.global_rank * MAX_SHEET_IMAGES
    # The last number counts the ranks that have tested an image.
    losses = torch.zeros(
        trainer.world_size * MAX_SHEET_IMAGES + 1, device=trainer.strategy.root_device
    )
    losses[first_slot : first_slot + MAX_SHEET_IMAGES] = -torch.inf
    if worst_images:
        losses[first_slot : first_slot + len(worst_images[0])] = worst_images[0].float()
        losses[-1] = 1
    losses = reduce(losses, reduce_op="sum")
    if losses[-1] < trainer.world_size:
        return []

    # The images of the sheet, in its order.
    largest, slots = losses[:-1].topk(MAX_SHEET_IMAGES)
    is_mine = slots // MAX_SHEET_IMAGES == trainer.global_rank
    rows = slots[is_mine] - first_slot
    is_image = largest > -torch.inf
    gathered_parts = []
    for part in worst_images:
        images_in_slots = part.new_zeros(MAX_SHEET_IMAGES, *part.shape[1:])
        # A rank may have fewer images than slots.
        is_filled = rows < len(part)
        images_in_slots[is_mine.nonzero().flatten()[is_filled]] = part[rows[is_filled]]
        gathered_parts.append(reduce(images_in_slots, reduce_op="sum")[is_image | largest.isnan()])
    return gathered_parts
