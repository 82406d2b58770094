"""Read pickles that hold numbers, strings, lists and NumPy arrays, and nothing that could run code."""

import io
import pickle
import pickletools
from typing import Any, BinaryIO

import numpy as np

from lockstep.runs.errors import UserError

ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _Array:
    """Stands for numpy.ndarray, which may be named but not called: it would make an array of any size."""

    def __new__(cls, *_: Any) -> Any:
        raise pickle.UnpicklingError("it makes an array that no data file needs")


def _reconstruct(subtype: type, shape: Any, kind: Any) -> np.ndarray:
    """NumPy's own constructor, which has moved between releases, of the empty array that then gets its state."""
    if subtype is not _Array or shape != (0,) or kind not in (b"b", "b"):
        raise pickle.UnpicklingError("it asks for a kind of array that no data file needs")
    return np.ndarray.__new__(np.ndarray, shape, "b")


def _encode(text: str, encoding: str) -> bytes:
    """How a pickle of Python 3 writes bytes for Python 2."""
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}, which no data file needs")
    return text.encode("latin-1")


STAND_INS = {"_reconstruct": _reconstruct, "ndarray": _Array, "dtype": np.dtype, "encode": _encode}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data file needs")
        return STAND_INS[name]


def _refuse_bombs(data: bytes) -> None:
    """A few bytes can ask Python for gigabytes: a place far out in its table of known objects, which it then fills.

    Raises:
        ValueError: no pickle, cut short, or one that states more of anything than it has bytes.
    """
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT", "FRAME") and int(argument or 0) > len(data):
            raise ValueError(f"its {opcode.name} of {argument} is beyond its {len(data)} bytes")


def load_arrays(file: BinaryIO, name: str) -> Any:
    """The content of a pickle; strings of Python 2 come as bytes.

    Raises:
        UserError: truncated, no pickle, or one that asks for anything beyond arrays and builtin types.
    """
    try:
        data = file.read()
        _refuse_bombs(data)
        return _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(
            f"{name} is truncated or not one of the official files ({error}): delete it and fetch it again."
        ) from None
