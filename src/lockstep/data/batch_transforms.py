"""Resize, pad, crop, flip and normalise a whole batch on the training device, by one module without per-image work.

The same as torchvision's Compose([Resize((resize, resize)), RandomCrop(image_size, padding=crop_padding),
RandomHorizontalFlip(), ToTensor, Normalize(mean, std)]) in float, and for evaluation Resize, CenterCrop(image_size),
Normalize. Where images are stored at `resize` already, the crop and flip are one gather (image_array.py) and only the
normalisation remains; elsewhere resize and crop are two small matrices per image, or two for all.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.image_array import ImageArray, Layout, Places
from lockstep.data.resampling import resize_matrix


class BatchTransforms(nn.Module):
    """uint8 images in, normalised float32 images out.

    Args:
        stored_size: side of the images as they are stored.
        image_size: side of the result.
        resize: side that images are resized to before the crop; None: image_size.
        crop_padding: black pixels around the resized image that a random crop may reach into.
        flip: mirror half of the training images left to right.
        mean: per channel, of pixels from 0 to 1.
        std: likewise.
        interpolation: bilinear or bicubic.
    """

    scale: Tensor
    shift: Tensor
    row_scale: Tensor
    row_shift: Tensor
    crops: Tensor

    def __init__(
        self,
        *,
        stored_size: int,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        resize: int | None = None,
        crop_padding: int = 0,
        flip: bool = False,
        interpolation: str = "bilinear",
    ) -> None:
        super().__init__()
        resize = resize or image_size
        self.stored_size, self.image_size, self.resize = stored_size, image_size, resize
        self.crop_padding, self.flip, self.channels = crop_padding, flip, len(mean)
        self.resizes, self.overshoots = stored_size != resize, interpolation == "bicubic"
        scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
        shift = -torch.tensor(mean, dtype=torch.float64) * 255 * scale
        self.register_buffer("scale", scale.float(), persistent=False)
        self.register_buffer("shift", shift.float(), persistent=False)
        for name in ("scale", "shift"):  # of a whole row of pixels: the kernels' inner loop
            row = getattr(self, name).repeat(image_size)
            self.register_buffer(f"row_{name}", row, persistent=False)
        if self.resizes:
            matrix = resize_matrix(stored_size, resize, interpolation)
            bordered = nn.functional.pad(matrix, (0, 0, crop_padding, crop_padding))
            # (starts, stored_size, image_size): for each crop start the transposed rows of the matrix
            self.register_buffer("crops", bordered.unfold(0, image_size, 1).contiguous(), persistent=False)

    @property
    def num_starts(self) -> int:
        """How many places a crop can start at, along each side."""
        return self.resize + 2 * self.crop_padding - self.image_size + 1

    @property
    def array_padding(self) -> int:
        """The border that an image array needs for this."""
        return 0 if self.resizes else self.crop_padding

    @property
    def window(self) -> int:
        """Side of the windows to cut from an image array."""
        return self.stored_size if self.resizes else self.image_size

    def draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        """Random augmentation of n images: (3, n) int64 rows dy, dx (crop start) and flip."""
        draws = np.zeros((3, n), np.int64)
        if self.num_starts > 1:
            draws[:2] = generator.integers(0, self.num_starts, (2, n))
        if self.flip:
            draws[2] = generator.integers(0, 2, n)
        return draws

    def centre(self) -> np.ndarray:
        """(3,) int64: torchvision's centre crop, not flipped."""
        start = self.crop_padding + round((self.resize - self.image_size) / 2)
        return np.array([start, start, 0], np.int64)

    def whole_images(self, layout: Layout) -> bool:
        """Whether an array of this layout lacks the border, so that whole images are taken and cut afterwards."""
        return layout.padding != self.array_padding

    def window_in(self, layout: Layout) -> int:
        """Side of the windows to cut from an array of this layout."""
        return layout.size if self.whole_images(layout) else self.window

    def images(self, array: ImageArray, index: Places, draws: Places) -> Tensor:
        """`cut` and `forward` in one."""
        if self.resizes or self.whole_images(array.layout):
            return self(self.cut(array, index, draws), draws)
        return self._normalise(array.rows(index, draws))

    def cut(self, array: ImageArray, index: Places, draws: Places) -> Tensor:
        """The part that happens in uint8, on the device where the array lies: (n, window, window, channels)."""
        if self.whole_images(array.layout):
            return self.cut_batch(array.windows(index, 0 * draws), torch.as_tensor(draws))
        if self.resizes:
            return array.windows(index, [0, 0, draws[2]])
        return array.windows(index, draws)

    def cut_batch(self, images: Tensor, draws: Tensor) -> Tensor:
        """`cut` for images (n, stored_size, stored_size, channels) uint8 that are not in an array."""
        array = ImageArray.of_batch(images, self.array_padding, self.window)
        return self.cut(array, torch.arange(len(images), device=images.device), draws)

    @torch.no_grad()
    def forward(self, windows: Tensor, draws: Places) -> Tensor:
        """(n, channels, image_size, image_size) float32; channels lie innermost where nothing was resized.

        Args:
            windows: what `cut` returned.
            draws: (3, n) int64, the same as for `cut`.
        """
        with _exact_products():
            return self._resize(windows, draws) if self.resizes else self.normalised(windows)

    def normalised(self, images: Tensor) -> Tensor:
        """`forward` for images that are cut already: (n, image_size, image_size, channels) uint8."""
        return self._normalise(images.flatten(2))

    def _normalise(self, rows: Tensor) -> Tensor:
        """Of (n, image_size, image_size·channels)."""
        out = rows.float()
        torch.addcmul(self.row_shift, out, self.row_scale, out=out)
        return out.view(-1, self.image_size, self.image_size, self.channels).permute(0, 3, 1, 2)

    def _resize(self, windows: Tensor, draws: Places) -> Tensor:
        scale, shift = self.scale, self.shift
        black_border = self.crop_padding > 0  # what is outside the image must become `shift`: added at the end
        small = windows.float().mul_(scale) if black_border else torch.addcmul(shift, windows.float(), scale)
        small = small.permute(0, 3, 1, 2).contiguous()
        if self.num_starts > 1:
            dy, dx, flip = torch.as_tensor(draws)
            dx = dx + flip * (self.num_starts - 1 - 2 * dx)  # the image was mirrored before its crop
            across = self.crops.index_select(0, dx).unsqueeze(1)
            down = self.crops.index_select(0, dy).unsqueeze(1).transpose(2, 3)
        else:
            across, down = self.crops[0], self.crops[0].T
        out = torch.matmul(down, torch.matmul(small, across))
        out = out.add_(shift.view(-1, 1, 1)) if black_border else out
        if self.overshoots:  # beyond black and white, where Pillow cuts off
            torch.clamp(out, shift.view(-1, 1, 1), (255 * scale + shift).view(-1, 1, 1), out=out)
        return out


@contextmanager
def _exact_products() -> Iterator[None]:
    """Full float32 in matrix products, whatever the model uses: TF32 would move pixels by 1e-3."""
    chosen = torch.get_float32_matmul_precision()
    if chosen == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
