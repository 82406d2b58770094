"""Images in a few large files: the base of such data modules, and WebDataset's tar files."""

import json
import os
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lockstep.data.decoding import SUFFIXES
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import TRAIN, ImageList, Item, LeftOut, files_below, group_of, local_root, splits_in
from lockstep.data.node_cache import Content, cached
from lockstep.runs.errors import UserError


class ShardedDataModule(ListedDataModule):
    """Images in shards; a subclass lists the content of a file. Its yaml explains the options."""

    suffix: str
    label_columns: Sequence[str] = ()  # with several labels, their names
    shard_options: Sequence[Any] = ()  # what `read_shard` depends on, as JSON values

    def __init__(self, *, root: str | Path | None = None, **options: Any) -> None:
        super().__init__(**options)
        if str(root).startswith("hf://"):
            root = from_hub(str(root), self.suffix, self.cache_dir / "hub")
        self._root = local_root(root, f"a folder with {self.suffix} files")

    def read_shard(self, path: Path, folder: Path) -> Content:
        """Return what a file holds, as JSON values.

        items: for each image its name in the file, its label (text, or a list of numbers), first byte, size, and group
        if `group` is a column, else None; left_out; data: the file that it wrote into `folder`, of the cache, with
        images that cannot be read in place, else None; splits: those of images in a file to train on, if a column says.
        """
        raise NotImplementedError

    def list_images(self) -> ImageList:
        left_out: LeftOut = {}
        shards, items = self._find(left_out), []
        folder = self._root if self._root.is_dir() else self._root.parent
        for name, split in tqdm(shards.items(), f"Reading what {len(shards)} files hold", disable=None):
            stat = os.stat(path := folder / name)
            kept = self.cache_folder([[str(path), stat.st_size, stat.st_mtime_ns], self.shard_options])
            shard = cached(kept, partial(self.read_shard, path))
            file = str(kept / shard["data"] if shard["data"] else path)
            for i, (inner, label, start, size, group) in enumerate(shard["items"]):
                group = group_of(self.group, inner) if self.group and group is None else group
                part = shard["splits"][i] if split == TRAIN and shard["splits"] else split
                items.append(Item(f"{name}: {inner}", label, part, size, stat.st_mtime_ns, group, file, start))
            for reason, names in shard["left_out"].items():
                left_out.setdefault(reason, []).extend(f"{name}: {inner}" for inner in names)
        if self.splits_option is True and all(item.split == TRAIN for item in items):
            raise UserError(
                f"data.splits=true, but no file in {self._root} is named as a split: rename the "
                "files train-…, val-… and test-…, or leave data.splits out."
            )
        return ImageList(
            folder,
            items,
            left_out=left_out,
            target=self.target,
            label_columns=self.label_columns,
            unknown=self.unknown,
        )

    def _find(self, left_out: LeftOut) -> dict[str, int]:
        """Return the split of each file by its path, as its name or else its folders say."""
        if self._root.is_file() and self._root.suffix.lower() == self.suffix:
            return {self._root.name: TRAIN}
        files = files_below(self._root, {}, suffixes={self.suffix}) if self._root.is_dir() else []
        found = [file.name for file in files]
        if not found:
            raise UserError(f"data.root={self._root} holds no {self.suffix} file. Pass the folder that contains them.")
        splits = {name: splits_in("/".join(reversed(Path(name).parts))) for name in found}
        if self.splits_option is False or not any(splits.values()):
            return dict.fromkeys(found, TRAIN)
        if others := [name for name in found if not splits[name]]:
            left_out[f"{self.suffix} files of no split"] = others
        return {name: words[0] for name, words in splits.items() if words}


def from_hub(address: str, suffix: str, cache: Path) -> Path:
    """Copy the files of hf://datasets/OWNER/NAME[@REVISION][/FOLDER], and return the folder of the copy."""
    from huggingface_hub import snapshot_download

    owner, name, *inner = f"{address.removeprefix('hf://datasets/').strip('/')}/".split("/")
    name, _, revision = name.partition("@")
    try:
        copy = snapshot_download(
            f"{owner}/{name}", repo_type="dataset", revision=revision or None, cache_dir=cache,
            allow_patterns="/".join([*inner[:-1], f"*{suffix}"]),
        )  # fmt: skip
    except Exception as error:  # of the network, the hub and its authentication
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"data.root={address} cannot be fetched ({type(error).__name__}: {reason}).") from None
    return Path(copy, *inner)


class WebDatasetDataModule(ShardedDataModule):
    """Uncompressed tar files with key.jpg beside key.cls or key.json, which are read in place."""

    suffix = ".tar"

    def __init__(self, *, label_field: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._label_field, self.shard_options = label_field, [label_field]

    def read_shard(self, path: Path, folder: Path) -> Content:
        field, images, labels, left_out = self._label_field, [], {}, LeftOut()
        label_suffix = ".json" if field else ".cls"
        try:
            with tarfile.open(path, "r:") as archive:
                for member in filter(tarfile.TarInfo.isfile, archive):
                    key, ending = os.path.splitext(member.name)
                    hidden = os.path.basename(member.name).startswith(".")
                    if ending.lower() == label_suffix and not hidden:
                        labels[key] = archive.extractfile(member).read()
                    elif ending.lower() in SUFFIXES and not hidden:
                        images.append(member)
                    else:
                        reason = "hidden members" if hidden else f"{ending.lower() or 'nameless'} members"
                        left_out.setdefault(reason, []).append(member.name)
                if archive.offset > path.stat().st_size:
                    raise EOFError("it ends within a member")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(f"{path} is cut off or no uncompressed tar file ({error}): repair or remove it.") from None
        items, used = [], dict[str, str]()
        for member in images:  # the label has the image's name up to its last dot, else up to its first
            where, base = os.path.split(member.name)
            keys = os.path.splitext(member.name)[0], os.path.join(where, base.partition(".")[0])
            if not (found := [key for key in keys if key in labels]):
                hint = "" if field else " (where a key.json holds the label: data.label_field=FIELD)"
                raise UserError(f"{path}: {member.name} has no {label_suffix} file beside it{hint}.")
            if (other := used.setdefault(found[0], member.name)) != member.name:
                raise UserError(f"{path}: {other} and {member.name} have one label: keep one image for each key.")
            try:
                label = json.loads(labels[found[0]])[field] if field else labels[found[0]].decode().strip()
                if label == "" or not isinstance(label, str | int | float):
                    raise ValueError(f"{str(label)[:50]!r} is neither text nor a number")
            except (ValueError, KeyError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise UserError(f"{path}: {found[0]}{label_suffix} holds no label ({reason}).") from None
            items.append((member.name, str(label), member.offset_data, member.size, None))
        return {"items": items, "data": None, "left_out": left_out, "splits": []}
