"""Read pickles that hold numbers, strings, lists and NumPy arrays, and nothing that could run code."""

import pickle
from typing import Any, BinaryIO

import numpy as np

from errors import UserError

ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data file needs")
        if name == "_reconstruct":
            return _reconstruct
        return super().find_class(module, name)


def _reconstruct(subtype: type, shape: Any, kind: Any) -> np.ndarray:
    """NumPy's own constructor, which has moved between releases, for plain arrays only."""
    if subtype is not np.ndarray:
        raise pickle.UnpicklingError("it asks for a kind of array that no data file needs")
    return np.ndarray.__new__(np.ndarray, shape, "b" if kind in (b"b", "b") else kind)


def load_arrays(file: BinaryIO, name: str) -> Any:
    """The content of a pickle; strings of Python 2 come as bytes.

    Raises:
        UserError: truncated, no pickle, or one that asks for anything beyond arrays and builtin types.
    """
    try:
        return _ArrayUnpickler(file, encoding="bytes").load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(
            f"{name} is truncated or not one of the official files ({error}): delete it and fetch it again."
        ) from None
