"""What other nodes measured, brought to node 0's run folder: hardware CSV, nvidia-smi dumps, TensorBoard scalars.

Node 0 names every file itself, and takes text and numbers of limited length only.
"""

import re
import secrets
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.distributed.json_collectives import broadcast_json, gather_json
from lockstep.runs.folder import RunFolder
from lockstep.runs.typed_json import Part, WrongValue, from_json, to_json

MOMENTS = ("start", "peak", "end")
MOST_CSV_BYTES = 64 * 2**20  # of a node, as much as a bucket's file may have
MOST_SENT_BYTES = 16 * 2**20  # at once: every rank receives it
MOST_SMI_CHARACTERS = 2**18
MOST_POINTS = 5000
SERIES = re.compile(r"[a-z]{1,20}\d{0,5}/[a-z0-9_]{1,40}")
MOST_SERIES = 500


@dataclass(kw_only=True)
class Point(Part):
    """A reading at a step of the training."""

    step: int = 0
    values: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Sent(Part):
    """What a node sends at the end of an epoch: whole lines of its CSV, dumps that changed, readings."""

    csv: str = ""
    smi: dict[str, str] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)


def share_folder(folder: Path, is_rank_zero: bool) -> bool:
    """Whether `folder` is rank 0's here too: it makes a file of a random name, which the others look for.

    Every rank calls it.
    """
    mark = folder / f".seen-{int(broadcast_json(secrets.randbits(62))):x}"
    if is_rank_zero:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    gather_json(None)  # it is there
    found = mark.exists()
    gather_json(None)  # all have looked
    if is_rank_zero:
        mark.unlink()
    return found


class Sender:
    """On another node: what it measured and has not sent yet.

    Args:
        shares_folder: node 0 sees this node's files, so that only readings are sent.
    """

    def __init__(self, folder: RunFolder, node_rank: int, shares_folder: bool) -> None:
        self.folder, self.node_rank, self.shares_folder = folder, node_rank, shares_folder
        self.points: deque[Point] = deque(maxlen=MOST_POINTS)
        self.sent_bytes = 0
        self.sent_smi: dict[str, str] = {}

    def note(self, step: int, values: dict[str, float]) -> None:
        self.points.append(Point(step=step, values=values))

    def take(self) -> Any:
        """JSON of a `Sent`; what cannot be read is left out, for the others wait."""
        sent = Sent(points=list(self.points))
        self.points.clear()
        if not self.shares_folder:
            sent.csv = self._new_lines()
            sent.smi = {moment: text for moment in MOMENTS if (text := self._changed_smi(moment))}
            self.sent_smi |= sent.smi
        return to_json(sent)

    def _new_lines(self) -> str:
        try:
            with self.folder.hardware_samples(self.node_rank).open("rb") as file:
                file.seek(self.sent_bytes)
                data = file.read(MOST_SENT_BYTES)
        except OSError:
            return ""
        whole = data[: data.rfind(b"\n") + 1]
        self.sent_bytes += len(whole)
        return whole.decode(errors="replace")

    def _changed_smi(self, moment: str) -> str:
        try:
            with self.folder.nvidia_smi(self.node_rank, moment).open(errors="replace") as file:
                text = file.read(MOST_SMI_CHARACTERS)
        except OSError:
            return ""
        return "" if text == self.sent_smi.get(moment) else text


class Receiver:
    """On node 0: takes what one other node sends into the run folder."""

    def __init__(self, folder: RunFolder, node_rank: int) -> None:
        self.folder, self.node_rank = folder, node_rank
        self.left = MOST_CSV_BYTES
        self.began = False

    def keep(self, given: Any) -> list[Point]:
        """Write the files; returns the readings, for TensorBoard.

        Raises:
            WrongValue: no `Sent`, or more of it than a node measures; nothing was written.
            OSError: the disk does not take it.
        """
        sent = from_json(Sent, given)
        self._check(sent)
        if sent.csv:
            path = self.folder.hardware_samples(self.node_rank)
            if not self.began:
                set_earlier_aside(path)
                self.began = True
            with path.open("a", newline="") as file:
                file.write(sent.csv)
            self.left -= len(sent.csv.encode())
        for moment, text in sent.smi.items():
            self.folder.nvidia_smi(self.node_rank, moment).write_text(text)
        return sent.points

    def _check(self, sent: Sent) -> None:
        if len(sent.csv.encode()) > self.left:
            raise WrongValue(f"its CSV has more than {MOST_CSV_BYTES} bytes")
        if not sent.smi.keys() <= set(MOMENTS) or any(len(text) > MOST_SMI_CHARACTERS for text in sent.smi.values()):
            raise WrongValue("its nvidia-smi files are too long, or of no moment that there is")
        if len(sent.points) > MOST_POINTS:
            raise WrongValue(f"it has more than {MOST_POINTS} readings")
        names = {name for point in sent.points for name in point.values}
        if len(names) > MOST_SERIES or not all(map(SERIES.fullmatch, names)):
            raise WrongValue("its readings have names that no reading has")


def set_earlier_aside(path: Path) -> None:
    """Make room for a new file; one of an earlier start of the run stays beside it with a number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        taken = sum(1 for _ in path.parent.glob(f"{path.stem}.*{path.suffix}"))
        path.rename(path.with_name(f"{path.stem}.{taken}{path.suffix}"))
