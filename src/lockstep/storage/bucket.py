"""One S3 bucket: objects that are whole and verified, small JSON files with compare-and-swap, sweeps.

Every method raises StoreError (s3_client.py) and nothing of boto3. Takes a client, so tests give any they like.
"""

import base64
import hashlib
import math
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.storage.background import in_parallel
from lockstep.storage.s3 import PARALLEL_PARTS, S3Options, StoreError, make_client, translated

PART_BYTES = 16 * 2**20  # a larger file goes in parts of at least this, so that 4 of them are under way at once
LARGE_PART_BYTES = 64 * 2**20  # fewer requests for a large one; costs 6 parts of memory
MAX_PARTS = 10_000
MAX_SMALL_BYTES = 2**20
READ_BYTES = 2**20


@dataclass(frozen=True)
class StoredObject:
    """An object that is complete in the bucket: its size and checksum were read back."""

    key: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checksums:
    """The sha256 of the whole, and what the store must say after an upload, as S3 writes it: the whole's SHA256, or
    the CRC32 of the parts' CRC32s with their number (one sha256 pass less, on each side, for a large file)."""

    sha256: str
    as_stored: str
    algorithm: str = "SHA256"

    @property
    def num_parts(self) -> str:
        return self.as_stored.partition("-")[2]


