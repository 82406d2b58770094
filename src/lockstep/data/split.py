"""Which of the training images validate: a part drawn from the seed, or one fold of several."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.batches import SPLIT, random_stream
from lockstep.runs.errors import UserError

VAL_FRACTION = 0.1


@dataclass(frozen=True)
class Split:
    """
    Args:
        val_fraction: part of the training images that validates; 0: none.
        num_val: the same as a count; goes before val_fraction.
        fold: of `num_folds` equal parts the one that validates, from 0 on; in place of the two above.
    Raises:
        UserError: the folds are none, or a part is stated beside them.
    """

    seed: int
    val_fraction: float = VAL_FRACTION
    num_val: int | None = None
    fold: int | None = None
    num_folds: int | None = None

    def __post_init__(self) -> None:
        if self.fold is None and self.num_folds is None:
            return
        if self.fold is None or self.num_folds is None:
            raise UserError("data.fold and data.num_folds go together, as data.fold=0 data.num_folds=5.")
        if not _is_whole(self.num_folds) or self.num_folds < 2:
            raise UserError(f"data.num_folds={self.num_folds}: give a whole number from 2 on.")
        if not _is_whole(self.fold) or not 0 <= self.fold < self.num_folds:
            raise UserError(
                f"data.fold={self.fold}: with data.num_folds={self.num_folds} give a whole number from 0 to "
                f"{self.num_folds - 1}."
            )
        key, value, unset = self._stated()
        if value != unset:
            raise UserError(
                f"data.{key}={value} and data.fold={self.fold} both say which images validate: leave one of them out "
                f"(data.{key}={'null' if unset is None else unset})."
            )

    def _stated(self) -> tuple[str, float | None, float | None]:
        """What says how many validate: its key, its value, and the value with which it says nothing."""
        if self.num_val is None:
            return "val_fraction", self.val_fraction, VAL_FRACTION
        return "num_val", self.num_val, None

    @property
    def never_validates(self) -> bool:
        return self._stated()[1] == 0

    def refuse_folds(self, name: str) -> None:
        """Of a data set that says itself which images validate."""
        if self.fold is not None:
            raise UserError(
                f"data.fold={self.fold}: {name} has validation images of its own, so there is nothing to fold; give it "
                "without them."
            )

    def of(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places of the images to train on and to validate on, ascending; the same on every rank.

        Args:
            labels: (n,) of all training images.
        Raises:
            UserError: one of the two would be empty.
        """
        order = random_stream(self.seed, SPLIT).permutation(len(labels))
        if self.fold is not None and self.num_folds is not None:
            return self._folded(order[np.argsort(labels[order], kind="stable")], self.fold, self.num_folds)
        key, value, _ = self._stated()
        num_val = round(self.val_fraction * len(order)) if self.num_val is None else self.num_val
        if not (0 if self.never_validates else 1) <= num_val < len(order):
            raise UserError(
                f"data.{key}={value} leaves {len(order) - num_val} of {len(order)} images to train on and {num_val} to "
                f"validate on: both need one at least; data.{key}=0 trains on all of them and validates nothing."
            )
        return np.sort(order[num_val:]), np.sort(order[:num_val])

    @staticmethod
    def _folded(by_class: np.ndarray, fold: int, num_folds: int) -> tuple[np.ndarray, np.ndarray]:
        """Dealt out like cards, class by class: folds differ by one image at most, and in each class too."""
        if num_folds > len(by_class):
            raise UserError(
                f"data.num_folds={num_folds}, and there are {len(by_class)} images to train and validate on: give at "
                f"most {len(by_class)}."
            )
        validates = np.arange(len(by_class)) % num_folds == fold
        return np.sort(by_class[~validates]), np.sort(by_class[validates])


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
