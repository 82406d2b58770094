"""Large files to S3: in parts, several at once, from one pass over the file; and what interrupted ones left there.

An unfinished multipart upload is in no listing, and it is billed.
"""

import base64
import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from lockstep.storage.background import in_parallel
from lockstep.storage.object_store import StoreError
from lockstep.storage.s3_client import PARALLEL_PARTS, S3Requests

PART_BYTES = 16 * 2**20  # a larger file goes in parts of at least this, so that 4 of them are under way at once
LARGE_PART_BYTES = 64 * 2**20  # fewer requests for a large one; costs 6 parts of memory
MAX_PARTS = 10_000


@dataclass(frozen=True)
class Sums:
    """The sha256 of the whole, and what the store must say after an upload, as S3 writes it: the whole's SHA256, or
    the CRC32 of the parts' CRC32s with their number (one sha256 pass less, on each side, for a large file)."""

    sha256: str
    as_stored: str
    algorithm: str = "SHA256"

    @property
    def num_parts(self) -> str:
        return self.as_stored.partition("-")[2]


@dataclass(frozen=True)
class Part:
    number: int
    etag: str
    crc32: str

    def as_s3(self) -> dict[str, str | int]:
        return {"PartNumber": self.number, "ETag": self.etag, "ChecksumCRC32": self.crc32}


class PartUploads:
    """Uploads in parts to one bucket. Remembers those that it could not end, and tries to again."""

    def __init__(self, requests: S3Requests, part_bytes: int = PART_BYTES) -> None:
        self.requests, self.part_bytes = requests, part_bytes
        self._unfinished: set[tuple[str, str]] = set()

    def send(
        self,
        file: BinaryIO,
        size: int,
        key: str,
        arguments: Mapping[str, object],
        sha256: str | None,
        cancelled: Callable[[], bool],
    ) -> Sums:
        """Upload `size` bytes of an open file; `sha256` is what they must have.

        Raises:
            StoreError: nothing of it stays in the bucket; where that fails too, `end_unfinished` tries again.
        """
        answer = self.requests.call("create_multipart_upload", Key=key, ChecksumAlgorithm="CRC32", **arguments)
        upload: str = answer["UploadId"]
        try:
            parts, whole = self._send_parts(file, size, key, upload, cancelled)
            check_local(key, sha256, whole)
            self._complete(key, upload, parts)
        except BaseException:
            self._unfinished.add((key, upload))
            self.end_unfinished()
            raise
        sums = b"".join(base64.b64decode(part.crc32) for part in parts)
        return Sums(whole, f"{_crc32(sums)}-{len(parts)}", "CRC32")

    def _complete(self, key: str, upload: str, parts: list[Part]) -> None:
        listed = {"Parts": [part.as_s3() for part in parts]}
        try:
            self.requests.call("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload=listed)
        except StoreError as error:
            if error.kind != "aborted":
                raise
            try:  # it may be complete, and only the answer was lost: a retry then finds no upload
                self.requests.call("head_object", Key=key)
            except StoreError:
                raise error from None

    def _send_parts(
        self, file: BinaryIO, size: int, key: str, upload: str, cancelled: Callable[[], bool]
    ) -> tuple[list[Part], str]:
        """Read once, in order; hash the whole here, check-sum and send the parts in a few threads."""
        whole = hashlib.sha256()

        def send(number: int, data: bytes) -> Part:
            crc32 = _crc32(data)
            answer = self.requests.call(
                "upload_part", Key=key, UploadId=upload, PartNumber=number, Body=data, ChecksumCRC32=crc32
            )
            return Part(number, answer["ETag"], crc32)

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
        return sorted(parts, key=lambda part: part.number), whole.hexdigest()

    def _part_bytes(self, size: int) -> int:
        wished = min(max(self.part_bytes, size // 8), max(self.part_bytes, LARGE_PART_BYTES))
        return max(wished, math.ceil(size / MAX_PARTS))

    def end_unfinished(self) -> None:
        """End what this process could not finish; what cannot be ended now is kept for the next time."""
        for key, upload in list(self._unfinished):
            try:
                self.requests.call("abort_multipart_upload", Key=key, UploadId=upload)
            except StoreError as error:
                if error.kind not in ("aborted", "missing"):
                    return
            self._unfinished.discard((key, upload))

    def sweep(self, prefix: str) -> None:
        """End every unfinished upload under `prefix`, whoever began it.

        A role that may not list them is no error: then a lifecycle rule of the bucket has to do it.
        """
        try:
            self._unfinished.update(self.unfinished(prefix))
        except StoreError as error:
            if error.kind != "refused":
                raise
        self.end_unfinished()

    def unfinished(self, prefix: str) -> Iterator[tuple[str, str]]:
        """(key, upload id) of every unfinished upload under `prefix`."""
        marker: dict[str, str] = {}
        while True:
            page = self.requests.call("list_multipart_uploads", Prefix=prefix, **marker)
            yield from ((upload["Key"], upload["UploadId"]) for upload in page.get("Uploads", []))
            if not page.get("IsTruncated"):
                return
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def check_local(key: str, expected: str | None, actual: str) -> None:
    if expected is not None and expected != actual:
        raise StoreError("local", f"the file for {key} was damaged on this machine (its sha256 is not the one saved)")


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
