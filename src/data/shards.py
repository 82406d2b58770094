"""The base of data modules whose images lie in a few large files: which split each file is of, and what it holds."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.decoding import CorruptImage, progress
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLIT_OF, SPLITS, ImageList, Item, LeftOut, group_of, local_root, suggestion
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
    kind: str
    label_columns: Sequence[str] = ()  # with several labels, their names

    def __init__(
        self, *, root: str | Path | None = None, train: str | None = None, val: str | None = None,
        test: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self._root = local_root(root, self.kind, f"FOLDER, with {self.suffix} files")
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
                        hint = "replace it, or leave it out with data.skip_corrupt=true"
                        raise UserError(f"{path} {error}: {hint}.") from None
                    left_out.setdefault("damaged files", []).append(f"{path} {error}")
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
            hint = suggestion(self._root, self.kind)
            raise UserError(f"data.root={self._root} holds no {self.suffix} file, as data={self.kind} reads.{hint}")
        splits = {path: self._split_of(path) for path in paths}
        taken = [(self._root / path, split) for path, split in splits.items() if split is not None]
        if taken and len(taken) < len(paths):
            left_out[f"{self.suffix} files of no split"] = [str(path) for path in paths if splits[path] is None]
        return taken or [(self._root / path, 0) for path in paths]

    def _split_of(self, path: Path) -> int | None:
        fits = [
            i for i, pattern in enumerate(self._patterns) if pattern and fnmatchcase(str(path).lower(), pattern.lower())
        ]
        if len(fits) > 1:
            both = " and ".join(f"data.{SPLITS[i]}={self._patterns[i]}" for i in fits)
            raise UserError(f"{self._root / path} fits {both}: give patterns of which one fits, or null.")
        for part in reversed(path.parts) if not fits else ():  # the file's own name first
            for word in re.split("[^a-z]+", part.lower()):
                split = SPLIT_OF.get(re.sub("(set|data|split)$", "", word))
                if split is not None and self._patterns[split] is None:
                    return split
        return fits[0] if fits else None
