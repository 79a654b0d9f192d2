"""Multipart uploads to S3 that continue where an earlier upload of the same object was interrupted.

S3 keeps the parts of an incomplete upload. A stored part is used if its ETag, the MD5 of its content, matches the bytes
to upload. With KMS encryption the ETag is not an MD5, so all parts are sent again. fsspec has no such operations for
other stores.
"""

import errno
import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

_LOGGER = logging.getLogger("d9d.state")
_PARTS_IN_FLIGHT = 4  # each part in flight is a copy in memory


@final
@dataclass(frozen=True, slots=True)
class S3Object:
    """Object in S3, or the common prefix of several keys, in s3fs's file system."""

    filesystem: Any
    bucket: str
    key: str

    def upload(self, views: Sequence[memoryview], part_size: int) -> None:
        """Store the concatenation of `views`, and send only the parts that the store does not have.

        Raises the errors of s3fs. Calling it again continues the upload.
        """
        size = sum(map(len, views))
        starts = range(0, size, part_size)
        with ThreadPoolExecutor(_PARTS_IN_FLIGHT, thread_name_prefix="d9d-upload") as pool:
            found = None
            with suppress(FileNotFoundError):
                found = self._call("head_object", Key=self.key)
            if found is not None and found["ContentLength"] == size:
                digests = pool.map(lambda start: _md5(_range(views, start, part_size)).digest(), starts)
                if found["ETag"] == f'"{_md5(b"".join(digests)).hexdigest()}-{len(starts)}"':
                    return
            upload_id, stored = self._continued()

            def part(number: int, start: int) -> dict[str, Any]:
                data = _range(views, start, part_size)
                etag = stored.get(number)
                if etag is None or etag != f'"{_md5(data).hexdigest()}"':
                    place = {"Key": self.key, "UploadId": upload_id, "PartNumber": number}
                    etag = self._call("upload_part", **place, Body=data)["ETag"]
                return {"PartNumber": number, "ETag": etag}

            try:
                parts = list(pool.map(part, range(1, len(starts) + 1), starts))
                complete = {"Key": self.key, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
                self._call("complete_multipart_upload", **complete)
            except FileNotFoundError as error:  # the upload was completed, but the response was lost
                raise ConnectionError(f"the upload of {self.key} does not exist any more: {error}") from error
            except OSError as error:
                if error.errno == errno.ENOSYS:  # the server cannot replace a stored part: the next attempt sends all
                    self.abort(upload_id)
                raise

    def unfinished(self) -> list[tuple["S3Object", str]]:
        """Return the object and the id of each incomplete upload whose key has this prefix."""
        try:
            uploads = self._listed("Uploads", "list_multipart_uploads", "KeyMarker", "UploadIdMarker", Prefix=self.key)
        except FileNotFoundError:  # some servers answer NoSuchUpload if there is none
            return []
        return [(S3Object(self.filesystem, self.bucket, each["Key"]), str(each["UploadId"])) for each in uploads]

    def abort(self, upload_id: str) -> None:
        """Delete an incomplete upload and its parts."""
        self._call("abort_multipart_upload", Key=self.key, UploadId=upload_id)

    def _continued(self) -> tuple[str, dict[int, str]]:
        """Return upload id and ETags of the stored parts of an incomplete upload of this object, or of a new upload."""
        try:
            for each, upload_id in self.unfinished():
                if each.key == self.key:
                    parts = self._listed("Parts", "list_parts", "PartNumberMarker", Key=self.key, UploadId=upload_id)
                    return upload_id, {each["PartNumber"]: each["ETag"] for each in parts}
        except PermissionError as error:
            _LOGGER.warning("%s: uploads cannot be listed, so no interrupted upload is continued: %s", self.key, error)
        return str(self._call("create_multipart_upload", Key=self.key)["UploadId"]), {}

    def _listed(self, result: str, method: str, *markers: str, **arguments: Any) -> list[dict[str, Any]]:
        """Return the entries of all pages of a listing."""
        found: list[dict[str, Any]] = []
        while True:
            page = self._call(method, **arguments)
            found += page.get(result, ())
            if not page.get("IsTruncated"):
                return found
            arguments |= {marker: page[f"Next{marker}"] for marker in markers}

    def _call(self, method: str, **arguments: Any) -> Any:
        return self.filesystem.call_s3(method, Bucket=self.bucket, **arguments)


def _range(views: Sequence[memoryview], start: int, size: int) -> bytes:
    """Return `size` bytes, or fewer at the end, of the concatenation of `views`, from `start`."""
    blocks: list[memoryview] = []
    end = start + size
    for view in views:
        blocks.append(view[max(start, 0) : max(end, 0)])
        start, end = start - len(view), end - len(view)
    return b"".join(blocks)


def _md5(data: bytes) -> Any:
    return hashlib.md5(data, usedforsecurity=False)
