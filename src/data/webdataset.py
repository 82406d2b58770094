"""Images in a few large files: the base of such data modules, and tar files as WebDataset has them."""

import json
import os
import re
import tarfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.decoding import CorruptImage, is_image, progress
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLIT_OF, ImageList, Item, LeftOut, group_of, local_root
from lockstep.data.node_cache import Content, cached, file_identity
from lockstep.runs.errors import UserError


class ShardedDataModule(ListedDataModule):
    """A subclass reads what one file holds; that is kept in the node's cache.

    Args:
        root: a folder that holds the files at any depth, or one file.
        train: pattern, with * and ?, of the paths of files to train on; None: by names such as train-0 or training/0.
            Where no file is of any split, all train.
        val, test: likewise.
        options: as of ListedDataModule.
    """

    suffix: str
    label_columns: Sequence[str] = ()  # with several labels, their names

    def __init__(
        self, *, root: str | Path | None = None, train: str | None = None, val: str | None = None,
        test: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self._root = local_root(root, f"a folder with {self.suffix} files")
        self._patterns = (train, val, test)

    def read_shard(self, path: Path, folder: Path) -> Content:
        """Return what a file holds, as JSON values.

        items: for each image its name within the file, its label (text, or a list of numbers), first byte, size, and
        group if `group` is a column, else None; left_out; data: the file in `folder` that holds the images' bytes, None
        for `path` itself.

        Args:
            folder: of the cache, for encoded images that cannot be read in place.
        Raises:
            CorruptImage: the file is cut off or damaged.
            UserError: it is intact, and not as the options say.
        """
        raise NotImplementedError

    def shard_options(self) -> list[Any]:
        """The options that `read_shard` depends on, as JSON values."""
        raise NotImplementedError

    def list_images(self) -> ImageList:
        left_out: LeftOut = {}
        shards = self._find(left_out)
        folder = self._root if self._root.is_dir() else self._root.parent
        items: list[Item] = []
        with progress(f"Reading what {len(shards)} files hold", len(shards)) as advance:
            for path, split in shards:
                title, identity = str(path.relative_to(folder)), file_identity(path)
                kept = self.cache_folder([identity, self.shard_options()])
                try:
                    shard = cached(kept, partial(self.read_shard, path))
                except CorruptImage as error:
                    if not self._skip_corrupt:
                        raise error.refusal() from None
                    left_out.setdefault("damaged files", []).append(str(error))
                    continue
                file = str(kept / shard["data"] if shard["data"] else path)
                for name, label, start, size, group in shard["items"]:
                    group = group_of(self.group, name) if self.group and group is None else group
                    items.append(Item(f"{title}: {name}", label, split, size, identity[2], group, file, start))
                for reason, names in shard["left_out"].items():
                    left_out.setdefault(reason, []).extend(f"{title}: {name}" for name in names)
                advance(1)
        return ImageList(folder, items, left_out=left_out, target=self.target, label_columns=self.label_columns)

    def _find(self, left_out: LeftOut) -> list[tuple[Path, int]]:
        """Return the files with their splits, in the order of their paths."""
        if self._root.is_file() and self._root.suffix.lower() == self.suffix:
            return [(self._root, 0)]
        found = (path.relative_to(self._root) for path in self._root.rglob("*") if path.suffix.lower() == self.suffix)
        paths = sorted(path for path in found if not any(part.startswith(".") for part in path.parts))
        if not paths:
            raise UserError(f"data.root={self._root} holds no {self.suffix} file. Pass the folder that contains them.")
        splits = {path: self._split_of(path) for path in paths}
        taken = [(self._root / path, split) for path, split in splits.items() if split is not None]
        if taken and len(taken) < len(paths):
            left_out[f"{self.suffix} files of no split"] = [str(path) for path in paths if splits[path] is None]
        return taken or [(self._root / path, 0) for path in paths]

    def _split_of(self, path: Path) -> int | None:
        for split, pattern in enumerate(self._patterns):
            if pattern and fnmatchcase(str(path).lower(), pattern.lower()):
                return split
        for part in reversed(path.parts):  # the file's own name first
            for word in re.split("[^a-z]+", part.lower()):
                found = SPLIT_OF.get(re.sub("(set|data|split)$", "", word))
                if found is not None and self._patterns[found] is None:
                    return found
        return None


class WebDatasetDataModule(ShardedDataModule):
    """Uncompressed tar files with key.jpg beside key.cls or key.json, which are read in place.

    Args:
        label_field: the field of key.json that holds the label; None: key.cls holds it.
        options: as of ShardedDataModule.
    """

    suffix = ".tar"

    def __init__(self, *, label_field: str | None = None, name: str = "webdataset", **options: Any) -> None:
        super().__init__(name=name, **options)
        self._label_field, self._label_suffix = label_field, ".json" if label_field else ".cls"

    def shard_options(self) -> list[Any]:
        return [self._label_field]

    def read_shard(self, path: Path, folder: Path) -> Content:
        images: list[tarfile.TarInfo] = []
        labels: dict[str, str] = {}  # by key
        left_out: LeftOut = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    key, ending = os.path.splitext(member.name)
                    hidden = os.path.basename(member.name).startswith(".")
                    if not member.isfile():
                        continue
                    if ending.lower() == self._label_suffix and not hidden:
                        labels[key] = self._read_label(path, archive, member)
                    elif is_image(member.name) and not hidden:
                        images.append(member)
                    else:
                        reason = "hidden members" if hidden else f"{ending.lower() or 'nameless'} members"
                        left_out.setdefault(reason, []).append(member.name)
                if archive.offset > path.stat().st_size:
                    raise CorruptImage(f"{path} is cut off")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise CorruptImage(f"{path} is cut off or no uncompressed tar file ({error})") from None
        items = []
        for member in images:  # the label has the image's name up to its last dot, else up to its first
            where, base = os.path.split(member.name)
            keys = os.path.splitext(member.name)[0], os.path.join(where, base.partition(".")[0])
            if not (found := [labels[key] for key in keys if key in labels]):
                hint = "" if self._label_field else " (where a key.json holds the label: data.label_field=FIELD)"
                raise UserError(f"{path}: {member.name} has no {self._label_suffix} file beside it{hint}.")
            items.append((member.name, found[0], member.offset_data, member.size, None))
        return {"items": items, "left_out": left_out, "data": None}

    def _read_label(self, path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
        file = archive.extractfile(member)
        data = file.read() if file else b""
        try:
            value = data.decode().strip() if self._label_field is None else json.loads(data)[self._label_field]
            if value == "" or not isinstance(value, str | int | float):
                raise ValueError(f"{str(value)[:50]!r} is neither text nor a number")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: {member.name} holds no label ({type(error).__name__}: {error}).") from None
        return str(value)
