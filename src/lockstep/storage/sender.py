"""One upload of a run: a checkpoint with its pointer, or the small files; uploader.py says when."""

from collections.abc import Callable

from lockstep.runs.folder import RunFolder
from lockstep.storage.object_store import StoredObject
from lockstep.storage.outbox import Item, Outbox
from lockstep.storage.pointer import Pointer
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.small_files import SmallFiles


class Sender:
    """
    Args:
        run: prepared with the first upload where nobody has yet.
    Attributes:
        best_before: what an earlier start of the run left in the bucket; known once the run is prepared.
    """

    def __init__(self, run: RunBucket, folder: RunFolder, outbox: Outbox, rank: int) -> None:
        self.run, self.outbox, self.rank = run, outbox, rank
        self.small_files = SmallFiles(run, folder)
        self.best_before: Pointer | None = None
        self._is_prepared = False

    def send(self, item: Item, cancelled: Callable[[], bool]) -> StoredObject | None:
        """What a pointer names now; None where no pointer was this rank's to move.

        Raises:
            StoreError: it could not be sent.
        """
        self._prepare()
        if item.kind == "files":
            self.run.check_current()
            self.small_files.send(cancelled)
            return None
        stored, known = self._send_file(item, cancelled), item.sidecar
        self.run.move(
            item.kind, stored, step=item.step, epoch=known.epoch, metric=known.metric, only_forward=item.adopted
        )
        return stored

    def _prepare(self) -> None:
        """Once: become the newest start of the run."""
        if not self._is_prepared:
            self.run.prepare()
            self.best_before = self.run.read_pointer("best")[0]
            self.outbox.note(generation=self.run.generation)  # for whoever sends what is left after its end
            self._is_prepared = True

    def _send_file(self, item: Item, cancelled: Callable[[], bool]) -> StoredObject:
        sha256 = item.sidecar.sha256
        key = self.run.checkpoint_key(item.kind, item.step, sha256)
        return self.run.store.put(key, item.path, sha256=sha256, cancelled=cancelled)
