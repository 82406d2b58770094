"""Turn selections of images into batches on the device, from an array or by DataLoader worker processes."""

import atexit
import multiprocessing
import os
import shutil
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.data.augmentation import Operation, own_stream
from lockstep.data.batch_transforms import BatchTransforms
from lockstep.data.batches import Selection
from lockstep.data.decoding import CorruptImage, pixels_of
from lockstep.data.framing import Framing
from lockstep.data.targets import Arrays, classes_of
from lockstep.runs.environment import available_cores, environment
from lockstep.runs.errors import UserError

LoadedBatch = dict[str, Any]
"""`targets` by name; `images` (n, side, side, channels) uint8 and `masks` by name (n, side, side), or `index` into the
arrays on the device; `draws` (3, n) unless the images are augmented already; `mixing` where images are mixed."""
OpenSample = Callable[[int], tuple[Any, ...]]
"""position → the whole image (Pillow's, RGB or L) and its masks (torchvision's Mask)"""
MakeSample = Callable[[int, list[int]], tuple[np.ndarray, ...]]
"""(position, draws) → uint8 pixels of the image (side, side, channels) and of each mask (side, side); each draw seeds
the random stream of one view, and several views are stacked"""


def workers_of(stated: int | str, device: torch.device) -> int:
    """Return how many worker processes load the images of this rank."""
    if stated == "auto":
        own_cores = available_cores() // int(environment().get("LOCAL_WORLD_SIZE") or 1)
        return max(1, min(16, own_cores - 2) if device.type == "cuda" else min(4, available_cores()))
    return min(int(stated), len(os.sched_getaffinity(0)))


class BatchLoader:
    """
    Args:
        targets: by name (n, …), of all images.
        mask_names: of the masks that come with each image.
        array: (n, side, side, channels) uint8; None: workers open each image.
        mask_arrays: by name (n, side, side) uint8, beside the array.
        device_array_gib: the largest array that is kept on a GPU; batches of a larger one are cut in CPU memory.
        num_workers: at most; never more than there are cores. "auto": on a GPU the cores of this rank but two, up to
            16, else up to 4.
    """

    def __init__(
        self, transforms: BatchTransforms, framing: Framing, targets: Arrays, device: torch.device, *,
        mask_names: list[str], array: np.ndarray | None, mask_arrays: Arrays, open_sample: OpenSample,
        device_array_gib: float, num_workers: int | str,
    ) -> None:  # fmt: skip
        self.transforms, self.framing, self.device = transforms.to(device), framing, device
        self.targets, self.mask_names, self.open_sample = targets, mask_names, open_sample
        self.num_workers = workers_of(num_workers, device)
        self.is_resident = array is not None and (device.type == "cpu" or array.nbytes <= device_array_gib * 2**30)
        place = device if self.is_resident else torch.device("cpu")
        self.array = None if array is None else torch.from_numpy(array).to(place)
        self.mask_arrays = {name: torch.from_numpy(masks).to(place) for name, masks in mask_arrays.items()}

    def whole(self, selections: Iterable[Selection]) -> Iterator[LoadedBatch]:
        """Yield images that the device crops: for evaluation, and for an augmentation of whole batches."""
        if self.array is None:
            for selection, batch in self._loaded(selections, partial(_square, self.open_sample, self.framing)):
                yield {**batch, "draws": torch.from_numpy(selection.draws)}
            return
        for selection in selections:
            index = torch.from_numpy(selection.positions)
            batch = {"index": index, "draws": torch.from_numpy(selection.draws), **self._targets_of(selection)}
            if not self.is_resident:
                batch["images"] = self.array[index].pin_memory()
                batch["masks"] = {name: masks[index].pin_memory() for name, masks in self.mask_arrays.items()}
            yield batch

    def augmented(self, pipeline: Operation, selections: Iterable[Selection]) -> Iterator[LoadedBatch]:
        """Yield images that workers have augmented one by one."""
        for _, batch in self._loaded(selections, partial(_augmented, self.open_sample, pipeline)):
            yield batch

    def _loaded(self, selections: Iterable[Selection], make: MakeSample) -> Iterator[tuple[Selection, LoadedBatch]]:
        pin_memory = self.device.type == "cuda"
        for selection, found in stream(selections, make, num_workers=self.num_workers, pin_memory=pin_memory):
            images, *masks = found
            batch = {"images": images, "masks": dict(zip(self.mask_names, masks, strict=True))}
            yield selection, {**batch, **self._targets_of(selection)}

    def _targets_of(self, selection: Selection) -> LoadedBatch:
        targets = {name: torch.from_numpy(values[selection.positions]) for name, values in self.targets.items()}
        mixing = {} if selection.mixing is None else {"mixing": torch.from_numpy(selection.mixing)}
        return {"targets": targets, **mixing}

    def pixels(self, batch: LoadedBatch) -> Tensor:
        """Return (n, channels, image_size, image_size) float32, normalised, of a batch that is on the device.

        Several views of each image are (n, views, channels, image_size, image_size).
        """
        images = batch["images"] if "images" in batch else self._indexed(self.array, batch)
        if "draws" in batch:
            return _stacked([self.transforms(images, draws) for draws in batch["draws"].split(3)])
        if images.ndim == 4:
            return self.transforms.normalise(images)
        return self.transforms.normalise(images.flatten(0, 1)).unflatten(0, images.shape[:2])

    def masks(self, batch: LoadedBatch) -> dict[str, Tensor]:
        """Return (n, image_size, image_size) int64 by name, −1 where a pixel does not count."""
        found = {}
        for name in self.mask_names:
            masks = batch["masks"][name] if "masks" in batch else self._indexed(self.mask_arrays[name], batch)
            if "draws" in batch:
                views = [self.transforms.moved(masks[..., None], draws)[..., 0] for draws in batch["draws"].split(3)]
                masks = _stacked(views)
            found[name] = classes_of(masks)
        return found

    def _indexed(self, array: Any, batch: LoadedBatch) -> Tensor:
        if self.device.type == "cpu":  # in one thread, as in BatchTransforms
            return torch.from_numpy(array.numpy()[batch["index"].numpy()])
        return array[batch["index"]]


