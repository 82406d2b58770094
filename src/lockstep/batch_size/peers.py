"""What the ranks of a batch search tell each other when one of them ends, so that all end, and for the right reason."""

import logging
import os
import sys
import threading
import time
from typing import Any, NoReturn

from lockstep.batch_size.sessions import EXIT_OUT_OF_MEMORY, EXIT_PEER_ENDED, EXIT_PEER_FAILED

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
GONE_WORDS = (  # what gloo and NCCL say when the other end of a connection has closed
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "ncclRemote",
)


class Peers:
    """The other ranks of this session.

    Args:
        store: a store of torch.distributed that rank 0 holds; None: there are no others.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self.gone, self.leaving = threading.Event(), threading.Event()

    def watch(self) -> None:
        """From now on end this process when another rank has: a collective on a GPU would wait for it in vain."""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.leaving.is_set():
            time.sleep(INTERVAL_S)
            if (code := self.code_of_peer()) is not None:
                self.gone.set()
                time.sleep(INTERVAL_S)
                if not self.leaving.is_set():
                    leave_at_once(code)

    def announce(self, code: int) -> None:
        """This rank ends with this exit code; what another one has announced before stays."""
        self.leaving.set()
        if self.store is None:
            return
        try:
            self.store.compare_set("ended", "", str(code))
        except Exception as error:
            log.info(f"The end could not be announced ({type(error).__name__}).")
        if self.rank == 0 and code != EXIT_OUT_OF_MEMORY:
            time.sleep(3 * INTERVAL_S)  # its store goes with it, and without a word the others would assume memory

    def code_of_peer(self, error: BaseException | None = None) -> int | None:
        """The exit code for this rank where another one ended first, None where none did.

        Args:
            error: what this rank fails with.
        """
        if self.store is None:
            return None
        said = self._said()
        if said is not None:
            return EXIT_PEER_ENDED if said == EXIT_OUT_OF_MEMORY else EXIT_PEER_FAILED
        closed = isinstance(error, RuntimeError) and any(words in str(error) for words in GONE_WORDS)
        return EXIT_PEER_ENDED if closed or self.gone.is_set() else None

    def _said(self) -> int | None:
        """The code that the first rank to end has announced."""
        try:
            return int(self.store.get("ended")) if self.store.check(["ended"]) else None
        except Exception as error:  # rank 0 is gone
            if not self.gone.is_set():
                log.info(f"The ranks' store is gone ({type(error).__name__}).")
            self.gone.set()
            return None


def leave_at_once(code: int) -> NoReturn:
    """End this process without taking anything apart: threads in the store's C++ would abort an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
