"""The secret of one start, by which its processes know each other. Imports no torch.

Where it comes from, the first that there is:

    a process of ours that started this one    a pipe that this one inherited
    the user, sbatch, a manifest, nodes.py     LOCKSTEP_SECRET, or LOCKSTEP_SECRET_FILE: a file for the owner alone
    one node, our supervisor                   made here
    one node, torchrun or srun                 a file in a folder of this user, made by the rank that comes first
    several nodes                              none: whoever reaches the ports can take part
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.distributed.cluster import (
    SECRET,
    SECRET_FILE,
    SECRET_PIPE,
    Cluster,
    environment,
    forget_secrets,
)
from lockstep.runs.errors import UserError

TAG_BYTES = 64  # HMAC-SHA256 as hexadecimal digits
FEWEST_CHARACTERS = 16
LARGEST_FILE_BYTES = 4096


@dataclass(frozen=True)
class Secret:
    """
    Args:
        text: at least 16 characters.
        file: of the ranks of one machine; nobody needs it once all have read it.
    """

    text: str = field(repr=False)
    file: Path | None = None

    def tag(self, *parts: bytes) -> bytes:
        """HMAC-SHA256 over the parts, each with its length before it: 64 hexadecimal digits."""
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self.text.encode(), message, hashlib.sha256).hexdigest().encode()

    def proves(self, tag: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(tag, self.tag(*parts))

    def discard_file(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def new_secret() -> Secret:
    return Secret(secrets.token_hex(32))


_found: list[Secret] = []


def own_secret(cluster: Cluster) -> Secret | None:
    """This process's, looked for once; its environment variables are taken away, so that no child inherits them.

    Raises:
        UserError: too short, or a file that others can read or write.
    """
    if not _found:
        environ = environment()
        forget_secrets()
        if (secret := find_secret(cluster, environ)) is not None:
            _found.append(secret)
    return _found[0] if _found else None


def find_secret(cluster: Cluster, environ: Mapping[str, str]) -> Secret | None:
    """None where there is nobody to prove anything to, and between nodes that were given none."""
    if SECRET_PIPE in environ:
        return _from_pipe(int(environ[SECRET_PIPE]))
    stated = stated_secret(environ)
    if stated or cluster.num_nodes > 1 or cluster.world_size == 1:
        return stated
    if cluster.is_supervisor:
        return new_secret()
    return None if cluster.is_supervised else _of_machine(cluster, _private_folder(environ))


def stated_secret(environ: Mapping[str, str]) -> Secret | None:
    """What the user or a script put into the environment."""
    text, name = environ.get(SECRET, "").strip(), SECRET
    if not text and environ.get(SECRET_FILE):
        name = f"{SECRET_FILE}={environ[SECRET_FILE]}"
        text = _read_private(Path(environ[SECRET_FILE]), name)
    if text and len(text) < FEWEST_CHARACTERS:
        raise UserError(
            f"{name} holds {len(text)} characters, too few for a secret: give {FEWEST_CHARACTERS} or more, "
            "such as the output of openssl rand -hex 32."
        )
    return Secret(text) if text else None


@contextlib.contextmanager
def handed_on(secret: Secret | None) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """(environment variables, descriptors) by which one child that is started inside gets the secret."""
    if secret is None:
        yield {}, ()
        return
    reader, writer = os.pipe()
    try:
        os.write(writer, secret.text.encode())  # far less than a pipe holds
    finally:
        os.close(writer)
    try:
        yield {SECRET_PIPE: str(reader)}, (reader,)
    finally:
        os.close(reader)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """What a child gets that is told the secret in another way, or not at all."""
    return {name: value for name, value in environ.items() if name not in (SECRET, SECRET_FILE, SECRET_PIPE)}


def _from_pipe(reader: int) -> Secret | None:
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    return Secret(text) if text else None


def _read_private(path: Path, name: str) -> str:
    """
    Raises:
        UserError: not a file that this user alone can read and write.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise UserError(f"{name} is no file that you alone can read and write: chmod 600 it, as its owner.")
            return file.read(LARGEST_FILE_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} cannot be read ({error}).") from None


def _private_folder(environ: Mapping[str, str]) -> Path:
    """A folder that only this user can enter.

    Raises:
        UserError: another user made one of its name.
    """
    given = Path(environ.get("XDG_RUNTIME_DIR") or os.devnull)
    parent = given if given.is_dir() and _is_private(given) else Path(tempfile.gettempdir())
    folder = parent / f"lockstep-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise UserError(f"{folder} is not yours alone, and ranks keep their secret there: remove it, or set {SECRET}.")
    return folder


def _is_private(folder: Path) -> bool:
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077


def _of_machine(cluster: Cluster, folder: Path) -> Secret:
    """What the first rank of a launcher's start writes down, and the others read: they share MASTER_PORT."""
    start = f"{cluster.launcher}-{socket.gethostname()}-{cluster.master_addr}-{cluster.master_port}"
    path = folder / re.sub(r"[^A-Za-z0-9._-]", "-", start)[:200]
    handle, own = tempfile.mkstemp(dir=folder)
    with open(handle, "w") as file:
        file.write(new_secret().text)
    with contextlib.suppress(FileExistsError):
        os.link(own, path)  # whole at once, and never over another rank's
    os.unlink(own)
    return Secret(_read_private(path, str(path)), path)