def _stacked(views: list[Tensor]) -> Tensor:
    return views[0] if len(views) == 1 else torch.stack(views, 1)


def _square(open_sample: OpenSample, framing: Framing, position: int, _draws: list[int]) -> tuple[np.ndarray, ...]:
    """Return an image as an array holds it: resize × resize."""
    return tuple(map(pixels_of, framing.square(open_sample(position))))


def _augmented(
    open_sample: OpenSample, pipeline: Operation, position: int, draws: list[int]
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Return an image as training sees it."""
    sample, views = open_sample(position), []
    for draw in draws:
        with own_stream(draw):
            views.append(tuple(map(pixels_of, pipeline(sample) if len(sample) > 1 else (pipeline(sample[0]),))))
    return views[0] if len(views) == 1 else tuple(np.stack(each) for each in zip(*views))


class _Batches(Dataset):
    """Whole batches of images and masks, uint8, or the error of one of their images."""

    def __init__(self, make: MakeSample, num_workers: int) -> None:
        self._make, self._num_workers = make, num_workers

    def __getitems__(self, wanted: list[tuple[int, list[int]]]) -> list[Any] | Exception:
        try:
            samples = [self._make(*each) for each in wanted]
        except (CorruptImage, UserError) as error:  # raised here it would carry the worker's traceback
            return error.refusal() if isinstance(error, CorruptImage) else error
        found = [np.stack(each) for each in zip(*samples)]
        # A worker that finds no shared memory (64 MB in a container by default) fails without a word to the loader:
        # arrays go through a pipe, more slowly.
        needed = (self._num_workers + 1) * sum(each.nbytes for each in found)
        return list(map(torch.from_numpy, found)) if free_shared_memory() > needed else found


def free_shared_memory() -> int:
    """Return the bytes in which worker processes can hand over tensors."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def stream(
    selections: Iterable[Selection], make: MakeSample, *, num_workers: int, pin_memory: bool = False
) -> Iterator[tuple[Selection, list[Tensor]]]:
    """Yield each selection with its images and masks, in order; workers prepare some batches ahead.

    Raises:
        UserError: names an image that cannot be read or decoded.
    """
    waiting: deque[Selection] = deque()

    def wanted() -> Iterator[list[tuple[int, list[int]]]]:
        for selection in selections:
            waiting.append(selection)
            # An empty selection loads the first image for its shape.
            yield list(zip(selection.positions.tolist(), selection.draws.T.tolist(), strict=True)) or [(0, [0])]

    loader = DataLoader(
        _Batches(make, num_workers), batch_sampler=wanted(), collate_fn=_unchanged, num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # the loader draws a seed: not from the global stream, which a resume restores
    )  # fmt: skip
    # Workers are born with these blocked: a signal to all processes of a job is for the rank, which saves first.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with warnings.catch_warnings():  # forking beside idle threads is what every DataLoader does; Python 3.12 warns
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
        batches = iter(loader)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        for found in batches:
            if isinstance(found, Exception):
                raise found
            selection = waiting.popleft()
            yield selection, [torch.as_tensor(each[: len(selection.positions)]) for each in found]
    finally:
        del batches  # ends the workers now: an error's traceback would keep them, and the program's end wait for them


@atexit.register
def _kill_workers() -> None:
    """Run before multiprocessing's own exit handler, which would wait for workers that ignore SIGTERM."""
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report them as failed
    for worker in workers:
        worker.kill()


def _unchanged(batch: Any) -> Any:
    return batch
