"""Checkpoints that are written beside the training: one after the other, each complete before the next is begun."""

import threading
from collections import deque
from collections.abc import Callable

from lockstep.storage.background import lower_priority


class _Write:
    """A thread of its own, which never keeps a process from ending."""

    def __init__(self, step: int, work: Callable[[], None], then: Callable[[], None], former: "_Write | None") -> None:
        self.step, self.then = step, then
        self.error: BaseException | None = None
        self.work, self.former = work, former
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        lower_priority()
        if self.former is not None:
            self.former.thread.join()
        try:
            if self.former is None or self.former.error is None:
                self.work()
        except BaseException as error:  # raised where training looks after it; dcp's is no Exception
            self.error = error
        del self.work, self.former  # and the copy that it held


class BackgroundWrites:
    """What was begun and has not been looked after yet, the oldest first."""

    def __init__(self) -> None:
        self._open: deque[_Write] = deque()

    @property
    def are_open(self) -> bool:
        return bool(self._open)

    def begin(self, step: int, work: Callable[[], None], then: Callable[[], None]) -> None:
        """
        Args:
            work: in the thread, after all that was begun before.
            then: in the caller's, once that has come to its end.
        """
        self._open.append(_Write(step, work, then, self._open[-1] if self._open else None))

    def look(self) -> None:
        """Costs nothing where nothing has ended.

        Raises:
            What the work has raised.
        """
        while self._open and not self._open[0].thread.is_alive():
            ended = self._open.popleft()
            if ended.error is not None:
                self._open.clear()
                raise ended.error
            ended.then()

    def wait(self, but_of_step: int | None = None) -> None:
        """Until all is written, but for what is of this step. Raises as `look`."""
        for write in [write for write in self._open if write.step != but_of_step]:
            write.thread.join()
        self.look()
