"""Decide which folders below data.root are splits and which are classes.

With data.splits=auto the first row that fits counts:

    folders in data.root, with some of those within     what they are
    train/{cat,dog}, val/cat, photos_test/dog           splits
    train/{cat,dog}, extra/cat                          train/ is a split, extra/ is left out
    bus/city, car/suv, train/fast                       classes, with a warning
    train/{cat,dog}, bus, car                           refused: train/ may be either
    photos/train                                        refused: the root is one folder too high
    train_images/{cat,dog}, test_images/cat             splits
    train_images, test_images                           refused: no folders within
    test_tube, dev_board                                classes, as none is to train on
    cat/{train,test}, dog/{train,test}                  refused: the splits lie within
    test/{cat,dog}, photos/{cat,dog}                    refused: none is named train
    photos/{cat,dog}                                    refused: the root is one folder too high
    tuning/{cat,dog}, training_images/{cat,dog}         refused: they may be splits
    trainset/{cat,dog}, testset/{cat,dog}, unsorted     refused: they may be splits
    fox/{day,night}, owl/{day,night}                    classes, with a warning
    all others                                          classes

The rows from photos/{cat,dog} on hold for classes alone, and not for images/ beside masks/.
data.splits=true reads train/ as a split in the rows three and four, and refuses what would be
classes. data.splits=false reads all as classes.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.data.listing import SPLIT_OF, TRAIN, Item, parse_splits
from lockstep.process.errors import UserError
from lockstep.process.output import join_names

AUTO = "auto"
# A folder named train may be one of these.
SPLIT = "split"
CLASS = "class"
UNCLEAR = "unclear"


@dataclass
class FolderLayout:
    """The folders in a root, and what lies in each."""

    root: Path
    subfolders: dict[str, list[str]]  # the folders in the root, with the folders within each
    # The folders in the root that have images at any depth, and those that have some directly.
    folders_with_images: set[str] = field(default_factory=set)
    folders_with_direct_images: set[str] = field(default_factory=set)

    @classmethod
    def from_listing(
        cls, root: Path, folders: Iterable[str], images: Iterable[Item]
    ) -> "FolderLayout":
        """Return the layout of folders and images that are named relative to the root."""
        parts = [name.split("/") for name in folders]
        layout = cls(root, {names[0]: [] for names in parts if len(names) == 1})
        for names in parts:
            if len(names) == 2:
                layout.subfolders[names[0]].append(names[1])
        for image in images:
            top, _, rest = image.name.partition("/")
            if rest:
                layout.folders_with_images.add(top)
            if rest and "/" not in rest:
                layout.folders_with_direct_images.add(top)
        return layout

    def have_same_folders(self, names: Iterable[str]) -> bool:
        """Return whether two or more folders each contain the same two or more folders alone."""
        names = list(names)
        shared = self.shared_folders(names)
        return len(shared) > 1 and all(set(self.subfolders[name]) == shared for name in names)

    def shared_folders(self, names: Iterable[str]) -> set[str]:
        """Return the folders that are in each of two or more folders without images beside them."""
        names = list(names)
        if len(names) < 2 or not self.folders_with_direct_images.isdisjoint(names):
            return set()
        return set.intersection(*(set(self.subfolders[name]) for name in names))


def split_folders(
    layout: FolderLayout, option: bool | str, warnings: list[str], *, holds_classes: bool
) -> dict[str, int]:
    """Return the split of each folder in the root that is one; {} where all are classes.

    Args:
        option: data.splits; auto, or whether the source has splits.
        warnings: gets sentences where another reading is possible.
        holds_classes: the folders are classes, and not images/ and masks/.
    Raises:
        UserError: the layout can be read in two ways.
    """
    if option is False:
        return {}
    splits = _find_splits(layout, option, warnings)
    if splits:
        return splits
    if option is True:
        raise UserError(
            f"data.splits=true, but {layout.root} has no folder train/ with class folders: rename "
            "the folder of the training images to train/, or leave data.splits out."
        )
    if holds_classes:
        _refuse_folder_around_classes(layout)
        _check_same_folders(layout, warnings)
    return {}


def _find_splits(layout: FolderLayout, option: bool | str, warnings: list[str]) -> dict[str, int]:
    """Return the split of each folder that is named as one; {} where all may be classes."""
    splits = _find_named_splits(layout)
    if splits:
        is_class = option == AUTO and _is_class_named_train(layout, splits, warnings)
        return {} if is_class else splits
    _refuse_folder_around_splits(layout)
    if all(parse_splits(name) for name in layout.subfolders):
        return _find_splits_by_words(layout)
    _refuse_splits_within_classes(layout)
    _refuse_test_without_train(layout)
    return {}


def _find_named_splits(layout: FolderLayout) -> dict[str, int]:
    """Return the splits by their very names, and others beside them whose names contain one.

    A folder named train that holds images and no folders is a class: pictures of trains.
    """
    splits = {
        name: SPLIT_OF[name.lower()]
        for name, subfolders in layout.subfolders.items()
        if subfolders and name.lower() in SPLIT_OF
    }
    if TRAIN not in splits.values() and len(splits) < len(layout.subfolders):
        return {}
    named_splits = set(splits.values())
    for name, subfolders in layout.subfolders.items():
        parts = parse_splits(name)
        if subfolders and name not in splits and parts and parts[0] not in named_splits:
            splits[name] = parts[0]
    return splits


def _is_class_named_train(
    layout: FolderLayout, splits: dict[str, int], warnings: list[str]
) -> bool:
    """Return whether train/ is a class like the folders beside it, as in bus/, car/, train/.

    Raises:
        UserError: it may be a class or a split.
    """
    rivals = _find_rivals_of_train(layout, splits)
    train = next(iter(splits))
    reading = _interpret_train(layout, train, rivals)
    if reading == UNCLEAR:
        raise UserError(
            f"{layout.root}: {train}/ may be the training images or a class beside "
            f"{_list_names(rivals)}. Give data.splits=true to train on the classes within "
            f"{train}/, or data.splits=false if {train} is a class."
        )
    if reading == CLASS:
        warnings.append(
            f"{train}/ counts as a class beside {_list_names(rivals)}, because no other folder is "
            f"a split. Give data.splits=true to train on the classes within {train}/."
        )
    return reading == CLASS


def _find_rivals_of_train(layout: FolderLayout, splits: dict[str, int]) -> list[str]:
    """Return the folders with images beside train/, where no other folder is named as a split."""
    rest = [name for name in layout.subfolders if name not in splits]
    if len(splits) > 1 or any(parse_splits(name) for name in rest):
        return []
    return [name for name in rest if name in layout.folders_with_images]


def _interpret_train(layout: FolderLayout, train: str, rivals: list[str]) -> str:
    """Return SPLIT, CLASS or UNCLEAR for the folder `train`.

    Args:
        rivals: the folders with images beside it.
    """
    nested = [name for name in rivals if layout.subfolders[name]]
    if not nested and len(rivals) < 2:
        return SPLIT
    classes = set(layout.subfolders[train])
    if any(classes.intersection(layout.subfolders[name]) for name in nested):
        # More images of the same classes, as in extra/. Equal contents of several folders are
        # also what classes with one folder for each day have.
        have_same = len(rivals) > 1 and layout.have_same_folders([train, *rivals])
        return UNCLEAR if have_same else SPLIT
    are_all_nested = len(rivals) > 1 and len(nested) == len(rivals)
    return CLASS if are_all_nested else UNCLEAR


def _refuse_folder_around_splits(layout: FolderLayout) -> None:
    if len(layout.subfolders) > 1:
        return
    for name, subfolders in layout.subfolders.items():
        if any(SPLIT_OF.get(folder.lower()) == TRAIN for folder in subfolders):
            raise UserError(
                f"{layout.root} holds only {name}/ with {', '.join(sorted(subfolders))}: "
                f"add /{name} to data.root."
            )


def _find_splits_by_words(layout: FolderLayout) -> dict[str, int]:
    """Return the splits where words of all names say them, as train_images/ and test_images/."""
    splits = {name: parse_splits(name)[0] for name in layout.subfolders}
    if len(layout.subfolders) == 1 or any(layout.subfolders.values()):
        return {name: split for name, split in splits.items() if layout.subfolders[name]}
    if TRAIN not in splits.values():  # classes, as test_tube/ and dev_board/
        return {}
    raise UserError(
        f"{layout.root}: {', '.join(sorted(splits))} hold no class folders: make train/<class>/ "
        "there, or use data=csv. If they are the classes, give data.splits=false."
    )


def _refuse_splits_within_classes(layout: FolderLayout) -> None:
    folders = itertools.chain.from_iterable(layout.subfolders.values())
    inner_names = {name.lower() for name in folders}
    if inner_names and all(layout.subfolders.values()) and inner_names <= SPLIT_OF.keys():
        names = sorted(layout.subfolders)
        part = min(inner_names)
        raise UserError(
            f"{layout.root}: the splits lie within {', '.join(names)}: move {names[0]}/{part} to "
            f"{part}/{names[0]} and so on."
        )


def _refuse_test_without_train(layout: FolderLayout) -> None:
    for name, subfolders in layout.subfolders.items():
        if name.lower() not in SPLIT_OF or not subfolders:
            continue
        if all(set(subfolders).intersection(folders) for folders in layout.subfolders.values()):
            raise UserError(
                f"{layout.root}: {name}/ is a split and no folder beside it is named train: rename "
                "one, or give data.splits=false if all are classes."
            )


def _refuse_folder_around_classes(layout: FolderLayout) -> None:
    """Refuse a data.root that is one folder too high."""
    for name, subfolders in layout.subfolders.items():
        is_alone = len(layout.subfolders) == 1 and name not in layout.folders_with_direct_images
        if is_alone and len(subfolders) > 1:
            raise UserError(
                f"data.root={layout.root} holds a single class, {name}/, with the folders "
                f"{_list_names(subfolders)}. If these are the classes, give "
                f"data.root={layout.root / name}. If {name} is the only class, give "
                "data.splits=false."
            )


def _check_same_folders(layout: FolderLayout, warnings: list[str]) -> None:
    """Refuse, or report, folders that share the folders inside, as splits do.

    A split may lack some of the classes: most of the folders are enough.
    """
    names = sorted(layout.subfolders)
    named_splits = [name for name in names if parse_splits(name)]
    if layout.shared_folders(named_splits):
        # Another folder beside them, as unsorted/, makes them no classes.
        names = named_splits
    shared = layout.shared_folders(names)
    most = max((len(layout.subfolders[name]) for name in names), default=0)
    if len(shared) < 2 or 2 * len(shared) < most:
        return
    folder_names = _list_names(shared)
    if any(parse_splits(name) for name in names):
        raise UserError(
            f"{layout.root}: {_list_names(names)} each hold the folders {folder_names}, as splits "
            "do. Rename them train/, val/ and test/, or give data.splits=false if they are the "
            "classes."
        )
    warnings.append(
        f"{_list_names(names)} count as classes, and each holds the folders {folder_names}. "
        "If they are splits, rename them train/, val/ and test/. data.splits=false says that they "
        "are classes."
    )


def _list_names(names: Iterable[str]) -> str:
    return join_names(sorted(names), 10)
