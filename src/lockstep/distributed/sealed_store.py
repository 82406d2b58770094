"""A store of torch.distributed whose values only a holder of the run's secret can write."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.distributed.secret import TAG_BYTES, Secret
from lockstep.runs.errors import UserError


class SealedStore(dist.Store):
    """Appends a tag over key and value to each value that it writes, and refuses a value without the right one.

    torch calls it from C++ too, and does not keep it alive: whoever makes one holds on to it. Counters (`add`) are the
    store's own and carry no tag: they decide when ranks go on, and nothing else.

    Args:
        store: the real one.
        secret: None: between nodes without a secret; everything is taken as it comes.
    """

    def __init__(self, store: Any, secret: Secret | None) -> None:
        super().__init__()
        self.store, self.secret = store, secret
        super().set_timeout(store.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self.store.set(key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        """
        Raises:
            UserError: a stranger has written the value.
        """
        return self._open(key, self.store.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """An empty `expected` means that there is no value yet."""
        before = self._seal(key, expected).decode() if expected else ""
        return self._open(key, self.store.compare_set(key, before, self._seal(key, desired).decode()))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.store.wait(keys, timeout or self.store.timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self.store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)

    def num_keys(self) -> int:
        return self.store.num_keys()

    def clone(self) -> "SealedStore":
        return SealedStore(self.store.clone(), self.secret)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self.store.set_timeout(timeout)

    def _seal(self, key: str, value: str | bytes) -> bytes:
        value = value.encode() if isinstance(value, str) else bytes(value)
        return value + self.secret.tag(b"store", key.encode(), value) if self.secret else value

    def _open(self, key: str, sealed: bytes) -> bytes:
        if self.secret is None:
            return sealed
        value, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not self.secret.proves(tag, b"store", key.encode(), value):
            raise UserError(
                f"a stranger wrote {key} into the store of this run's ranks, or LOCKSTEP_SECRET differs between nodes: "
                "keep others away from MASTER_PORT, and give every node the same."
            )
        return value
