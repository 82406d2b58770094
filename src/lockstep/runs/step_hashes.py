"""hashes.bin of a run folder: what each optimizer step saw and left, as 64-bit hashes. Imports no torch.

A line of JSON that names the parts, then one row of little-endian 8-byte words for each step:

    step, ranks, micro-batches, loss, a word for each image of the global batch, each gradient, each weight and buffer

Row 0 holds the weights before the first step, and no batch. trainer.record_hashes=true writes it.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from lockstep.runs.errors import UserError
from lockstep.runs.files import write_atomically
from lockstep.runs.foreign_files import parse_json

VERSION = 1
MAX_HEAD = 10 * 2**20  # bytes of the first line
WORD = np.dtype("<i8")
STEP, RANKS, MICRO_BATCHES, LOSS, FIRST_IMAGE = range(5)


@dataclass(frozen=True)
class Head:
    """What the words of a row are of, in their order.

    Args:
        images: of a global batch.
        gradients, weights: names of parameters; of parameters and buffers.
        sharded: each rank holds a part of each parameter.
    """

    images: int
    gradients: tuple[str, ...]
    weights: tuple[str, ...]
    sharded: bool = False
    version: int = VERSION

    @property
    def width(self) -> int:
        return FIRST_IMAGE + self.images + len(self.gradients) + len(self.weights)

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True)
class Hashes:
    """rows: (steps, head.width) int64, steps rising."""

    head: Head
    rows: np.ndarray

    def part(self, name: str) -> np.ndarray:
        """(steps, n): the words of "images", "loss", "gradients" or "weights"."""
        images, gradients = FIRST_IMAGE + self.head.images, len(self.head.gradients)
        if name == "loss":
            return self.rows[:, LOSS:FIRST_IMAGE]
        first, end = {
            "images": (FIRST_IMAGE, images),
            "gradients": (images, images + gradients),
            "weights": (images + gradients, self.head.width),
        }[name]
        return self.rows[:, first:end]


def read_hashes(path: Path) -> Hashes:
    """A row that a kill has cut short does not count.

    Raises:
        UserError: there is no such file, or it is none of ours.
    """
    try:
        with path.open("rb") as file:
            head = _head(file.readline(MAX_HEAD))
            size = os.fstat(file.fileno()).st_size - file.tell()
            rows = np.fromfile(file, WORD, count=size // (head.width * WORD.itemsize) * head.width)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise UserError(f"{path} holds no step hashes: {error}.") from None
    rows = rows.reshape(-1, head.width)
    if (np.diff(rows[:, STEP]) <= 0).any():
        raise UserError(f"{path} holds no step hashes: its steps do not rise.")
    return Hashes(head, rows)


def _head(line: bytes) -> Head:
    """
    Raises:
        ValueError: it is none of ours.
    """
    values = parse_json(line)
    if not isinstance(values, dict) or values.keys() != {field.name for field in fields(Head)}:
        raise ValueError("its first line names no parts")
    if values["version"] != VERSION:
        raise ValueError(f"it is of version {values['version']!r}, and this program reads {VERSION}")
    names = [values["gradients"], values["weights"]]
    if not all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in names):
        raise ValueError("its parts have no names")
    if type(values["images"]) is not int or not 0 <= values["images"] < 2**32:
        raise ValueError("it does not say how large a batch is")
    return Head(values["images"], tuple(names[0]), tuple(names[1]), sharded=values["sharded"] is True)


def begin_hashes(path: Path, head: Head, resume_step: int | None) -> None:
    """Start the file, or go on in it after `resume_step`: later rows are of a past that no longer counts."""
    kept = np.empty((0, head.width), WORD)
    if resume_step and path.exists():
        before = read_hashes(path)
        if before.head == head:
            kept = before.rows[before.rows[:, STEP] <= resume_step]
    write_atomically(path, lambda file: file.write(head.line() + kept.tobytes()), binary=True)


def add_rows(path: Path, rows: np.ndarray) -> None:
    """
    Args:
        rows: (steps, head.width) int64.
    """
    with path.open("ab") as file:
        file.write(rows.astype(WORD, copy=False).tobytes())


def joined(ranks: np.ndarray, micro_batches: int, images: int) -> np.ndarray:
    """(steps, head.width − 1): all but the step itself, out of what each rank has.

    The images stand in the order of the global batch; loss, gradients and weights are those of all ranks together.

    Args:
        ranks: (world size, steps, words) int64, of each rank's own part of the images, micro-batch after micro-batch,
            then a loss for each micro-batch, then gradients and weights.
        images: on each rank in a step.
    """
    world, steps, _ = ranks.shape
    own, losses, rest = np.split(ranks, [images, images + micro_batches], axis=2)
    in_order = own.reshape(world, steps, micro_batches, -1).transpose(1, 2, 0, 3).reshape(steps, -1)
    loss = _folded(losses.transpose(0, 2, 1).reshape(-1, steps, 1))
    shape = np.tile(np.array([world, micro_batches]), (steps, 1))
    return np.concatenate([shape, loss, in_order, _folded(rest)], axis=1)


def _folded(parts: np.ndarray) -> np.ndarray:
    """(n, …) → (…): each part counts with another odd number, modulo 2⁶⁴; of one part its own words."""
    odd = 2 * np.arange(len(parts), dtype=np.int64) + 1
    with np.errstate(over="ignore"):
        return (parts * odd.reshape(-1, *[1] * (parts.ndim - 1))).sum(0)


@dataclass(frozen=True)
class Difference:
    """The first of it.

    Args:
        part: images, loss, gradients or weights.
        names: what differs of it: places in the global batch, or names of parameters.
        total: how many there are.
    """

    step: int
    part: str
    names: Sequence[str]
    total: int

    def __str__(self) -> str:
        when = f"in step {self.step}" if self.step else "before the first step"
        more = f" and {len(self.names) - 1} more of {self.total}" if len(self.names) > 1 else ""
        if self.part == "images":
            return f"{when}: image {self.names[0]}{more} of the batch (counted from 0)"
        if self.part == "loss":
            return f"{when}: the loss, of the same images"
        what = "gradient" if self.part == "gradients" else "weight"
        return f"{when}: the {what} of {self.names[0]}{more}"


def first_difference(one: Hashes, other: Hashes) -> tuple[Difference | None, int, bool]:
    """The first difference in the steps that both have (None: there is none), how many these are, and whether all was
    compared: where a batch is cut in other parts, sums are rounded otherwise, and only its images are.

    Raises:
        UserError: they are of other nets or batches, or have no step in common.
    """
    for name, what in (("images", "global batches"), ("gradients", "parameters"), ("weights", "parameters")):
        if getattr(one.head, name) != getattr(other.head, name):
            raise UserError(f"The two runs have other {what}: step hashes compare runs of one net and one batch.")
    steps, mine, others = np.intersect1d(one.rows[:, STEP], other.rows[:, STEP], return_indices=True)
    if not len(steps):
        raise UserError("The two runs have hashes of no step in common.")
    cut = slice(RANKS, MICRO_BATCHES + 1)
    same_cut = bool((one.rows[mine, cut] == other.rows[others, cut]).all()) and one.head.sharded == other.head.sharded
    found = []
    for part in ("images", "loss", "gradients", "weights") if same_cut else ("images",):
        unlike = one.part(part)[mine] != other.part(part)[others]
        if unlike.any():
            row = int(unlike.any(1).argmax())
            found.append(_difference(one.head, part, int(steps[row]), np.flatnonzero(unlike[row])))
    first = min(found, key=lambda difference: difference.step, default=None)  # of one step the earlier part
    return first, int((steps > 0).sum()), same_cut


def _difference(head: Head, part: str, step: int, places: np.ndarray) -> Difference:
    if part in ("gradients", "weights"):
        names: Sequence[str] = getattr(head, part)
        return Difference(step, part, [names[place] for place in places], len(names))
    return Difference(step, part, [str(place) for place in places], head.images if part == "images" else 1)
