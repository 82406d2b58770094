"""Decide which images train, validate and test.

Either the source names the splits, or they are drawn from the seed, by class or by group.
"""

import warnings
from dataclasses import dataclass

import numpy as np

from lockstep.data.batches import SPLIT_STREAM, TEST_STREAM, random_stream
from lockstep.data.listing import TEST, TRAIN, VAL
from lockstep.process.errors import UserError

VAL_FRACTION = 0.1
# Test images are drawn with this seed, so that runs of all seeds have the same test images.
TEST_SEED = 42


@dataclass
class Splits:
    """The positions of the images that train, validate and test, ascending.

    Args:
        split_ids: (n,) 0 train, 1 val, 2 test, −1 none of them.
        drew_test: the test images were drawn, because the source names none.
        note: a sentence for the log.
    """

    split_ids: np.ndarray
    drew_test: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        self.train = np.flatnonzero(self.split_ids == TRAIN)
        self.val = np.flatnonzero(self.split_ids == VAL)
        self.test = np.flatnonzero(self.split_ids == TEST)


@dataclass(frozen=True)
class SplitDraw:
    """One draw among the training images."""

    option: str  # num_folds, num_val, val_fraction or test_fraction
    value: float
    seed: int
    purpose: int = SPLIT_STREAM  # keeps the random streams of one seed apart

    @property
    def text(self) -> str:
        return f"data.{self.option}={self.value}"

    def count_drawn(self, n: int) -> int:
        """Return how many of n images are drawn.

        Raises:
            UserError: none would be drawn, or none would be left.
        """
        count = round(self.value * n)
        if self.option == "num_val":
            count = int(self.value)
        elif self.option == "num_folds":
            count = n // int(self.value)
        if not 1 <= count < n:
            raise UserError(
                f"{self.text} of {n} images leaves {n - count} to train on and takes {count}: "
                "both need one at least."
            )
        return count

    def shuffle(self, positions: np.ndarray) -> np.ndarray:
        return positions[random_stream(self.seed, self.purpose).permutation(len(positions))]


@dataclass(frozen=True)
class SplitRule:
    """The options of a split.

    Args:
        val_fraction: the share of the training images that validates; 0: none.
        num_val: the number of training images that validate. It overrides val_fraction.
        fold: the one of `num_folds` equal parts that validates. It overrides both.
        test_fraction: the share of all images that tests, if the source names no test images.

    Raises:
        UserError: the folds are invalid.
    """

    seed: int
    val_fraction: float = VAL_FRACTION
    num_val: int | None = None
    fold: int | None = None
    num_folds: int | None = None
    test_fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.fold is None and self.num_folds is None:
            return
        is_valid = False
        if type(self.fold) is int and type(self.num_folds) is int:
            is_valid = self.num_folds > 1 and 0 <= self.fold < self.num_folds
        if not is_valid:
            raise UserError(
                f"data.fold={self.fold} data.num_folds={self.num_folds}: give both, as data.fold=0 "
                "data.num_folds=5, the fold from 0 to num_folds - 1."
            )

    def assign(
        self, labels: np.ndarray, source_split_ids: np.ndarray, groups: np.ndarray | None = None
    ) -> Splits:
        """Return the splits of n images.

        Args:
            labels: (n,) int64.
            source_split_ids: (n,) 0 train, 1 val, 2 test, as the source says. Test images are drawn
                if all of them are 0.
            groups: (n,) int64. Images of one group stay in one split.

        Raises:
            UserError: a split would be empty, or a group lies in several splits.
        """
        has_val = bool((source_split_ids == VAL).any())
        has_test = bool((source_split_ids == TEST).any())
        validation = self._choose_validation_draw()
        if groups is not None:
            _refuse_divided_groups(groups, source_split_ids)
        if has_val and self.fold is not None:
            raise UserError(
                f"data.fold={self.fold}: the data have validation images of their own. Leave it "
                "out."
            )
        if has_val and not has_test:
            return _make_validation_test(source_split_ids, validates=validation.value != 0)

        split_ids = source_split_ids.copy()
        if not has_test:
            test = SplitDraw("test_fraction", self.test_fraction, TEST_SEED, TEST_STREAM)
            split_ids[self._draw(test, split_ids, labels, groups)] = TEST
        if validation.value == 0:
            split_ids[split_ids == VAL] = -1
        elif not has_val and (split_ids == TRAIN).any():
            split_ids[self._draw(validation, split_ids, labels, groups)] = VAL
        return Splits(split_ids, drew_test=not has_test)

    def _choose_validation_draw(self) -> SplitDraw:
        """Return the draw of the validation images, by the option that overrides the others."""
        for option in ("num_folds", "num_val"):
            value = getattr(self, option)
            if value is not None:
                return SplitDraw(option, value, self.seed)
        return SplitDraw("val_fraction", self.val_fraction, self.seed)

    def _draw(
        self, draw: SplitDraw, split_ids: np.ndarray, labels: np.ndarray, groups: np.ndarray | None
    ) -> np.ndarray:
        """Draw among the training images. Without groups exactly the right number is drawn."""
        positions = np.flatnonzero(split_ids == TRAIN)
        count = draw.count_drawn(len(positions))
        if draw.option == "num_folds":
            return self._draw_fold(draw, positions, labels, groups)
        if groups is None:
            part = "image"
            choices = [_draw_per_class(draw.shuffle(positions), labels, count)]
        else:
            part = "group"
            num_groups = len(np.unique(groups[positions]))
            num_folds = max(2, min(round(len(positions) / count), num_groups))
            choices = _make_group_folds(positions, labels, groups, num_folds, draw)
        for chosen in choices:
            if _keeps_each_class(chosen, positions, labels):
                return chosen
        advice = f"give data.{draw.option}=0"
        if draw.option == "test_fraction":
            advice = "leave the class out"
        raise UserError(
            f"{draw.text} would draw {count} of {len(positions)} images, but a class has no second "
            f"{part}: each keeps one to train on. Add images, or {advice}."
        )

    def _draw_fold(
        self, draw: SplitDraw, positions: np.ndarray, labels: np.ndarray, groups: np.ndarray | None
    ) -> np.ndarray:
        num_folds = int(draw.value)
        if groups is not None:
            return _make_group_folds(positions, labels, groups, num_folds, draw)[self.fold or 0]
        # The images are dealt out like cards, class by class. So the folds differ by at most one
        # image, and also by at most one image of each class.
        order = draw.shuffle(positions)
        by_class = order[np.argsort(labels[order], kind="stable")]
        return by_class[self.fold :: num_folds]


