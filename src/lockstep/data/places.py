"""Where encoded images lie: in files of their own, or as parts of large ones; arrays that all ranks of a node share."""

import errno
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Protocol

import numpy as np

from lockstep.data.image_tree import CorruptImage

NAMES = ("files", "titles", "etags", "members")
MARGIN_BYTES = 2**20  # of an encoded image, beside its pixels


class Names:
    """Many strings in one array of bytes: a million take no time to open, and workers copy none.

    Args:
        text: uint8, all of them behind one another, as the file system encodes them.
        ends: (n,) int64.
    """

    def __init__(self, text: np.ndarray, ends: np.ndarray) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, names: Sequence[str]) -> "Names":
        encoded = [os.fsencode(name) for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        first = int(self.ends[i - 1]) if i else 0
        return os.fsdecode(self.text[first : int(self.ends[i])].tobytes())

    def all(self) -> list[str]:
        text, ends = self.text.tobytes(), self.ends.tolist()
        return [os.fsdecode(text[first:end]) for first, end in zip([0, *ends], ends)]


Part = tuple[str, int, int, str]
"""Path, first byte, bytes, and the ETag of the object that the file is a copy of."""


class Remote(Protocol):
    """Reads from a bucket what of its copy is not on this disk (storage/remote_reads.py)."""

    def lacks(self, path: str) -> bool:
        """Whether the file is not on this disk yet."""

    def ahead(self, parts: Iterable[Part]) -> None:
        """Ask for them, some at a time, before they are read."""

    def read(self, part: Part) -> bytes: ...

    def rest(self) -> None:
        """End the threads of this process."""


class InBucket(Protocol):
    """What a data module is told of a root in a bucket; the root itself is the copy on this disk."""

    folder: Path
    reads: Remote

    def etags(self) -> Mapping[str, str]:
        """Of each object, by its name below `folder`."""

    def complete(self) -> None:
        """Return once the copy is whole."""

    def complete_beside(self) -> bool:
        """Make it whole in a process of its own, as far as there is room; True where it is whole already."""


@dataclass(frozen=True)
class Places:
    """n encoded images.

    folder: what `files` are relative to, where they are not absolute.
    titles: what each file is called, relative to the folder; empty where that is what `files` says.
    etags: of the object that each file is a copy of; empty where they are files of this disk's own.
    stats: (files, 2) int64, bytes and mtime (ns) of each file when it was listed.
    file: (n,) int64, which of `files`; start: (n,) int64, the first byte in it; size: (n,) int64, bytes.
    members: names within the file; empty where the file is the image.
    """

    folder: Path
    files: Names
    titles: Names
    etags: Names
    stats: np.ndarray
    file: np.ndarray
    start: np.ndarray
    size: np.ndarray
    members: Names

    @classmethod
    def of_files(cls, folder: Path, names: Sequence[str], stats: np.ndarray) -> "Places":
        """Each image a file of its own."""
        n = len(names)
        files, none, members = Names.of(names), Names.of([]), Names.of([""] * n)
        return cls(folder, files, none, none, stats, np.arange(n), np.zeros(n, np.int64), stats[:, 0], members)

    def of_objects(self, etags: Mapping[str, str], copy: Path) -> "Places":
        """The same as copies of objects.

        Args:
            etags: by names below the folder `copy`.
        """
        names = (os.path.relpath(self.folder / name, copy) for name in self.files.all())
        return replace(self, etags=Names.of([etags.get(name, "") for name in names]))

    @classmethod
    def kept(cls, kept: Path, folder: Path) -> "Places":
        """What `save` wrote into `kept`: mapped, not read."""

        def array(name: str) -> np.ndarray:
            return np.asarray(np.load(kept / f"{name}.npy", mmap_mode="r"))

        files, titles, etags, members = (Names(array(f"{name}_text"), array(f"{name}_ends")) for name in NAMES)
        return cls(folder, files, titles, etags, array("stats"), array("file"), array("start"), array("size"), members)

    def __len__(self) -> int:
        return len(self.file)

    def take(self, index: np.ndarray) -> "Places":
        """Some of the images, or all in another order."""
        members = self.members.all()
        return replace(
            self,
            file=self.file[index],
            start=self.start[index],
            size=self.size[index],
            members=Names.of([members[i] for i in index]),
        )

    def name(self, i: int) -> str:
        """For errors and lists: the file, and where it holds many, what the image is called in it."""
        path, member = self.folder / self._titles[int(self.file[i])], self.members[i]
        return f"{path}: {member}" if member else str(path)

    def relative_names(self) -> list[str]:
        """Of all images, independent of where their folder lies."""
        files, members = self._titles.all(), self.members.all()
        return [f"{files[f]}: {member}" if member else files[f] for f, member in zip(self.file.tolist(), members)]

    def ahead(self, positions: Iterable[int], remote: Remote) -> None:
        """Ask the bucket for those of these images that are not on this disk."""
        remote.ahead(self._part(i) for i in positions if remote.lacks(str(self._path(i))))

    def _part(self, i: int) -> Part:
        return str(self._path(i)), int(self.start[i]), int(self.size[i]), self.etags[int(self.file[i])]

    def open(self, i: int, max_pixels: int, remote: Remote | None = None) -> BinaryIO:
        """The bytes of one image.

        Args:
            remote: for a copy of a bucket that may not be whole.
        Raises:
            CorruptImage: they cannot be read, are more than an image of max_pixels can have, or its file is not as
                long as when it was listed.
            UserError, ConnectionError: as Remote.read.
        """
        size, listed = int(self.size[i]), int(self.stats[self.file[i], 0])
        if size > 8 * max_pixels + MARGIN_BYTES:  # of four channels with 16 bits
            raise CorruptImage(f"{self.name(i)} has {size} bytes, more than data.max_pixels={max_pixels} can need")
        if remote is not None and remote.lacks(str(self._path(i))):
            return io.BytesIO(remote.read(self._part(i)))
        try:
            with open(self._path(i), "rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != listed:
                    raise CorruptImage(f"{self._path(i)} has {found} bytes, and had {listed} when it was listed")
                file.seek(int(self.start[i]))
                return io.BytesIO(file.read(size))
        except OSError as error:
            raise CorruptImage(f"{self.name(i)} cannot be read ({error.strerror})") from None

    def as_listed(self) -> bool:
        """Whether every file has the size and the time that it had; looks at each, and opens none."""
        try:
            return bool(np.array_equal(stats_of(self.folder, self.files.all()), self.stats))
        except OSError:
            return False

    @property
    def _titles(self) -> Names:
        return self.titles if len(self.titles) else self.files

    def _path(self, i: int) -> Path:
        return self.folder / self.files[int(self.file[i])]

    def save(self, folder: Path) -> None:
        for name, array in self.arrays().items():
            np.save(folder / f"{name}.npy", array)

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "folder"}
        for name in NAMES:
            names = arrays.pop(name)
            arrays |= {f"{name}_text": names.text, f"{name}_ends": names.ends}
        return arrays


def stats_of(folder: Path, names: Sequence[str]) -> np.ndarray:
    """(n, 2) int64 bytes and mtime (ns).

    Raises:
        OSError: a file is missing or no plain one; its `filename` says which.
    """
    found = np.empty((len(names), 2), np.int64)
    for i, name in enumerate(names):
        stat = os.stat(path := os.path.join(folder, name))
        if not S_ISREG(stat.st_mode):  # to open a pipe would wait for ever
            raise OSError(errno.EINVAL, "it is no plain file", path)
        found[i] = stat.st_size, stat.st_mtime_ns
    return found
