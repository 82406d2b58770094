"""Decide which images train, validate and test: as the source says, else drawn per class or per group from the seed."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.batches import SPLIT, random_stream
from lockstep.data.batches import TEST as TEST_STREAM
from lockstep.data.listing import TEST, TRAIN, VAL
from lockstep.runs.errors import UserError

VAL_FRACTION = 0.1
TEST_SEED = 42  # of drawn test images: every seed trains on the others
TEST_IS_VAL = "no test images: the validation images are tested"


@dataclass(frozen=True)
class Splits:
    """Positions of the images of each split, ascending; notes: sentences for the log."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray
    drew_test: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """
    Args:
        val_fraction: part of the training images that validates; 0: none.
        num_val: the same as a count; takes precedence over val_fraction.
        fold: which of `num_folds` equal parts validates, from 0; instead of the two options above.
        test_fraction: part of all images that tests, where the source names no test images.
        stratify: draw from each class in proportion, and leave each class an image to train on.
    Raises:
        UserError: the folds are invalid, or combined with val_fraction or num_val.
    """

    seed: int
    val_fraction: float = VAL_FRACTION
    num_val: int | None = None
    fold: int | None = None
    num_folds: int | None = None
    test_fraction: float = 0.1
    stratify: bool = True

    def __post_init__(self) -> None:
        if self.fold is None and self.num_folds is None:
            return
        if self.fold is None or self.num_folds is None:
            raise UserError("data.fold and data.num_folds go together, as data.fold=0 data.num_folds=5.")
        if type(self.num_folds) is not int or self.num_folds < 2:
            raise UserError(f"data.num_folds={self.num_folds}: give a whole number from 2 on.")
        if type(self.fold) is not int or not 0 <= self.fold < self.num_folds:
            last = self.num_folds - 1
            raise UserError(
                f"data.fold={self.fold}: with data.num_folds={self.num_folds} give a whole number from 0 to {last}."
            )
        key, value = self._stated
        if value != VAL_FRACTION:
            raise UserError(
                f"data.{key}={value} and data.fold={self.fold} both select the validation images: leave one of them "
                f"out (data.{key}={'null' if key == 'num_val' else VAL_FRACTION})."
            )

    @property
    def _stated(self) -> tuple[str, float]:
        return ("val_fraction", self.val_fraction) if self.num_val is None else ("num_val", self.num_val)

    def assign(
        self, labels: np.ndarray, given: np.ndarray, groups: np.ndarray | None = None, *, training: bool = True
    ) -> Splits:
        """Return the splits of n images.

        Args:
            labels: (n,) int64.
            given: (n,) 0 train, 1 val, 2 test, −1 unused; without any 1 or 2 the test images are drawn.
            groups: (n,) int64; images of one group stay together.
            training: False: where the images cannot be split, all are tested.
        Raises:
            UserError: a part would be empty, or one group lies in several parts.
        """
        try:
            return self._assign(labels, given, groups)
        except UserError:
            if training:
                raise
            index = np.flatnonzero(given >= 0)
            return Splits(index[:0], index[:0], index, drew_test=True)

    def _assign(self, labels: np.ndarray, given: np.ndarray, groups: np.ndarray | None) -> Splits:
        train, val, test = (np.flatnonzero(given == split) for split in (TRAIN, VAL, TEST))
        if groups is not None:
            pairs = np.unique(np.stack([groups, given.astype(np.int64)]), axis=1)
            counts = np.unique(pairs[0], return_counts=True)[1]
            if (counts > 1).any():
                raise UserError(
                    f"data.group: {(counts > 1).sum()} of {len(counts)} groups have images in several of train, val "
                    "and test, which the source assigns: give all images of a group one split, or leave splits out."
                )
        if len(val) and self.fold is not None:
            raise UserError(
                f"data.fold={self.fold}: the data have validation images of their own, so there is nothing to fold."
            )
        key, value = self._stated
        used_val = val[:0] if value == 0 else val
        if len(val) and not len(test):
            return Splits(train, used_val, val, notes=(TEST_IS_VAL,))
        drew_test = not len(test)
        if drew_test:
            num_test, stream = round(self.test_fraction * len(train)), random_stream(TEST_SEED, TEST_STREAM)
            train, test = self._draw(train, labels, groups, num_test, stream, "test_fraction", self.test_fraction)
        if not len(val) and len(train) and value != 0:
            stream = random_stream(self.seed, SPLIT)
            if self.fold is not None:
                train, used_val = self._folded(train, labels, groups, stream)
            else:
                num_val = round(value * len(train)) if key == "val_fraction" else int(value)
                train, used_val = self._draw(train, labels, groups, num_val, stream, key, value)
        return Splits(train, used_val, test, drew_test)

    def _draw(
        self, index: np.ndarray, labels: np.ndarray, groups: np.ndarray | None, count: int,
        stream: np.random.Generator, key: str, value: Any,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Return (rest, drawn), of which `drawn` has `count` images as far as classes and groups allow."""
        if not 1 <= count < len(index):
            purpose, off = ("test", "") if key == "test_fraction" else ("validate", f"; data.{key}=0 validates nothing")
            raise UserError(
                f"data.{key}={value} of {len(index)} images leaves {len(index) - count} to train and {count} to "
                f"{purpose} on: both need one at least{off}."
            )
        order = index[stream.permutation(len(index))]
        if groups is not None:
            drawn = _drawn_groups(order, labels, groups, count)
        else:
            drawn = _drawn_per_class(order, labels, count) if self.stratify else order[:count]
        if not len(drawn):
            raise UserError(
                f"data.{key}={value} would draw {count} of {len(index)} images, but no "
                f"{'class has a second image' if groups is None else 'group can be spared'}: each class keeps one to "
                f"train on. Add images, or give data.{key}=0."
            )
        return np.setdiff1d(index, drawn), np.sort(drawn)

    def _folded(
        self, index: np.ndarray, labels: np.ndarray, groups: np.ndarray | None, stream: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        fold, num_folds = self.fold or 0, self.num_folds or 2
        if num_folds > len(index):
            raise UserError(f"data.num_folds={num_folds} exceeds the {len(index)} images: give at most {len(index)}.")
        if groups is None:  # dealt out like cards, class by class: folds differ by at most one image, also in a class
            order = index[stream.permutation(len(index))]
            by_class = order[np.argsort(labels[order], kind="stable")]
            validates = np.arange(len(index)) % num_folds == fold
            return np.sort(by_class[~validates]), np.sort(by_class[validates])
        from sklearn.model_selection import StratifiedGroupKFold

        folds = StratifiedGroupKFold(num_folds, shuffle=True, random_state=self.seed)
        try:
            train, val = list(folds.split(index, labels[index], groups[index]))[fold]
        except ValueError as error:
            raise UserError(f"data.num_folds={num_folds} does not fit the groups: {error}.") from None
        return index[train], index[val]


def _drawn_per_class(order: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """Take from each class in proportion (largest remainder), and leave each class one image at least.

    Args:
        order: positions in random order.
    """
    _, first_seen, of_class, sizes = np.unique(labels[order], True, True, True)
    room, shares = sizes - 1, sizes * count / len(order)
    take = np.minimum(np.floor(shares).astype(int), room)
    for number in np.lexsort((first_seen, take - shares)):  # first_seen breaks ties at random, as the order is
        take[number] += take.sum() < count and take[number] < room[number]
    while take.sum() < count and (take < room).any():  # classes of one image give none: the largest make up for it
        take[np.argmax(room - take)] += 1
    by_class = np.argsort(of_class, kind="stable")
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of an image within its class
    return order[by_class[rank < np.repeat(take, sizes)]]


def _drawn_groups(order: np.ndarray, labels: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """Take whole groups in random order while they fit, and leave each class an image of another group."""
    left, missing, taken = np.bincount(labels[order]), count, [order[:0]]
    _, first_seen, of_group = np.unique(groups[order], return_index=True, return_inverse=True)
    by_group = np.split(order[np.argsort(of_group, kind="stable")], np.cumsum(np.bincount(of_group))[:-1])
    for number in np.argsort(first_seen):  # random, as the order is
        members = by_group[number]
        classes, counts = np.unique(labels[members], return_counts=True)
        if missing > 0 and (len(members) <= missing or missing == count) and (left[classes] > counts).all():
            taken.append(members)
            left[classes] -= counts
            missing -= len(members)
    return np.concatenate(taken)
