"""Decide which folders below data.root are splits and which are classes.

`find_split_folders` tries several readings in turn. With data.splits=auto the first row that fits
counts:

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

The rows from photos/{cat,dog} on hold for class folders only, not for images/ beside masks/. With
data.splits=true, train/ is a split in rows three and four, and a layout without splits is refused.
With data.splits=false all folders are classes.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lockstep.data.listing import SPLIT_OF, TRAIN, Item, parse_splits
from lockstep.process.errors import UserError
from lockstep.process.output import join_names

# A folder named train means one of these.
SPLIT = "split"
CLASS = "class"
UNCLEAR = "unclear"


@dataclass
class FolderLayout:
    """The folders in a root, and what lies in each.

    Attributes:
        subfolders: the folders in the root, with the names of the folders within each.
        folders_with_images: the folders in the root that hold images at any depth.
        folders_with_direct_images: the folders in the root that hold images beside their folders.
    """

    root: Path
    subfolders: dict[str, list[str]]
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

    def have_same_folders(self, names: list[str]) -> bool:
        """Return whether two or more folders contain the same two or more folders and no other."""
        shared = self.shared_folders(names)
        return len(shared) > 1 and all(set(self.subfolders[name]) == shared for name in names)

    def shared_folders(self, names: Iterable[str]) -> set[str]:
        """Return the names of the folders that all of two or more folders contain.

        If one of these holds images beside its folders, nothing is returned.
        """
        names = list(names)
        if len(names) < 2 or not self.folders_with_direct_images.isdisjoint(names):
            return set()
        return set.intersection(*(set(self.subfolders[name]) for name in names))


class SplitFolders(NamedTuple):
    """The folders in the root that are splits.

    Attributes:
        splits: the split of each such folder; {}: all folders in the root are classes.
        warning: a sentence if the layout can be read in another way; "": it cannot.
    """

    splits: dict[str, int]
    warning: str = ""


def find_split_folders(
    layout: FolderLayout, option: bool | str, *, holds_classes: bool
) -> SplitFolders:
    """Return the folders in the root that are splits, by the first reading that fits.

    Args:
        option: data.splits; auto, or whether the source has splits.
        holds_classes: the folders are classes, and not images/ and masks/.
    Raises:
        UserError: the layout can be read in two ways.
    """
    if option is False:
        return SplitFolders({})
    # A reading that does not fit returns None. One that refuses the layout raises UserError.
    readings: list[Callable[[FolderLayout], SplitFolders | None]] = [
        _read_splits_beside_train if option is True else _read_train,
        _refuse_folder_around_splits,
        _read_splits_by_words,
        _refuse_splits_within_classes,
        _refuse_test_without_train,
    ]
    if option is True:
        readings.append(_refuse_root_without_train)
    if holds_classes:
        readings += [_refuse_folder_around_classes, _read_same_folders]
    for read in readings:
        split_folders = read(layout)
        if split_folders is not None:
            return split_folders
    return SplitFolders({})


def _read_splits_beside_train(layout: FolderLayout) -> SplitFolders | None:
    """Return the splits by their very names, and others beside them whose names contain one.

    A folder named train that holds images and no folders is a class: pictures of trains.
    """
    splits = {
        name: SPLIT_OF[name.lower()]
        for name, subfolders in layout.subfolders.items()
        if subfolders and name.lower() in SPLIT_OF
    }
    if TRAIN not in splits.values() and len(splits) < len(layout.subfolders):
        return None
    named_splits = set(splits.values())
    for name, subfolders in layout.subfolders.items():
        parts = parse_splits(name)
        if subfolders and name not in splits and parts and parts[0] not in named_splits:
            splits[name] = parts[0]
    return SplitFolders(splits)


def _read_train(layout: FolderLayout) -> SplitFolders | None:
    """Return the splits beside train/, or none if train/ is a class as in bus/, car/, train/.

    Raises:
        UserError: train/ may be a class or a split.
    """
    split_folders = _read_splits_beside_train(layout)
    if split_folders is None:
        return None
    rivals = _find_rivals_of_train(layout, split_folders.splits)
    train = next(iter(split_folders.splits))
    meaning = _interpret_train(layout, train, rivals)
    if meaning == UNCLEAR:
        raise UserError(
            f"{layout.root}: {train}/ may be the training images or a class beside "
            f"{_list_names(rivals)}. Give data.splits=true to train on the classes within "
            f"{train}/, or data.splits=false if {train} is a class."
        )
    if meaning == SPLIT:
        return split_folders
    return SplitFolders(
        {},
        f"{train}/ counts as a class beside {_list_names(rivals)}, because no other folder is a "
        f"split. Give data.splits=true to train on the classes within {train}/.",
    )


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
    with_folders = [name for name in rivals if layout.subfolders[name]]
    if not with_folders and len(rivals) < 2:
        return SPLIT
    classes = set(layout.subfolders[train])
    if any(classes.intersection(layout.subfolders[name]) for name in with_folders):
        # One folder beside it has more images of the same classes, as extra/. Several folders
        # with equal contents may also be classes that have a folder for each day.
        have_same = len(rivals) > 1 and layout.have_same_folders([train, *rivals])
        return UNCLEAR if have_same else SPLIT
    all_have_folders = len(rivals) > 1 and len(with_folders) == len(rivals)
    return CLASS if all_have_folders else UNCLEAR


def _refuse_folder_around_splits(layout: FolderLayout) -> None:
    """Refuse a data.root that is one folder too high: photos/train."""
    if len(layout.subfolders) > 1:
        return
    for name, subfolders in layout.subfolders.items():
        if any(SPLIT_OF.get(folder.lower()) == TRAIN for folder in subfolders):
            raise UserError(
                f"{layout.root} holds only {name}/ with {', '.join(sorted(subfolders))}: "
                f"add /{name} to data.root."
            )


def _read_splits_by_words(layout: FolderLayout) -> SplitFolders | None:
    """Return the splits where all names say them in words, as train_images/ and test_images/."""
    parts = {name: parse_splits(name) for name in layout.subfolders}
    if not all(parts.values()):
        return None
    splits = {name: parts[name][0] for name in parts if layout.subfolders[name]}
    if splits:
        return SplitFolders(splits)
    names_train = any(part[0] == TRAIN for part in parts.values())
    # Without a folder to train on they are classes, as test_tube/ and dev_board/.
    if len(parts) == 1 or not names_train:
        return None
    raise UserError(
        f"{layout.root}: {', '.join(sorted(parts))} hold no class folders: make train/<class>/ "
        "there, or use data=csv. If they are the classes, give data.splits=false."
    )


def _refuse_splits_within_classes(layout: FolderLayout) -> None:
    """Refuse cat/{train,test} beside dog/{train,test}."""
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
    """Refuse a folder named test with classes that are in all other folders too."""
    for name, subfolders in layout.subfolders.items():
        if name.lower() not in SPLIT_OF or not subfolders:
            continue
        if all(set(subfolders).intersection(folders) for folders in layout.subfolders.values()):
            raise UserError(
                f"{layout.root}: {name}/ is a split and no folder beside it is named train: rename "
                "one, or give data.splits=false if all are classes."
            )


def _refuse_root_without_train(layout: FolderLayout) -> None:
    raise UserError(
        f"data.splits=true, but {layout.root} has no folder train/ with class folders: rename "
        "the folder of the training images to train/, or leave data.splits out."
    )


def _refuse_folder_around_classes(layout: FolderLayout) -> None:
    """Refuse a data.root that is one folder too high: photos/{cat,dog}."""
    for name, subfolders in layout.subfolders.items():
        is_alone = len(layout.subfolders) == 1 and name not in layout.folders_with_direct_images
        if is_alone and len(subfolders) > 1:
            raise UserError(
                f"data.root={layout.root} holds a single class, {name}/, with the folders "
                f"{_list_names(subfolders)}. If these are the classes, give "
                f"data.root={layout.root / name}. If {name} is the only class, give "
                "data.splits=false."
            )


def _read_same_folders(layout: FolderLayout) -> SplitFolders | None:
    """Return no splits, with a warning, if the classes share most of the folders inside them.

    Raises:
        UserError: a name contains that of a split. A split may lack some of the classes.
    """
    names = sorted(layout.subfolders)
    named_splits = [name for name in names if parse_splits(name)]
    if layout.shared_folders(named_splits):
        # Another folder beside them, as unsorted/, makes them no classes.
        names = named_splits
    shared = layout.shared_folders(names)
    most = max((len(layout.subfolders[name]) for name in names), default=0)
    if len(shared) < 2 or 2 * len(shared) < most:
        return None
    folder_names = _list_names(shared)
    if any(parse_splits(name) for name in names):
        raise UserError(
            f"{layout.root}: {_list_names(names)} each hold the folders {folder_names}, as splits "
            "do. Rename them train/, val/ and test/, or give data.splits=false if they are the "
            "classes."
        )
    return SplitFolders(
        {},
        f"{_list_names(names)} count as classes, and each holds the folders {folder_names}. "
        "If they are splits, rename them train/, val/ and test/. data.splits=false says that they "
        "are classes.",
    )


def _list_names(names: Iterable[str]) -> str:
    return join_names(sorted(names), 10)
