"""Pictures of a batch for a person: the images as the net gets them, targets and predictions.

Images become small at once, so that a file holds a few tens of kB and belongs into git.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lockstep.data.contact_sheet import TILE, Tile, contact_sheet

MAX_SHEET_IMAGES = 16  # images of a picture
# Classes of pixels after the first one, which keeps the colours of the image.
CLASS_COLOURS = (
    (59, 130, 214),
    (224, 129, 43),
    (47, 158, 87),
    (214, 69, 93),
    (148, 103, 189),
    (160, 120, 90),
    (210, 103, 174),
)
MASK_SHARE = 0.6  # of the colour of a class in a pixel
# A name in a caption.
NAME_LENGTH = 14  # characters
RED = "#c22745"


class ChannelStatistics(NamedTuple):
    """The mean and the deviation of each channel, by which images were normalised."""

    mean: Sequence[float]
    std: Sequence[float]


def images_of(batch: Any) -> Tensor | None:
    """Return the images of a batch, (B, [views,] C, H, W); None if it holds none at its place."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        return None
    images = batch[0]
    # Numbers may stand beside the images.
    if isinstance(images, list | tuple) and images:
        images = images[0]
    if isinstance(images, Tensor) and images.ndim in (4, 5):
        return images
    return None


def is_mask(values: Any) -> bool:
    """Return whether a tensor has the class of each pixel, (B, H, W) whole numbers."""
    return isinstance(values, Tensor) and values.ndim == 3 and not values.is_floating_point()


def small_images(images: Tensor) -> Tensor:
    """Return images (B, …, C, H, W) with at most TILE pixels a side, in float32."""
    images = images.detach().float()
    if max(images.shape[-2:]) <= TILE:
        return images
    size = [min(side, TILE) for side in images.shape[-2:]]
    if not len(images):
        return images.new_zeros(*images.shape[:-2], *size)
    flat = images.flatten(0, -4)
    return F.interpolate(flat, size, mode="bilinear", antialias=True).unflatten(
        0, images.shape[:-3]
    )


def small_mask(mask: Tensor) -> Tensor:
    """Return classes of pixels (B, H, W) with at most TILE pixels a side."""
    rows, columns = (
        torch.linspace(0, side - 1, min(side, TILE), device=mask.device).round().long()
        for side in mask.shape[1:]
    )
    return mask[:, rows][:, :, columns]


def as_pixels(images: Tensor, normalisation: ChannelStatistics | None) -> Tensor:
    """Return (…, H, W, 3) uint8 on the CPU, of which one channel or two are shown in grey.

    Args:
        images: (…, C, H, W).
        normalisation: it is undone; None: the values are stretched over all levels.
    """
    images = images.detach().cpu().float()
    if normalisation is None:
        low = images.min()
        images = (images - low) / (images.max() - low).clamp(min=1e-6)
    else:
        mean, std = (torch.tensor(values).float().view(-1, 1, 1) for values in normalisation)
        images = images * std + mean
    if images.shape[-3] < 3:
        images = images[..., :1, :, :].expand(*images.shape[:-3], 3, *images.shape[-2:])
    levels = (images[..., :3, :, :].nan_to_num(0.0).clamp(0, 1) * 255).round()
    return levels.byte().movedim(-3, -1)


def with_mask(pixels: Tensor, mask: Tensor) -> Tensor:
    """Return an image (H, W, 3) in the colours of its mask (H, W); pixels that do not count dark.

    The first class keeps the colours of the image.
    """
    mask = mask.cpu()
    table = torch.tensor(CLASS_COLOURS).float()
    colours = table[(mask - 1).clamp(min=0) % len(table)]
    mixed = pixels * (1 - MASK_SHARE) + colours * MASK_SHARE
    shown = torch.where(mask[..., None] > 0, mixed, pixels.float())
    return torch.where(mask[..., None] < 0, pixels * 0.2, shown).byte()


def pixels_to_pillow(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.contiguous().numpy())


def describe_target(target: Tensor, names: Sequence[str], *, is_mixed: bool = False) -> str:
    """Return a target of one image: its class, labels, number, or the largest classes of its mask.

    Args:
        target: (), (C,) or (H, W).
        names: of the classes or labels.
        is_mixed: the target has shares of classes, as mixup and CutMix make them.
    """
    target = target.detach().cpu()
    if target.ndim == 0:
        number = target.item()
        return _name(number, names) if isinstance(number, int) else f"{number:.4g}"
    if target.ndim == 2:
        counted = target[target >= 0]
        shares = torch.bincount(counted, minlength=1) / max(len(counted), 1)
        return _shares(shares, names, first=1)
    if is_mixed:
        return _shares(target, names)
    present = [_name(i, names) for i, value in enumerate(target.tolist()) if value > 0.5]
    return ", ".join(present) or "none"


def _name(number: int, names: Sequence[str]) -> str:
    return str(names[number])[:NAME_LENGTH] if 0 <= number < len(names) else str(number)


def _shares(shares: Tensor, names: Sequence[str], first: int = 0) -> str:
    """Return "cat: 70%, dog: 30%", the two largest shares among those from the number `first`."""
    largest = shares[first:].topk(min(2, len(shares[first:])))
    parts = []
    for share, number in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
        if share >= 0.005:
            parts.append(f"{_name(number + first, names)}: {share:.0%}")
    return ", ".join(parts)


