"""Decide which images train, validate and test: as the source says, else drawn per class or per group from the seed."""

import warnings
from dataclasses import dataclass

import numpy as np

from lockstep.data.batches import SPLIT, random_stream
from lockstep.data.batches import TEST as TEST_STREAM
from lockstep.data.listing import TEST, TRAIN, VAL
from lockstep.runs.errors import UserError

VAL_FRACTION = 0.1
TEST_SEED = 42  # of drawn test images: every seed trains on the others


@dataclass
class Splits:
    """The positions of the images that train, validate and test, ascending."""

    of_each: np.ndarray  # (n,) 0 train, 1 val, 2 test, −1 none
    drew_test: bool = False  # the test images were chosen here, not by the source
    note: str = ""  # a sentence for the log

    def __post_init__(self) -> None:
        self.train, self.val, self.test = (np.flatnonzero(self.of_each == split) for split in (TRAIN, VAL, TEST))


@dataclass(frozen=True)
class Split:
    """
    Raises:
        UserError: the folds are invalid.
    """

    seed: int
    val_fraction: float = VAL_FRACTION  # part of the training images that validates; 0: none
    num_val: int | None = None  # the same as a count; takes precedence over val_fraction
    fold: int | None = None  # which of `num_folds` equal parts validates, from 0; takes precedence over both
    num_folds: int | None = None
    test_fraction: float = 0.1  # part of all images that tests, where the source names no test images

    def __post_init__(self) -> None:
        fold, folds = self.fold, self.num_folds
        is_valid = type(fold) is type(folds) is int and 0 <= fold < folds and folds > 1
        if (fold, folds) != (None, None) and not is_valid:
            hint = "give both, as data.fold=0 data.num_folds=5, the fold from 0 to num_folds - 1"
            raise UserError(f"data.fold={fold} data.num_folds={folds}: {hint}.")

    def assign(self, labels: np.ndarray, given: np.ndarray, groups: np.ndarray | None = None) -> Splits:
        """Return the splits of n images.

        Args:
            labels: (n,) int64.
            given: (n,) 0 train, 1 val, 2 test; without any 1 or 2 the test images are drawn.
            groups: (n,) int64; images of one group stay together.
        Raises:
            UserError: a part would be empty, or one group lies in several parts.
        """
        of_each, has_val, has_test = given.copy(), (given == VAL).any(), (given == TEST).any()
        option = "num_folds" if self.fold is not None else "val_fraction" if self.num_val is None else "num_val"
        validates = getattr(self, option) != 0
        if groups is not None:
            parts = np.unique(np.stack([groups, given]), axis=1).shape[1]
            if parts > (count := len(np.unique(groups))):
                raise UserError(
                    f"data.group: {parts - count} of {count} groups have images in several of train, val and test, "
                    "which the source assigns: give all images of a group one split, or leave splits out."
                )
        if has_val and self.fold is not None:
            raise UserError(f"data.fold={self.fold}: the data have validation images of their own. Leave it out.")
        if has_val and not has_test:
            of_each[given == VAL] = TEST
            splits = Splits(of_each, note="no test images: the validation images are tested")
            splits.val = splits.test if validates else splits.val
            return splits
        if not has_test:
            of_each[self._draw("test_fraction", of_each, labels, groups, TEST_SEED, TEST_STREAM)] = TEST
        if not validates:
            of_each[of_each == VAL] = -1
        elif not has_val and (of_each == TRAIN).any():
            of_each[self._draw(option, of_each, labels, groups, self.seed, SPLIT)] = VAL
        return Splits(of_each, drew_test=not has_test)

    def _draw(
        self, option: str, of_each: np.ndarray, labels: np.ndarray, groups: np.ndarray | None, seed: int, purpose: int
    ) -> np.ndarray:  # fmt: skip
        """Return the training images that an option selects: exactly as many, where they have no groups."""
        index, value = np.flatnonzero(of_each == TRAIN), getattr(self, option)
        n, stated, is_fold = len(index), f"data.{option}={value}", option == "num_folds"
        count = {"num_val": value, "num_folds": n // (value or 1)}.get(option, round(value * n))
        if not 1 <= count < n:
            raise UserError(
                f"{stated} of {n} images leaves {n - count} to train on and takes {count}: both need one at least."
            )
        order = index[random_stream(seed, purpose).permutation(n)]
        if groups is None and is_fold:
            # Dealt out like cards, class by class: folds differ by at most one image, also in a class.
            return order[np.argsort(labels[order], kind="stable")][self.fold :: value]
        if groups is None:
            choices = [_drawn_per_class(order, labels, count)]
        else:
            num_folds = value if is_fold else max(2, min(round(n / count), len(np.unique(groups[index]))))
            choices = _folds_of_groups(index, labels, groups, num_folds, seed, stated)
            if is_fold:
                return choices[self.fold or 0]
        for drawn in choices:
            if len(drawn) and np.isin(labels[drawn], labels[np.setdiff1d(index, drawn)]).all():
                return drawn
        raise UserError(
            f"{stated} would draw {count} of {n} images, but a class has no second "
            f"{'image' if groups is None else 'group'}: each keeps one to train on. Add images, or give "
            f"data.{option}=0."
        )


def _folds_of_groups(
    index: np.ndarray, labels: np.ndarray, groups: np.ndarray, num_folds: int, seed: int, stated: str
) -> list[np.ndarray]:  # fmt: skip
    """Return folds of `index` that keep groups together and have about the same share of each class."""
    from sklearn.model_selection import StratifiedGroupKFold

    folds = StratifiedGroupKFold(num_folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():  # of classes that have fewer images than there are folds
        warnings.simplefilter("ignore", UserWarning)
        try:
            return [index[fold] for _, fold in folds.split(index, labels[index], groups[index])]
        except ValueError as error:
            raise UserError(f"{stated} does not fit the {len(np.unique(groups[index]))} groups: {error}.") from None


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
