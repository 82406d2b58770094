"""Images in tar files, as WebDataset has them: key.jpg beside key.cls or key.json. They are read in place."""

import json
import os
import tarfile
from pathlib import Path
from typing import Any

from data.shards import ShardedDataModule
from lockstep.data.decoding import CorruptImage, is_image
from lockstep.data.node_cache import Content
from lockstep.runs.errors import UserError

MAX_LABEL_BYTES = 2**16  # of a .cls or .json file


class WebDatasetDataModule(ShardedDataModule):
    """Uncompressed tar files.

    Args:
        label_field: the field of key.json that holds the label; None: key.cls holds it.
        options: as of ShardedDataModule.
    """

    suffix, kind = ".tar", "webdataset"

    def __init__(self, *, label_field: str | None = None, name: str = "webdataset", **options: Any) -> None:
        super().__init__(name=name, **options)
        self._label_field = label_field

    def shard_options(self) -> list[Any]:
        return [self._label_field]

    def read_shard(self, path: Path, folder: Path) -> Content:
        images: list[tarfile.TarInfo] = []
        labels: dict[str, str] = {}  # by key
        left_out: dict[str, list[str]] = {}
        wanted = ".cls" if self._label_field is None else ".json"
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    key, ending = os.path.splitext(member.name)
                    hidden = os.path.basename(member.name).startswith(".")
                    if not member.isfile():
                        continue
                    if ending.lower() == wanted and not hidden:
                        labels[key] = self._label(path, archive, member)
                    elif is_image(member.name) and not hidden:
                        images.append(member)
                    else:
                        reason = "hidden members" if hidden else f"{ending.lower() or 'nameless'} members"
                        left_out.setdefault(reason, []).append(member.name)
                if archive.offset > path.stat().st_size:
                    raise CorruptImage("is cut off")
        except (tarfile.TarError, EOFError) as error:
            raise CorruptImage(f"is cut off or no uncompressed tar file ({error})") from None
        except OSError as error:
            raise CorruptImage(f"cannot be read ({error.strerror})") from None
        items = [
            (member.name, self._label_of(path, member.name, labels), member.offset_data, member.size, None)
            for member in images
        ]
        return {"items": items, "left_out": left_out, "data": None}

    def _label_of(self, path: Path, name: str, labels: dict[str, str]) -> str:
        """The label beside an image: of its name up to the last dot, else up to the first."""
        folder, base = os.path.split(name)
        for key in (os.path.splitext(name)[0], os.path.join(folder, base.partition(".")[0])):
            if key in labels:
                return labels[key]
        other = "" if self._label_field else " (where a key.json holds the label: data.label_field=FIELD)"
        kind = ".json" if self._label_field else ".cls"
        raise UserError(f"{path}: {name} has no {kind} file beside it{other}.")

    def _label(self, path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
        if member.size > MAX_LABEL_BYTES:
            raise UserError(f"{path}: {member.name} has {member.size} bytes, too many for a label.")
        file = archive.extractfile(member)
        data = file.read() if file else b""
        try:
            value = data.decode().strip() if self._label_field is None else json.loads(data)[self._label_field]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: {member.name} holds no label ({type(error).__name__}: {error}).") from None
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise UserError(
                f"{path}: {member.name} holds no label: {str(value)[:50]!r} is no text and no whole number."
            )
        return str(value)