def _refuse_divided_groups(groups: np.ndarray, source_split_ids: np.ndarray) -> None:
    parts = np.unique(np.stack([groups, source_split_ids]), axis=1).shape[1]
    count = len(np.unique(groups))
    if parts > count:
        raise UserError(
            f"data.group: {parts - count} of {count} groups have images in several of train, val "
            "and test, which the source assigns: give all images of a group one split, or give "
            "data.splits=false to draw the splits."
        )


def _make_validation_test(source_split_ids: np.ndarray, *, validates: bool) -> Splits:
    split_ids = np.where(source_split_ids == VAL, TEST, source_split_ids)
    splits = Splits(split_ids, note="no test images: the validation images are tested")
    if validates:
        splits.val = splits.test
    return splits


def _keeps_each_class(chosen: np.ndarray, positions: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether images are chosen and each of their classes keeps one to train on."""
    remaining = labels[np.setdiff1d(positions, chosen)]
    return len(chosen) > 0 and bool(np.isin(labels[chosen], remaining).all())


def _make_group_folds(
    positions: np.ndarray, labels: np.ndarray, groups: np.ndarray, num_folds: int, draw: SplitDraw
) -> list[np.ndarray]:
    """Return folds that keep groups together. Each fold has about the same share of each class."""
    from sklearn.model_selection import StratifiedGroupKFold

    folds = StratifiedGroupKFold(num_folds, shuffle=True, random_state=draw.seed)
    with warnings.catch_warnings():
        # scikit-learn warns of classes that have fewer images than there are folds.
        warnings.simplefilter("ignore", UserWarning)
        try:
            parts = folds.split(positions, labels[positions], groups[positions])
            return [positions[fold] for _, fold in parts]
        except ValueError as error:
            raise UserError(
                f"{draw.text} does not fit the {len(np.unique(groups[positions]))} groups: {error}."
            ) from None


def _draw_per_class(order: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """Draw from each class in proportion (largest remainder), but leave one image in each class.

    Args:
        order: positions in random order.
    """
    _, first_seen, class_numbers, sizes = np.unique(
        labels[order], return_index=True, return_inverse=True, return_counts=True
    )
    most_chosen = sizes - 1
    shares = sizes * count / len(order)
    chosen = np.minimum(np.floor(shares).astype(int), most_chosen)

    # `first_seen` breaks ties at random, because the order is random.
    for number in np.lexsort((first_seen, chosen - shares)):
        if chosen.sum() < count and chosen[number] < most_chosen[number]:
            chosen[number] += 1

    # A class with a single image gives none. The largest classes give more for it.
    while chosen.sum() < count and (chosen < most_chosen).any():
        chosen[np.argmax(most_chosen - chosen)] += 1

    by_class = np.argsort(class_numbers, kind="stable")
    rank_in_class = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[by_class[rank_in_class < np.repeat(chosen, sizes)]]
