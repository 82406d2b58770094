"""Fetch a file from the first of several addresses that has it: continued after an interruption, verified, atomic."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from lockstep.data.node_cache import node_lock
from lockstep.data.progress import progress
from lockstep.runs.errors import UserError

OFFLINE_OPTIONS = "data=digits and data=synthetic need no download"
CHUNK_BYTES = 2**20


def download(urls: Sequence[str], target: Path, *, md5: str, attempts: int = 3, timeout_s: float = 20.0) -> Path:
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
            for _ in range(attempts):
                before = _size(part)
                failure = _try(url, part, md5, timeout_s)
                if failure is None:
                    os.replace(part, target)
                    return target
                if _size(part) == before:  # nothing came: this address will not do better at once
                    break
            failures.append(f"{url} ({failure})")
    raise UserError(
        f"{target.name} could not be downloaded; tried {', '.join(failures)}. Put it into {target.parent} yourself, "
        f"give data.root=FOLDER with the data, or work offline: {OFFLINE_OPTIONS}."
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _try(url: str, part: Path, md5: str, timeout_s: float) -> str | None:
    """None once `part` is complete and verified, else why not; what arrived stays for the next attempt."""
    try:
        _receive(url, part, timeout_s)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the part is as long as the file, or longer: not a part of it
            part.unlink(missing_ok=True)
        return f"HTTP {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", None) or error)
    with part.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found == md5:
        return None
    part.unlink()
    return f"MD5 {found} instead of {md5}"


def _receive(url: str, part: Path, timeout_s: float) -> None:
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        continued = response.status == 206
        have = have if continued else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        with part.open("ab" if continued else "wb") as file, progress(f"Downloading {url}", total, have) as advance:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
            if total is not None and file.tell() != total:
                raise OSError(f"the connection ended after {file.tell()} of {total} bytes")
