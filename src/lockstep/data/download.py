"""Fetch a file from the first of several addresses that has it: continued after an interruption, verified, atomic."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.data.node_cache import node_lock
from lockstep.data.progress import progress
from lockstep.runs import downloads
from lockstep.runs.downloads import BrokenOff, Damaged, Incoming
from lockstep.runs.errors import UserError

OFFLINE_OPTIONS = "data=digits and data=synthetic need no download"
CHUNK_BYTES = 2**20
MAX_BYTES = 2**32  # of one file: the largest here has 170 MB
SCHEMES = ("http", "https")


def download(urls: Sequence[str], target: Path, *, md5: str, timeout_s: float = 20.0) -> Path:
    """`target`, fetched unless it is there; one process per node does it while others wait.

    A part that was left behind is continued where the server allows it. (MD5 is what the sources publish; it guards
    against damage.)

    Raises:
        UserError: no address gave a file with that checksum; says what was tried and what works offline.
    """
    if target.exists():
        return target
    for url in urls:
        if urlsplit(str(url)).scheme not in SCHEMES:
            raise UserError(f"data.urls holds {url}: only {' and '.join(SCHEMES)} addresses are fetched.")
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
        response = _opener().open(request, timeout=timeout_s)
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


def _opener() -> urllib.request.OpenerDirector:
    """Without the handlers of file: and ftp: addresses, to which a server may send on."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler, urllib.request.UnknownHandler, urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler, urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener


def _blocks(url: str, response: http.client.HTTPResponse, start: int, total: int | None) -> Iterator[bytes]:
    if total is not None and total > MAX_BYTES:
        raise Damaged(f"it states {total} bytes, and no data set has files of more than {MAX_BYTES}")
    reached = start
    with response, progress(f"Downloading {url}", total, start) as advance:
        while True:
            try:
                block = response.read(CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise BrokenOff(str(error) or type(error).__name__) from None
            if not block:
                return
            reached += len(block)
            if reached > MAX_BYTES:
                raise Damaged(f"it does not end after {MAX_BYTES} bytes")
            advance(len(block))
            yield block
