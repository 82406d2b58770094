"""A download that is continued where it breaks off: appended until whole, verified, renamed. Imports no torch."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.runs.files import hash_of, sync_folder
from lockstep.runs.full_disk import full_disk_named

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Incoming:
    """What a source sends.

    start: the offset of the first byte: what was asked for, or 0 where the source begins anew.
    total: bytes of the whole file; None where the source does not say.
    """

    start: int
    total: int | None
    blocks: Iterator[bytes]


# Asked for the bytes from an offset on. Raises BrokenOff, also while the blocks are read, where trying again may help.
Source = Callable[[int], Incoming]


class BrokenOff(Exception):
    """The source ended early; what came so far stays and is continued."""


class Damaged(Exception):
    """What arrived is not what was asked for; nothing of it stays."""


def download(
    source: Source, part: Path, target: Path, *, digest: str, algorithm: str = "sha256", pauses_s: Sequence[float] = ()
) -> None:
    """Fetch `target` by way of `part`, which an earlier process may have left and a later one continues.

    Args:
        digest: what the whole must have, in hex.
        pauses_s: how long to wait when it breaks off; one more try without a new byte for each, then BrokenOff.
    Raises:
        Damaged: the whole has another digest, though it came in one go from its first byte.
        NoRoom, OSError: the part cannot be written.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    continued = size_of(part) > 0
    _append_until_whole(source, part, pauses_s)
    if hash_of(part, algorithm) != digest and continued:
        part.unlink()  # what lay here may be what is wrong
        _append_until_whole(source, part, pauses_s)
    found = hash_of(part, algorithm)
    if found != digest:
        part.unlink()
        raise Damaged(f"{algorithm.upper()} {found} instead of {digest}")
    os.replace(part, target)
    sync_folder(target.parent)


def _append_until_whole(source: Source, part: Path, pauses_s: Sequence[float]) -> None:
    vain = 0  # tries in a row that brought nothing
    while True:
        before = size_of(part)
        try:
            return _append(source, part)
        except BrokenOff as error:
            vain = 0 if size_of(part) > before else vain + 1
            if vain > len(pauses_s):
                raise
            pause_s = pauses_s[max(vain, 1) - 1] if pauses_s else 0.0
            log.info(f"{error}; {size_of(part)} bytes are here, going on in {pause_s:g} s.")
            time.sleep(pause_s)


def _append(source: Source, part: Path) -> None:
    incoming = source(size_of(part))
    with full_disk_named(part.parent), part.open("ab") as file:
        file.truncate(incoming.start)
        for block in incoming.blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        reached = os.fstat(file.fileno()).st_size
    if incoming.total is not None and reached < incoming.total:
        raise BrokenOff(f"the connection ended after {reached} of {incoming.total} bytes")


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
