"""Draw a batch for a person: the images as the net gets them, with targets and predictions.

Images are made small first, so that a picture has a few tens of kB and may be kept in git.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lockstep.data.contact_sheet import TILE, Tile, write_contact_sheet

MAX_SHEET_IMAGES = 16  # images in one picture
# The colours of the classes of pixels from the second one on. The first one keeps the image.
CLASS_COLOURS = (
    (59, 130, 214),
    (224, 129, 43),
    (47, 158, 87),
    (214, 69, 93),
    (148, 103, 189),
    (160, 120, 90),
    (210, 103, 174),
)
MASK_OPACITY = 0.6
# The most characters of a class name in a caption.
NAME_LENGTH = 14
RED = "#c22745"
NO_POSITION = -1


class ChannelStatistics(NamedTuple):
    """The mean and the deviation of each channel, by which images were normalised."""

    mean: Sequence[float]
    std: Sequence[float]


def find_images(batch: Any) -> Tensor | None:
    """Return the images of a batch, (B, [views,] C, H, W).

    None: the batch is not (images, targets), or not ((images, numbers), targets).
    """
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
    """Return whether values are masks, (B, H, W) whole numbers: the class of each pixel."""
    return isinstance(values, Tensor) and values.ndim == 3 and not values.is_floating_point()


def shrink_images(images: Tensor) -> Tensor:
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


def shrink_mask(mask: Tensor) -> Tensor:
    """Return classes of pixels (B, H, W) with at most TILE pixels a side."""
    rows, columns = (
        torch.linspace(0, side - 1, min(side, TILE), device=mask.device).round().long()
        for side in mask.shape[1:]
    )
    return mask[:, rows][:, :, columns]


def to_pixels(images: Tensor, statistics: ChannelStatistics | None) -> Tensor:
    """Return (…, H, W, 3) uint8 on the CPU; images of one channel or two become grey.

    Args:
        images: (…, C, H, W).
        statistics: the ones that normalised the images; None: the smallest value becomes black
            and the largest white.
    """
    images = images.detach().cpu().float()
    if statistics is None:
        low = images.min()
        images = (images - low) / (images.max() - low).clamp(min=1e-6)
    else:
        mean, std = (torch.tensor(values).float().view(-1, 1, 1) for values in statistics)
        images = images * std + mean
    if images.shape[-3] < 3:
        images = images[..., :1, :, :].expand(*images.shape[:-3], 3, *images.shape[-2:])
    levels = (images[..., :3, :, :].nan_to_num(0.0).clamp(0, 1) * 255).round()
    return levels.byte().movedim(-3, -1)


def paint_mask(pixels: Tensor, mask: Tensor) -> Tensor:
    """Return an image (H, W, 3) with the colour of each class of its mask (H, W) over it.

    The first class keeps the colours of the image. Pixels that do not count are dark.
    """
    mask = mask.cpu()
    palette = torch.tensor(CLASS_COLOURS).float()
    colours = palette[(mask - 1).clamp(min=0) % len(palette)]
    mixed = pixels * (1 - MASK_OPACITY) + colours * MASK_OPACITY
    painted = torch.where(mask[..., None] > 0, mixed, pixels.float())
    return torch.where(mask[..., None] < 0, pixels * 0.2, painted).byte()


def pixels_to_pillow(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.contiguous().numpy())


def describe_target(target: Tensor, names: Sequence[str], *, is_mixed: bool = False) -> str:
    """Return a target of one image in words.

    These are its class, its labels, its number, or the largest classes of its mask.

    Args:
        target: (), (C,) or (H, W).
        names: the names of the classes or labels.
        is_mixed: the target has shares of classes, as mixup and CutMix make them.
    """
    target = target.detach().cpu()
    if target.ndim == 0:
        number = target.item()
        return _class_name(number, names) if isinstance(number, int) else f"{number:.4g}"
    if target.ndim == 2:
        counted = target[target >= 0]
        shares = torch.bincount(counted, minlength=1) / max(len(counted), 1)
        return _describe_shares(shares, names, first=1)
    if is_mixed:
        return _describe_shares(target, names)
    present = [_class_name(i, names) for i, value in enumerate(target.tolist()) if value > 0.5]
    return ", ".join(present) or "none"


def _class_name(number: int, names: Sequence[str]) -> str:
    return str(names[number])[:NAME_LENGTH] if 0 <= number < len(names) else str(number)


def _describe_shares(shares: Tensor, names: Sequence[str], first: int = 0) -> str:
    """Return "cat: 70%, dog: 30%", the two largest shares.

    Args:
        first: the number of the first class that counts.
    """
    largest = shares[first:].topk(min(2, len(shares[first:])))
    parts = []
    for share, number in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
        if share >= 0.005:
            parts.append(f"{_class_name(number + first, names)}: {share:.0%}")
    return ", ".join(parts)


def get_channel_statistics(data: Any) -> ChannelStatistics | None:
    """Return the mean and the deviation of a data module; None if it has none."""
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
    images = find_images(batch)
    if images is None or not len(images):
        return False
    pixels = _to_pixels_of_views(shrink_images(images[:MAX_SHEET_IMAGES]), data)
    targets = _copy_first_targets(batch[1])
    tiles = [_make_tile(views, i, targets, data) for i, views in enumerate(pixels)]
    _write_sheet(path, tiles)
    return True


def _to_pixels_of_views(images: Tensor, data: Any) -> Tensor:
    """Return (B, views, H, W, 3) uint8 of images (B, [views,] C, H, W)."""
    pixels = to_pixels(images, get_channel_statistics(data))
    return pixels if pixels.ndim == 5 else pixels[:, None]


def _copy_first_targets(targets: Any) -> dict[str, Tensor]:
    """Return the targets of the first images by name, on the CPU."""
    by_name = targets if isinstance(targets, Mapping) else {"": targets}
    # All images are copied at once: a copy of each one would wait for the device.
    return {
        name: values[:MAX_SHEET_IMAGES].detach().cpu()
        for name, values in by_name.items()
        if isinstance(values, Tensor)
    }


def _make_tile(views: Tensor, i: int, targets: Mapping[str, Tensor], data: Any) -> Tile:
    """Return the views of image `i` of a batch, its masks and a line for each target.

    Args:
        views: (views, H, W, 3) uint8.
        targets: the targets of the whole batch by name.
    """
    names = _class_names(data)
    is_of_classes = getattr(data, "target_kind", None) == "class"
    pictures = list(views)
    lines = []
    for name, values in targets.items():
        if is_mask(values):
            pictures.append(paint_mask(views[0], shrink_mask(values[i : i + 1])[0]))
        text = describe_target(values[i], names, is_mixed=is_of_classes)
        lines.append(f"{name}: {text}" if name else text)
    return Tile([pixels_to_pillow(picture) for picture in pictures], lines)


def _write_sheet(path: Path, tiles: list[Tile]) -> None:
    columns = max(3, 8 // len(tiles[0].pictures))
    write_contact_sheet(path, tiles, columns, is_small=True)


class TestedImages(NamedTuple):
    """Tested images, the largest loss first.

    Attributes:
        positions: (B,) int64 in the data set; NO_POSITION of an image without a file name.
        predictions: what predict_step returns.
    """

    losses: Tensor
    positions: Tensor
    images: Tensor
    targets: Tensor
    predictions: Tensor


def write_mistakes(path: Path, tested: TestedImages, data: Any) -> None:
    """Write tested images with their predicted and their true targets. Wrong predictions are red.

    Args:
        data: the data module.
    """
    tested = TestedImages(*(part.cpu() for part in tested))
    pixels = _to_pixels_of_views(tested.images, data)
    tiles = [_make_mistake_tile(views, i, tested, data) for i, views in enumerate(pixels)]
    if tiles:
        _write_sheet(path, tiles)


def _make_mistake_tile(views: Tensor, i: int, tested: TestedImages, data: Any) -> Tile:
    """Return the views of a tested image, its true and its predicted mask, and their caption."""
    target = tested.targets[i]
    prediction = tested.predictions[i]
    pictures = list(views)
    if is_mask(tested.targets) and is_mask(tested.predictions):
        pictures += [paint_mask(views[0], mask) for mask in (target, prediction)]

    comparison = _compare(target, prediction, _class_names(data))
    lines = [comparison.predicted, comparison.true, f"loss {tested.losses[i]:.3g}"]
    position = int(tested.positions[i])
    if position != NO_POSITION and hasattr(data, "source"):
        lines.append(Path(data.source.name(position)).name)
    colour = RED if comparison.is_right is False else "black"
    return Tile([pixels_to_pillow(picture) for picture in pictures], lines, colour)


def _class_names(data: Any) -> list[str]:
    return [str(name) for name in getattr(data, "class_names", ())]


class Comparison(NamedTuple):
    """Captions of what is predicted for an image and of what is true.

    Attributes:
        is_right: whether they are equal; None: they are numbers or masks, which are only near.
    """

    predicted: str
    true: str
    is_right: bool | None = None


def _compare(target: Tensor, predicted: Tensor, names: Sequence[str]) -> Comparison:
    """Compare the target of one image with what the task predicts.

    Args:
        target: (), (C,) or (H, W).
    """
    if target.ndim == 2 and predicted.ndim == 2:
        return _compare_masks(target, predicted)
    if target.ndim == 1:
        return _compare_labels(target, predicted, names)
    true = describe_target(target, names)
    if target.is_floating_point() or predicted.ndim != 1:
        return Comparison(f"predicted: {describe_target(predicted, names)}", f"true: {true}")

    shares = predicted.float()
    best = shares.argmax()
    return Comparison(
        f"{describe_target(best, names)} ({shares[best]:.0%})",
        f"true: {true} ({shares[target]:.0%})",
        bool(best == target),
    )


def _compare_masks(target: Tensor, predicted: Tensor) -> Comparison:
    is_counted = target >= 0
    share = (target == predicted)[is_counted].float().mean()
    return Comparison(f"{share:.1%} of the pixels right", "image, true, predicted")


def _compare_labels(target: Tensor, predicted: Tensor, names: Sequence[str]) -> Comparison:
    # A label that nobody knows is neither right nor wrong.
    predicted = predicted.where(target.isfinite(), target)
    # Captions cut long names, so two labels may read alike. Therefore the numbers are compared.
    return Comparison(
        describe_target(predicted, names),
        f"true: {describe_target(target, names)}",
        is_right=torch.equal(predicted > 0.5, target > 0.5),
    )