class Bucket:
    """
    Args:
        client: boto3's, or anything with its methods.
        conditional: whether the store honours If-Match and If-None-Match; `probe` finds out.
    """

    def __init__(self, options: S3Options, client: Any = None, part_bytes: int = PART_BYTES) -> None:
        self.options = options
        self.client = client if client is not None else make_client(options)
        self.part_bytes = part_bytes
        self.conditional = True
        self._unaborted: set[tuple[str, str]] = set()

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        with translated(self.options):
            return getattr(self.client, method)(Bucket=self.options.bucket, **arguments)

    # Whole objects

    def put_file(
        self,
        path: Path,
        key: str,
        *,
        sha256: str | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> StoredObject:
        """Upload a file as it is now (what is appended meanwhile is left out), then read size and checksum back.

        A large one goes in parts, in parallel, from one pass over the file.

        Args:
            sha256: what the file must have; another one means that it was damaged on this machine.
            cancelled: asked between parts; True ends the upload with StoreError("aborted").
        """
        with translated(self.options):
            file = open(path, "rb")  # noqa: SIM115 (closed below; opening has its own error sentence)
        with file:
            size = os.fstat(file.fileno()).st_size
            if size <= self.part_bytes:
                return self.put_bytes(key, file.read(size), sha256=sha256)
            sums = self._put_parts(file, size, key, sha256, cancelled)
        self._verify(key, size, sums)
        return StoredObject(key, size, sums.sha256)

    def put_bytes(self, key: str, data: bytes, *, sha256: str | None = None) -> StoredObject:
        sums = self._put(key, data, sha256, self.options.put_arguments())
        self._verify(key, len(data), sums)
        return StoredObject(key, len(data), sums.sha256)

    def _put(self, key: str, data: bytes, sha256: str | None, arguments: dict[str, str]) -> Checksums:
        digest = hashlib.sha256(data)
        _check_local(key, sha256, digest.hexdigest())
        sums = Checksums(digest.hexdigest(), _base64(digest.digest()))
        metadata = {"sha256": sums.sha256}
        self._call("put_object", Key=key, Body=data, ChecksumSHA256=sums.as_stored, Metadata=metadata, **arguments)
        return sums

    def _put_parts(
        self, file: BinaryIO, size: int, key: str, sha256: str | None, cancelled: Callable[[], bool]
    ) -> Checksums:
        self.retry_aborts()
        arguments: dict[str, Any] = dict(self.options.put_arguments())
        if sha256:
            arguments["Metadata"] = {"sha256": sha256}
        upload = self._call("create_multipart_upload", Key=key, ChecksumAlgorithm="CRC32", **arguments)["UploadId"]
        try:
            parts, whole = self._send_parts(file, size, key, upload, cancelled)
            _check_local(key, sha256, whole)
            self._complete(key, upload, parts)
        except BaseException:
            self._unaborted.add((key, upload))
            self.retry_aborts()
            raise
        sums = b"".join(base64.b64decode(part["ChecksumCRC32"]) for part in parts)
        return Checksums(whole, f"{_crc32(sums)}-{len(parts)}", "CRC32")

    def _complete(self, key: str, upload: str, parts: list[dict[str, Any]]) -> None:
        try:
            self._call("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
        except StoreError as error:
            if error.kind != "aborted":
                raise
            try:
                self.head(key)  # it may be complete, and only the answer was lost: a retry then finds no upload
            except StoreError:
                raise error from None

    def _send_parts(
        self, file: BinaryIO, size: int, key: str, upload: str, cancelled: Callable[[], bool]
    ) -> tuple[list[dict[str, Any]], str]:
        """Read once, in order; hash the whole here, check-sum and send the parts in a few threads."""
        whole = hashlib.sha256()

        def send(number: int, data: bytes) -> dict[str, Any]:
            checksum = _crc32(data)
            answer = self._call(
                "upload_part", Key=key, UploadId=upload, PartNumber=number, Body=data, ChecksumCRC32=checksum
            )
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": checksum}

        def blocks() -> Iterator[tuple[int, bytes]]:
            part_bytes, left = self._part_bytes(size), size
            for number in range(1, math.ceil(size / part_bytes) + 1):
                if cancelled():
                    raise StoreError("aborted", "the upload was stopped")
                data = file.read(min(part_bytes, left))
                left -= len(data)
                whole.update(data)
                yield number, data
            if left:
                raise StoreError("local", "the file became shorter while it was read")

        parts = in_parallel(send, blocks(), PARALLEL_PARTS)
        return sorted(parts, key=lambda part: part["PartNumber"]), whole.hexdigest()

    def _part_bytes(self, size: int) -> int:
        wished = min(max(self.part_bytes, size // 8), max(self.part_bytes, LARGE_PART_BYTES))
        return max(wished, math.ceil(size / MAX_PARTS))

    def _verify(self, key: str, size: int, sums: Checksums) -> None:
        """Ask the store what it holds; where it keeps no checksums, read the object back."""
        head = self._call("head_object", Key=key, ChecksumMode="ENABLED")
        stored = head.get(f"Checksum{sums.algorithm}")
        if stored is not None and stored.partition("-")[2] != sums.num_parts:
            stored = None  # of another kind than ours, e.g. of the whole object
        intact = head["ContentLength"] == size and (stored or sums.as_stored) == sums.as_stored
        if intact and stored is None:
            intact = self.sha256_of(key) == sums.sha256
        if not intact:
            raise StoreError("corrupt", f"{key} did not arrive whole, the store holds other bytes than were sent")

    def sha256_of(self, key: str) -> str:
        digest = hashlib.sha256()
        for block in self.read_blocks(key)[1]:
            digest.update(block)
        return digest.hexdigest()

    def head(self, key: str) -> dict[str, Any]:
        return self._call("head_object", Key=key, ChecksumMode="ENABLED")

    def read_blocks(self, key: str, start: int = 0, etag: str | None = None) -> tuple[int, Iterator[bytes]]:
        """(bytes from `start` on, the blocks); `etag` makes it fail where the object is another one by now."""
        arguments = {"IfMatch": etag} if etag else {}
        if start:
            arguments["Range"] = f"bytes={start}-"
        answer = self._call("get_object", Key=key, **arguments)

        def blocks() -> Iterator[bytes]:
            with translated(self.options):
                yield from answer["Body"].iter_chunks(READ_BYTES)

        return answer["ContentLength"], blocks()

    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object under `prefix`."""
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=prefix, **token)
            yield from ((entry["Key"], entry["Size"]) for entry in page.get("Contents", []))
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        self._call("delete_object", Key=key)

    # Unfinished multipart uploads: invisible in listings, and billed

    def retry_aborts(self) -> None:
        """Abort what this process left unfinished; what cannot be aborted now is kept for the next time."""
        for key, upload in list(self._unaborted):
            try:
                self._call("abort_multipart_upload", Key=key, UploadId=upload)
            except StoreError as error:
                if error.kind not in ("aborted", "missing"):
                    return
            self._unaborted.discard((key, upload))

    def abort_unfinished(self, prefix: str) -> int:
        """Abort every unfinished upload under `prefix`; returns how many there were."""
        count = 0
        marker: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Prefix=prefix, **marker)
            for upload in page.get("Uploads", []):
                self._unaborted.add((upload["Key"], upload["UploadId"]))
                count += 1
            self.retry_aborts()
            if not page.get("IsTruncated"):
                return count
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    # Small files with compare-and-swap

    def read_small(self, key: str) -> tuple[bytes | None, str | None]:
        """(content, ETag), or (None, None) where there is none; never more than MAX_SMALL_BYTES."""
        try:
            answer = self._call("get_object", Key=key)
        except StoreError as error:
            if error.kind == "missing":
                return None, None
            raise
        if answer["ContentLength"] > MAX_SMALL_BYTES:
            raise StoreError("corrupt", f"{key} is far larger than what is written there")
        with translated(self.options):
            return answer["Body"].read(), answer["ETag"]

    def swap(self, key: str, data: bytes, etag: str | None) -> None:
        """Write only where the object still has this ETag (None: does not exist).

        `data` must be unlike any other writer's, so that an answer lost on the way can be told from a defeat.
        Raises:
            StoreError: kind "conflict" where another writer was first.
        """
        conditions = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
        if not self.conditional:
            conditions = {}
            if self.read_small(key)[1] != etag:
                raise StoreError("conflict", "another process wrote the object in the meantime")
        try:
            self._put(key, data, None, {**self.options.encryption(), **conditions})
        except StoreError as error:
            if error.kind != "conflict" or self.read_small(key)[0] != data:
                raise

    def probe(self, prefix: str, writers: int = 3) -> None:
        """Put, read back and delete a small object; sets `conditional` by letting a few writers race.

        Raises:
            StoreError: the bucket cannot be used, and why.
        """
        key = f"{prefix}probe-{secrets.token_hex(6)}"
        self.put_bytes(key, b"probe")
        try:
            etag = self.head(key)["ETag"]
            self.conditional = self._winners(f"{key}-new", {"IfNoneMatch": "*"}, writers) == 1
            self.conditional = self.conditional and self._winners(key, {"IfMatch": etag}, writers) == 1
        finally:
            self.delete(key)
            self.delete(f"{key}-new")

    def _winners(self, key: str, conditions: dict[str, str], writers: int) -> int:
        def write(number: int) -> int:
            try:
                self._put(key, f"writer {number}".encode(), None, {**self.options.put_arguments(), **conditions})
            except StoreError as error:
                if error.kind in ("unreachable", "busy"):
                    raise
                return 0
            return 1

        return sum(in_parallel(write, ((number,) for number in range(writers)), writers))


def _check_local(key: str, expected: str | None, actual: str) -> None:
    if expected is not None and expected != actual:
        raise StoreError("local", f"the file for {key} was damaged on this machine (its sha256 is not the one saved)")


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _crc32(data: bytes) -> str:
    return _base64(zlib.crc32(data).to_bytes(4, "big"))
