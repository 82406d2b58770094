"""Fetch a file from the first of several addresses that has it: continued after an interruption, verified, atomic."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from lockstep.data.node_cache import node_lock
from lockstep.data.progress import progress
from lockstep.runs import downloads
from lockstep.runs.downloads import BrokenOff, Damaged, Incoming
from lockstep.runs.errors import UserError

OFFLINE_OPTIONS = "data=digits and data=synthetic need no download"
CHUNK_BYTES = 2**20


def download(urls: Sequence[str], target: Path, *, md5: str, timeout_s: float = 20.0) -> Path:
    """`target`, fetched unless it is there; one process per node does it while others wait.

    A part that was left behind is continued where the server allows it. (MD5 is what the sources publish; it guards
    against damage.)

    Raises:
        UserError: no address gave a file with that checksum; says what was tried and what works offline.
    """
    if target.exists():
        return target
    with node_lock(target.with_name(f".{target.name}.lock")):
        if target.exists():
            return target
        part = target.with_name(f".{target.name}.part")
        failures = []
        for url in urls:
            try:
                downloads.download(partial(_open, url, timeout_s), part, target, digest=md5, algorithm="md5")
                return target
            except (BrokenOff, Damaged) as error:
                failures.append(f"{url} ({error})")
    raise UserError(
        f"{target.name} could not be downloaded; tried {', '.join(failures)}. Put it into {target.parent} yourself, "
        f"give data.root=FOLDER with the data, or work offline: {OFFLINE_OPTIONS}."
    )


def _open(url: str, timeout_s: float, start: int) -> Incoming:
    """The file from `start` on where the server can, else from its beginning."""
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
        response = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # what lies here is as long as the file, or longer: not a part of it
            return _open(url, timeout_s, 0)
        raise BrokenOff(f"HTTP {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BrokenOff(str(getattr(error, "reason", None) or error)) from None
    start = start if response.status == 206 else 0
    length = response.headers.get("Content-Length")
    total = start + int(length) if length is not None else None
    return Incoming(start, total, _blocks(url, response, start, total))


def _blocks(url: str, response: http.client.HTTPResponse, start: int, total: int | None) -> Iterator[bytes]:
    with response, progress(f"Downloading {url}", total, start) as advance:
        while True:
            try:
                block = response.read(CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise BrokenOff(str(error) or type(error).__name__) from None
            if not block:
                return
            advance(len(block))
            yield block
