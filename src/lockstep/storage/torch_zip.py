"""Looks at a torch checkpoint before torch does: what it would unpack to, and what its pickle asks for.

torch.load(weights_only=True) runs no code of the file, but it believes the sizes that the file states: a megabyte may
unpack to a gigabyte, and a tensor may reach beyond the bytes that it was given. So the pickle is first read with
stand-ins that only count. Imports no torch.
"""

import io
import math
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

MAX_PICKLE_BYTES = 64 * 2**20
MAX_OPCODES = 6_000_000  # the random states of 4,000 ranks have 5 million; each may cost 100 bytes
MAX_DIMENSIONS = 64
OPCODES = {
    "PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "NONE", "NEWFALSE", "NEWTRUE", "BININT",
    "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "BINGET", "LONG_BINGET", "BINPUT",
    "LONG_BINPUT",
}  # fmt: skip
ITEM_BYTES = {
    "ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1, "ShortStorage": 2, "HalfStorage": 2, "BFloat16Storage": 2,
    "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8, "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16, "UntypedStorage": 1,
}  # fmt: skip
DTYPE_BYTES = {
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8, "float16": 2,
    "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16, "bool": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip


class NotSafe(ValueError):
    """What cannot be loaded safely; the message is a short reason."""


def check_torch_zip(path: Path) -> None:
    """
    Raises:
        NotSafe: not torch's zip format, it would unpack to more than it has bytes, or it asks for anything but
            tensors and plain values. Whatever else is wrong with it raises an error of zipfile or pickle.
    """
    if path.is_dir():
        raise NotSafe("it is a folder, and not one of shards")
    with path.open("rb") as file:
        begin = file.read(4)
    if begin != b"PK\x03\x04" or not zipfile.is_zipfile(path):
        raise NotSafe("it is not in torch's zip format (of torch 1.6 or newer), or it is cut short")
    with zipfile.ZipFile(path) as archive:
        sizes = _entries(archive, path.stat().st_size)
        data = archive.read(_root(sizes) + "data.pkl")
    _check_opcodes(data)
    _DryRun(data, sizes).load()


def _entries(archive: zipfile.ZipFile, file_bytes: int) -> dict[str, int]:
    """{name: bytes}."""
    entries = archive.infolist()
    sizes = {entry.filename.lower(): entry.file_size for entry in entries}  # torch does not mind capitals either
    if archive.comment or len(sizes) != len(entries) or any(e.filename != e.orig_filename for e in entries):
        raise NotSafe("its list of files is not as torch writes it")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise NotSafe("it is compressed, which torch's own files are not")
    if sum(sizes.values()) > file_bytes:
        raise NotSafe(f"it would unpack to {sum(sizes.values())} bytes and has {file_bytes}")
    return {entry.filename: entry.file_size for entry in entries}


def _root(sizes: dict[str, int]) -> str:
    """The folder that all files of the archive lie in, with its slash."""
    root = next(iter(sizes), "").partition("/")[0] + "/"
    if any(not name.startswith(root) for name in sizes) or f"{root}data.pkl" not in sizes:
        raise NotSafe("it holds no data.pkl, or files beside it")
    if f"{root}constants.pkl" in sizes:
        raise NotSafe("it is a TorchScript program")
    if sizes[f"{root}data.pkl"] > MAX_PICKLE_BYTES:
        raise NotSafe(f"its data.pkl is longer than {MAX_PICKLE_BYTES} bytes")
    return root


def _check_opcodes(data: bytes) -> None:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in OPCODES:
            raise NotSafe(f"its pickle uses {opcode.name}, which torch does not write")
        if opcode.name in ("BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise NotSafe("its pickle states a place beyond its end")  # Python would make the table that long
        if count > MAX_OPCODES:
            raise NotSafe(f"its pickle has more than {MAX_OPCODES} instructions")


class _Storage(NamedTuple):
    """Bytes of a tensor in the archive."""

    items: int
    item_bytes: int

    def of(self, dtype: "_Name") -> "_Storage":
        """The same bytes as numbers of another type."""
        item_bytes = DTYPE_BYTES[dtype.name]
        return _Storage(self.items * self.item_bytes // item_bytes, item_bytes)


class _Name:
    """Stands for a class or function that the pickle names. Holds nothing that the pickle could change."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __setattr__(self, *_: object) -> None:
        raise NotSafe("its pickle changes what it names")

    def __setstate__(self, _: object) -> None:
        raise NotSafe("its pickle changes what it names")

    def __call__(self, *given: Any) -> Any:
        if self.name in ("OrderedDict", "Counter"):
            return _Mapping(*given)
        if self.name == "Size":
            return tuple(*given)
        if self.name == "set" and len(given) == 1 and isinstance(given[0], list):
            return frozenset(given[0])
        if self.name == "complex" and all(type(part) is float for part in given):
            return complex(*given)
        if self.name == "device" and all(type(part) in (str, int) for part in given):
            return None
        if self.name == "_rebuild_tensor_v2":
            return _check_tensor(*given[:4])
        if self.name == "_rebuild_tensor_v3":
            storage, offset, size, stride, _, _, dtype, *_ = given
            return _check_tensor(storage.of(dtype), offset, size, stride)
        if self.name == "_rebuild_parameter" and type(given[0]) is _Tensor:
            return given[0]
        raise NotSafe(f"its pickle calls {self.name} with what it does not take")


class _Mapping(dict):
    """An OrderedDict; of a state dict with the `_metadata` that torch hangs on it."""

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict) or set(state) - {"_metadata"}:
            raise NotSafe("its pickle gives a mapping other attributes than torch does")


class _Tensor:
    """Stands for a tensor."""

    __slots__ = ()

    def __setstate__(self, _: object) -> None:
        raise NotSafe("its pickle changes a tensor")


TENSOR = _Tensor()
ALLOWED = {
    **{("collections", name): _Name(name) for name in ("OrderedDict", "Counter")},
    **{(module, name): _Name(name) for module in ("builtins", "__builtin__") for name in ("set", "complex")},
    **{("torch._utils", f"_rebuild_{name}"): _Name(f"_rebuild_{name}")
       for name in ("tensor_v2", "tensor_v3", "parameter")},
    **{("torch", name): _Name(name) for name in ("Size", "device", *DTYPE_BYTES, *ITEM_BYTES)},
    ("torch.storage", "UntypedStorage"): _Name("UntypedStorage"),
}  # fmt: skip


class _DryRun(pickle.Unpickler):
    def __init__(self, data: bytes, sizes: dict[str, int]) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.sizes, self.root = sizes, _root(sizes)

    def find_class(self, module: str, name: str) -> _Name:
        if (module, name) not in ALLOWED:
            raise NotSafe(f"it asks for {module}.{name}"[:200] + ", which no checkpoint needs")
        return ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        word, kind, key, place, items = pid
        item_bytes = ITEM_BYTES.get(getattr(kind, "name", ""))
        if word != "storage" or item_bytes is None or type(items) is not int or type(place) is not str:
            raise NotSafe("its pickle names bytes in a way that torch does not")
        if not 0 <= items * item_bytes <= self.sizes.get(f"{self.root}data/{key}", -1):
            raise NotSafe(f"it states {items} numbers for data/{str(key)[:40]}, which holds fewer")
        return _Storage(items, item_bytes)


def _check_tensor(storage: Any, offset: Any, size: Any, stride: Any) -> _Tensor:
    """A tensor lies within its bytes, and no byte of it counts twice."""
    if type(storage) is not _Storage or len(size) != len(stride) or len(size) > MAX_DIMENSIONS:
        raise NotSafe("a tensor of it is none")
    if any(type(n) is not int or not 0 <= n < 2**62 for n in (offset, *size, *stride)):
        raise NotSafe("a tensor of it has a size that is none")
    count = math.prod(size)
    reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if count else 0
    if max(reach, count) > storage.items:
        raise NotSafe(f"a tensor of shape {list(size)} is larger than its {storage.items} numbers")
    return TENSOR
