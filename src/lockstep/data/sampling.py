"""Draw the training images of an epoch: all once, each class equally, or by weights.

The list of an epoch is drawn at once from the seed. Ranks, micro-batches and a resume take parts of
this list, as they take parts of a shuffled one.
"""

from dataclasses import dataclass

import numpy as np

from lockstep.data.source import Source
from lockstep.process.errors import UserError

BALANCED = "balanced"
SQRT = "sqrt"
BY_CLASS = (BALANCED, SQRT)
SHOWN_CLASSES = 10
WEIGHTS_OF_TABLES = "A column of weights is of data=csv and data=parquet."


@dataclass
class Sampling:
    """The way to draw the images of an epoch, if it is not each training image once.

    Args:
        positions: (n,) int64, the positions of the training images that can be drawn.
        groups: (n,) int64, the class of each image, or the rarest of its labels.
        weights: (n,) float64 above 0. An image is drawn in proportion to its weight.
        epoch_size: images of an epoch. The last incomplete batch is dropped.
    """

    positions: np.ndarray
    groups: np.ndarray
    weights: np.ndarray
    epoch_size: int

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Return (count,) positions in random order.

        This is systematic sampling: each image, and each class as a whole, is drawn as often as its
        share of `count`, rounded up or down. So an image whose share is below 1 is not repeated.
        """
        shuffled = generator.permutation(len(self.positions))
        by_group = shuffled[np.argsort(self.groups[shuffled], kind="stable")]
        # A running sum is equal on all processors, which np.sum need not be.
        shares = np.cumsum(self.weights[by_group])
        ends = np.floor(shares * (count / shares[-1]) + generator.random()).astype(np.int64)
        ends = np.minimum(ends, count)
        ends[-1] = count
        draws = np.diff(ends, prepend=0)
        return generator.permutation(np.repeat(self.positions[by_group], draws))

    def expect_counts(self, count: int) -> np.ndarray:
        """Return (groups,) float64, the images of each group among `count`."""
        shares = np.bincount(self.groups, self.weights)
        return count * shares / shares.sum()


def check_sampling(option: str | None, source: Source) -> None:
    """Refuse a way of sampling that does not fit the targets or the table.

    Raises:
        UserError: there are no classes, no such column, or negative weights.
    """
    if option is None:
        return
    if option not in BY_CLASS:
        _check_weights(option, source)
    elif source.target_kind not in ("class", "labels"):
        raise UserError(
            f"data.sampling={option} needs classes or labels, and the targets are of the kind "
            f"{source.target_kind}. Give data.sampling=COLUMN, a column of weights."
        )


def _check_weights(option: str, source: Source) -> None:
    if option not in source.columns:
        raise UserError(f"data.sampling={option}: give balanced or sqrt. {WEIGHTS_OF_TABLES}")
    weights = source.columns[option]
    negative = np.flatnonzero(weights < 0)
    if len(negative):
        i = int(negative[0])
        raise UserError(
            f"{source.location(i)}: the weight in the column {option} is {weights[i]:g}. "
            "Give numbers from 0 on."
        )


def make_sampling(
    option: str | None, epoch_size: int | None, source: Source, train: np.ndarray
) -> Sampling | None:
    """Return how the images of an epoch are drawn; None: each training image once.

    Args:
        option: data.sampling, which `check_sampling` has accepted.
        epoch_size: data.epoch_size; None: the number of training images.
        train: positions of the training images.

    Raises:
        UserError: no training image has a weight above 0.
    """
    if option is None and epoch_size is None:
        return None
    groups = _group_images(source, train)
    weights = _weigh_images(option, source, train, groups)
    is_drawn = weights > 0
    if not is_drawn.any():
        raise UserError(
            f"data.sampling={option}: the weights of all training images are 0. Give some of them "
            "a weight above 0."
        )
    size = len(train) if epoch_size is None else epoch_size
    return Sampling(train[is_drawn], groups[is_drawn], weights[is_drawn], size)


def _group_images(source: Source, train: np.ndarray) -> np.ndarray:
    """Return (n,) int64, the class of each training image, or the rarest of its labels.

    Images without a label are one more group, the last one.
    """
    if source.target_kind == "class":
        return source.targets[""][train]
    if source.target_kind != "labels":
        return np.zeros(len(train), np.int64)
    has_label = source.targets[""][train] > 0
    counts = np.where(has_label, has_label.sum(0), len(train) + 1)
    return np.where(has_label.any(1), counts.argmin(1), has_label.shape[1])


def _weigh_images(
    option: str | None, source: Source, train: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    if option is None:
        return np.ones(len(train))
    if option not in BY_CLASS:
        return source.columns[option][train]
    counts = np.bincount(groups)[groups]
    return 1 / (counts if option == BALANCED else np.sqrt(counts))


def describe_sampling(option: str | None, sampling: Sampling, count: int, source: Source) -> str:
    """Return "balanced: 3 classes: 9,120, 410, 38 images; 3,189 draws of each".

    Args:
        count: images of an epoch's whole batches.
    """
    method = option or f"data.epoch_size={sampling.epoch_size}"
    if option is not None and option not in BY_CLASS:
        method = f"by the column {option}"
    images = np.bincount(sampling.groups)
    draws = np.rint(sampling.expect_counts(count)[images > 0]).astype(int)
    images = images[images > 0]
    if source.target_kind not in ("class", "labels"):
        return f"{method}: {len(sampling.positions):,} images; {count:,} draws"

    groups = f"{len(images)} classes"
    if source.target_kind == "labels":
        groups = f"{len(images)} groups of images by their rarest label"
    draws_text = f"{_list_counts(draws)} draws"
    if draws.min() == draws.max():
        draws_text = f"{draws[0]:,} draws of each"
    return f"{method}: {groups}: {_list_counts(images)} images; {draws_text}"


def _list_counts(numbers: np.ndarray) -> str:
    """Return "9,120, 410, 38", or of many numbers "38 to 9,120"."""
    if len(numbers) > SHOWN_CLASSES:
        return f"{numbers.min():,} to {numbers.max():,}"
    return ", ".join(f"{number:,}" for number in numbers.tolist())