def normalisation_of(data: Any) -> ChannelStatistics | None:
    """Return the normalisation of a data module; None if it says none."""
    mean = getattr(data, "mean", None)
    std = getattr(data, "std", None)
    if isinstance(mean, list | tuple) and isinstance(std, list | tuple):
        return ChannelStatistics(mean, std)
    return None


def write_batch(path: Path, batch: Any, data: Any) -> bool:
    """Write the first images of a training batch with their targets, and their masks over them.

    Args:
        batch: (images, targets), as the training step gets it.
        data: the data module.

    Returns:
        False if the batch holds no images.
    """
    images = images_of(batch)
    if images is None or not len(images):
        return False
    pixels = as_pixels(small_images(images[:MAX_SHEET_IMAGES]), normalisation_of(data))
    if pixels.ndim == 4:
        pixels = pixels[:, None]

    targets = _shown_targets(batch[1])
    tiles = [_tile(views, i, targets, data) for i, views in enumerate(pixels)]
    _write_sheet(path, tiles)
    return True


def _shown_targets(targets: Any) -> dict[str, Tensor]:
    """Return the targets of the first images by name, on the CPU."""
    by_name = targets if isinstance(targets, Mapping) else {"": targets}
    # One copy of all: each of its own would make the host wait for the device.
    return {
        name: values[:MAX_SHEET_IMAGES].detach().cpu()
        for name, values in by_name.items()
        if isinstance(values, Tensor)
    }


def _tile(views: Tensor, i: int, targets: Mapping[str, Tensor], data: Any) -> Tile:
    """Return the views of image `i` of a batch, its masks and a line for each target.

    Args:
        views: (views, H, W, 3) uint8.
        targets: of the whole batch, by name.
    """
    names = [str(name) for name in getattr(data, "class_names", ())]
    is_of_classes = getattr(data, "target_kind", None) == "class"
    pictures = list(views)
    lines = []
    for name, values in targets.items():
        if is_mask(values):
            pictures.append(with_mask(views[0], small_mask(values[i : i + 1])[0]))
        text = describe_target(values[i], names, is_mixed=is_of_classes)
        lines.append(f"{name}: {text}" if name else text)
    return Tile([pixels_to_pillow(picture) for picture in pictures], lines)


def _write_sheet(path: Path, tiles: list[Tile]) -> None:
    columns = max(3, 8 // len(tiles[0].pictures))
    contact_sheet(path, tiles, columns, is_small=True)


def write_mistakes(path: Path, worst: Sequence[Tensor], data: Any) -> None:
    """Write tested images with what the task predicts, in red where it is wrong, and the truth.

    Args:
        worst: losses, positions, images, targets and predictions, the largest loss first. Without
            a position, −1, an image has no name.
        data: the data module.
    """
    losses, positions, images, targets, predictions = (part.cpu() for part in worst)
    names = [str(name) for name in getattr(data, "class_names", ())]
    pixels = as_pixels(images, normalisation_of(data))
    tiles: list[Tile] = []
    for i, loss in enumerate(losses.tolist()):
        pictures = [pixels[i]]
        if is_mask(targets) and is_mask(predictions):
            pictures += [with_mask(pixels[i], targets[i]), with_mask(pixels[i], predictions[i])]
        verdict = _verdict(targets[i], predictions[i], names)
        lines = [verdict.predicted, verdict.true, f"loss {loss:.3g}"]
        if positions[i] >= 0 and hasattr(data, "source"):
            lines.append(Path(data.source.name(int(positions[i]))).name)
        colour = "black" if verdict.is_right else RED
        tiles.append(Tile([pixels_to_pillow(picture) for picture in pictures], lines, colour))
    if tiles:
        _write_sheet(path, tiles)


class Verdict(NamedTuple):
    """Sentences on what is predicted for an image and what is true, and whether they agree."""

    predicted: str
    true: str
    is_right: bool


def _verdict(target: Tensor, predicted: Tensor, names: Sequence[str]) -> Verdict:
    if is_class(target) and predicted.ndim == 1:
        shares = predicted.float()
        best = shares.argmax()
        return Verdict(
            f"{describe_target(best, names)} ({shares[best]:.0%})",
            f"true: {describe_target(target, names)} ({shares[target]:.0%})",
            bool(best == target),
        )
    if target.ndim == 2 and predicted.ndim == 2:
        is_counted = target >= 0
        share = (target == predicted)[is_counted].float().mean()
        return Verdict(f"{share:.1%} of the pixels right", "image, true, predicted", True)
    if target.ndim == 1:
        # A label that nobody knows is neither right nor wrong.
        predicted = predicted.where(target.isfinite(), target)
    text = describe_target(predicted, names)
    true = describe_target(target, names)
    if target.ndim == 0:
        return Verdict(f"predicted: {text}", f"true: {true}", True)
    return Verdict(text, f"true: {true}", text == true)


def is_class(target: Tensor) -> bool:
    return target.ndim == 0 and not target.is_floating_point()
