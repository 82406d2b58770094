"""Where the files within an uncompressed tar archive lie: by its headers alone, without unpacking anything.

Formats: ustar, and the long names of GNU tar and of pax. What a name says is only ever compared, never a path.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

BLOCK = 512
END = bytes(BLOCK)
MAX_NAME_BYTES = 2**16
FILES, WITHOUT_DATA = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")


class BadArchive(Exception):
    """Says what is wrong with it, without its name."""


class Member(NamedTuple):
    """A plain file: its name, its first byte in the archive, and its length in bytes."""

    name: str
    start: int
    size: int


class Said(NamedTuple):
    """What a header of its own says of the file that follows."""

    name: bytes | None = None
    size: int | None = None


def members(path: Path) -> Iterator[Member]:
    """In the archive's order.

    Raises:
        BadArchive: it is cut off, or no tar archive.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        total, at, said = os.fstat(file.fileno()).st_size, 0, Said()
        while (header := _read(file, at, BLOCK)) != END:
            _check(header, at)
            kind = header[156:157]
            size = _number(header[124:136]) if said.size is None else said.size
            start, at = at + BLOCK, at + BLOCK
            if kind not in WITHOUT_DATA:
                at += -(-size // BLOCK) * BLOCK
            if at > total:
                raise BadArchive(f"is cut off: it has {total} bytes, and a file in it ends at {at}")
            if kind in FILES:
                yield Member(os.fsdecode(_name(header) if said.name is None else said.name), start, size)
            said = SAYS[kind](_limited(file, start, size)) if kind in SAYS else Said()


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    data = os.pread(file.fileno(), size, at)
    if len(data) < size:
        raise BadArchive(f"is cut off at {at + len(data)} bytes: the end of an archive is missing")
    return data


def _limited(file: BinaryIO, start: int, size: int) -> bytes:
    if size > MAX_NAME_BYTES:
        raise BadArchive(f"holds a name of {size} bytes")
    return _read(file, start, size)


def _check(header: bytes, at: int) -> None:
    """The sum of a header's bytes, its own place taken as spaces."""
    if sum(header) - sum(header[148:156]) + 8 * 32 != _number(header[148:156]):
        raise BadArchive(f"is no tar archive, or damaged at byte {at}")


def _number(field: bytes) -> int:
    """Octal digits, or base 256 where the first bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:])
    digits = field.strip(b" \0") or b"0"
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise BadArchive("is no tar archive: a number in it is none")
    return int(digits, 8)


def _name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _long_name(data: bytes) -> Said:
    return Said(name=data.split(b"\0")[0])


def _pax(data: bytes) -> Said:
    """Records "length key=value\\n"."""
    records: dict[bytes, bytes] = {}
    while data:
        length = data.split(b" ")[0]
        if not length.isdigit() or not len(length) + 1 < int(length[:9]) <= len(data):
            raise BadArchive("is damaged: what it says of a file is no list of values")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key], data = value, data[int(length) :]
    size = records.get(b"size", b"")[:19]
    return Said(records.get(b"path"), int(size) if size.isdigit() else None)


SAYS = {b"L": _long_name, b"x": _pax}
