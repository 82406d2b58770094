"""The base of data modules whose images lie in a few large files: which of them is for what, what each holds."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.image_list import SPLITS, ImageList, sorted_out
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.node_cache import file_identity
from lockstep.data.places import Names, Places, stats_of
from lockstep.data.progress import progress
from lockstep.data.root import on_this_disk, what_reads
from lockstep.runs.errors import UserError

log = logging.getLogger(__name__)


class BadShard(Exception):
    """A shard that cannot be read as a whole; says what is wrong with it, without its name."""


@dataclass(frozen=True)
class Shard:
    """What one file holds, in its order.

    file: where the images' bytes lie; words: the class of each; members: its name within the shard, for errors;
    start, size: (n,) int64 in bytes.
    """

    file: Path
    words: list[str]
    members: list[str]
    start: np.ndarray
    size: np.ndarray


class ShardedDataModule(ListedDataModule):
    """A subclass says how a shard is read (`read_shard`).

    Args:
        root: a folder of shards, at any depth, or one of them.
        train: pattern of the shards to train on, with * and ?, for paths below root; where no pattern fits, all are.
        val: likewise; None: no such shards, and images are drawn from those to train on.
        test: likewise.
        options: as of ListedDataModule.
    """

    suffix: str
    group: str

    def __init__(
        self,
        *,
        root: str | Path | None = None,
        train: str = "*train*",
        val: str | None = "*val*",
        test: str | None = "*test*",
        **options: Any,
    ) -> None:
        if not root:
            raise UserError(f"data={self.group} needs data.root=FOLDER, with {self.suffix} files.")
        super().__init__(root=on_this_disk(root), **options)
        self._patterns = (train, val, test)

    def read_shard(self, path: Path) -> Shard:
        """
        Raises:
            BadShard: it is cut off or damaged.
            UserError: it is whole, and not as the options say.
        """
        raise NotImplementedError

    def listed_from(self) -> list[Any]:
        self._shards = self._find()
        return [self._skip_corrupt, [[*file_identity(path), split] for path, split in self._shards]]

    def list_images(self) -> ImageList:
        skipped: list[str] = []
        read = list(self._read(skipped))
        shards = [shard for _, _, shard in read]
        if {split for _, split, _ in read} >= {0, 1} and not any(split == 2 for _, split, _ in read):
            raise UserError(
                f"{self._root} has shards to validate on and none to test on: data.test='{self._patterns[1]}' "
                "data.val=null tests on them, and draws the images to validate on from those to train on."
            )
        words = [word for shard in shards for word in shard.words]
        members = [name for shard in shards for name in shard.members]
        counts = [len(shard.words) for shard in shards]
        file = np.repeat(np.arange(len(shards)), counts)
        names, labels, parts, order = sorted_out(
            words,
            np.repeat([split for _, split, _ in read], counts).astype(np.int64),
            lambda i: f"{read[file[i]][0]}: {members[i]}",
            self._root,
            self.class_order(),
        )
        folder = self._root if self._root.is_dir() else self._root.parent
        files = [str(shard.file.absolute()) for shard in shards]
        places = Places(
            folder,
            Names.of(files),
            Names.of([str(path.relative_to(folder)) for path, _, _ in read]),
            Names.of([]),
            stats_of(folder, files),
            file,
            np.concatenate([shard.start for shard in shards]),
            np.concatenate([shard.size for shard in shards]),
            Names.of(members),
        )
        return ImageList(names, labels, parts, places.take(order), files, skipped)

    def class_order(self) -> list[str] | None:
        """After all shards were read; None: as people count."""
        return None

    def _find(self) -> list[tuple[Path, int]]:
        """The shards with their splits (0 train, 1 val, 2 test), in the order of their paths."""
        if self._root.is_file() and self._root.suffix == self.suffix:
            return [(self._root, 0)]
        paths = [path for path in self._root.rglob(f"*{self.suffix}") if path.is_file()]
        names = sorted(str(path.relative_to(self._root)) for path in paths)
        if not names:
            hint = what_reads(self._root, self.group)
            raise UserError(f"data.root={self._root} holds no {self.suffix} file, as data={self.group} reads.{hint}")
        splits = [self._split_of(name) for name in names]
        left_out = [name for name, split in zip(names, splits, strict=True) if split is None]
        if len(left_out) == len(names):
            return [(self._root / name, 0) for name in names]
        if left_out:
            log.warning(f"{len(left_out)} of {len(names)} shards are of no split, and left out: {left_out[0]}; …")
        return [(self._root / name, split) for name, split in zip(names, splits, strict=True) if split is not None]

    def _split_of(self, name: str) -> int | None:
        fits = [i for i, pattern in enumerate(self._patterns) if pattern and fnmatch(name, pattern)]
        if len(fits) > 1:
            both = " and ".join(f"data.{SPLITS[i]}={self._patterns[i]}" for i in fits)
            raise UserError(f"{self._root / name} fits {both}: give patterns of which one fits, or null.")
        return fits[0] if fits else None

    def _read(self, skipped: list[str]) -> Iterator[tuple[Path, int, Shard]]:
        with progress(f"Reading what {len(self._shards)} shards hold", len(self._shards)) as advance:
            for path, split in self._shards:
                try:
                    yield path, split, self.read_shard(path)
                except BadShard as error:
                    if not self._skip_corrupt:
                        hint = "fetch it again, or leave it out with data.skip_corrupt=true"
                        raise UserError(f"{path} {error}: {hint}.") from None
                    skipped.append(f"{path} {error}")
                    log.warning(f"Skipped a shard: {skipped[-1]}")
                advance(1)
