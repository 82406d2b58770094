"""Whether a run folder's config.yaml was written by this machine's user: signed with a key in the log folder.

Such a file says all that its user once typed. One without the signature (of a run folder that was copied here, or of an
older version) is data from outside. The key lies in `<log_dir>/.key`, so that nodes which share the folder share it.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from lockstep.runs.config import Config
from lockstep.runs.folder import read_config

MARK = "# signed: "
KEY_NAME, KEY_BYTES = ".key", 32


def signed(text: str, path: Path, logs: Path) -> str:
    """The text with a first line that says for this run, with this machine's key, that it is its user's own.

    Args:
        path: of the config.yaml that it becomes.
    """
    logs.mkdir(parents=True, exist_ok=True)
    if not (logs / KEY_NAME).exists():
        _make_key(logs)
    signature = _signature(text, path, logs)
    return f"{MARK}{signature}\n{text}" if signature else text


def own_config(path: Path, logs: Path) -> Config | None:
    """The config in this file, where this machine's user wrote it; None where somebody else may have.

    Raises:
        UserError: it is signed, and cannot be read.
    """
    try:
        first, _, text = path.read_text().partition("\n")
    except (OSError, ValueError):
        return None
    wanted = _signature(text, path, logs)
    if wanted is None or not hmac.compare_digest(first.encode(), f"{MARK}{wanted}".encode()):
        return None
    return read_config(path)


def _make_key(logs: Path) -> None:
    temporary = logs / f"{KEY_NAME}.{secrets.token_hex(8)}"
    with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    with contextlib.suppress(FileExistsError):  # another start was first
        os.link(temporary, logs / KEY_NAME)
    temporary.unlink()


def _signature(text: str, path: Path, logs: Path) -> str | None:
    """None: there is no key."""
    key = _key(logs)
    told = f"{path.parent.name}/{path.name}\n{text}".encode()
    return None if key is None else hmac.new(key, told, hashlib.sha256).hexdigest()


def _key(logs: Path) -> bytes | None:
    """None: there is none, or one that others could have written or read."""
    try:
        with (logs / KEY_NAME).open("rb") as file:
            facts, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    except OSError:
        return None
    ours = facts.st_uid == os.getuid() and facts.st_mode & 0o077 == 0
    return key if ours and len(key) == KEY_BYTES else None
