"""Files and folders of an object store, such as `s3://bucket/run`, through fsspec.

An `ObjectPath` has the methods of `pathlib.Path` that checkpoints and models need. An object appears when its upload is
complete, so a file needs no temporary name. There is no rename: the manifest, which is uploaded last, completes a
checkpoint.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar, final

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_state._digests import PartRecord
from d9d_state._s3_upload import S3Object
from d9d_state.errors import UnreadableError

_MULTIPART = 1 << 26  # bytes of one part of an upload
_ATTEMPTS = 6
_FIRST_WAIT = 0.2  # seconds; doubled after each attempt
_FINAL = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_Result = TypeVar("_Result")


@final
@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """Path of an object, or the common prefix of several.

    Attributes:
        url: URL without a slash at the end.
        filesystem: fsspec's file system of the URL's protocol.
    """

    url: str
    filesystem: Any = field(compare=False, repr=False)

    @classmethod
    def open(cls, url: str, *, options: Mapping[str, Any] | None = None) -> Self:
        """Return the path of a URL, with fsspec's `options` for its protocol. Credentials come from the environment.

        Raises:
            UserError: If the package of the protocol is not installed, or the protocol is unknown.
        """
        import fsspec  # noqa: PLC0415 - slow

        try:
            filesystem, _ = fsspec.core.url_to_fs(url, use_listings_cache=False, **(options or {}))
        except (ImportError, ValueError) as error:
            raise UserError(
                f"{url} cannot be opened: {error}; expected a URL of an installed protocol of fsspec. For s3://: "
                f"{install_hint('d9d-state', 's3')}"
            ) from error
        return cls(url.rstrip("/"), filesystem)

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(f"{self.url}/{name}", self.filesystem)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """Path without its last part."""
        return ObjectPath(self.url.rpartition("/")[0], self.filesystem)

    def exists(self) -> bool:
        """Return True if the object, or an object below the prefix, exists."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Return True if an object below the prefix exists."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Return True if the object exists."""
        return self._kind() == "file"

    def _kind(self) -> str | None:
        # fsspec's exists(), isdir() and isfile() return False after any error, as if there were no checkpoint.
        try:
            return str(self._retry(partial(self.filesystem.info, self.url))["type"])
        except FileNotFoundError:
            return None

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Iterate over the direct children."""
        return (self / name for name in self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the direct children in bytes, by name, with one listing; empty without children."""
        try:
            listed = self._retry(partial(self.filesystem.ls, self.url, detail=True))
        except FileNotFoundError:
            return {}
        sizes = {str(each["name"]).rstrip("/").rpartition("/")[2]: int(each["size"] or 0) for each in listed}
        return {name: size for name, size in sizes.items() if name not in ("", self.name)}

    def info(self) -> dict[str, Any]:
        """Return the size in bytes and other properties; raise `FileNotFoundError` if there is no such object."""
        return dict(self._retry(partial(self.filesystem.info, self.url)))

    def read_bytes(self) -> bytes:
        """Return the content."""
        return bytes(self._retry(partial(self.filesystem.cat_file, self.url)))

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Read a range into a buffer, with one request for these bytes only; return the number of bytes.

        The number is smaller than the size of the buffer if the object ends earlier.
        """
        if not buffer:
            return 0
        end = position + len(buffer)
        data = self._retry(partial(self.filesystem.cat_file, self.url, start=position, end=end))
        buffer[: len(data)] = data
        return len(data)

    def upload(self, parts: Iterable[bytes | memoryview]) -> tuple[PartRecord, ...]:
        """Upload an object, in several requests if it is large; return size and digest of each part.

        In S3, a large upload continues where an earlier upload was interrupted, in this process or another. In other
        stores, an upload is repeated from its start after a failed request.
        """
        views = [memoryview(part).cast("B") for part in parts]
        self._retry(partial(self._upload_once, views))
        return tuple(map(PartRecord.of, views))

    def remove(self) -> None:
        """Delete the object, if it exists."""
        with suppress(FileNotFoundError):
            self._retry(partial(self.filesystem.rm_file, self.url))

    def remove_all(self, *, first: Sequence[str] = ()) -> None:
        """Delete all objects below the prefix, starting with the objects named in `first`."""
        for child in sorted(self.iterdir(), key=lambda child: (child.name not in first, child.name)):
            child.remove()

    def abort_uploads(self, is_chosen: Callable[[str], bool]) -> None:
        """Delete incomplete uploads to S3, below the children for whose names `is_chosen` returns True."""
        if (prefix := (self / "")._in_s3) is None:
            return
        for found, upload_id in self._retry(prefix.unfinished):
            if is_chosen(found.key.removeprefix(prefix.key).partition("/")[0]):
                with suppress(FileNotFoundError):
                    self._retry(partial(found.abort, upload_id))

    @property
    def _in_s3(self) -> S3Object | None:
        if "s3" not in self.filesystem.protocol:
            return None
        bucket, key, _ = self.filesystem.split_path(self.url)
        return S3Object(self.filesystem, bucket, key)

    def _upload_once(self, views: Sequence[memoryview]) -> None:
        if sum(map(len, views)) <= _MULTIPART:
            self.filesystem.pipe_file(self.url, b"".join(views))
            return
        if (in_s3 := self._in_s3) is not None:
            in_s3.upload(views, _MULTIPART)
            return
        with self.filesystem.open(self.url, "wb", block_size=_MULTIPART) as file:
            for view in views:
                for start in range(0, len(view), _MULTIPART):
                    file.write(view[start : start + _MULTIPART])

    def _retry(self, work: Callable[[], _Result]) -> _Result:
        """Call a function again after errors that may be temporary, with exponential backoff and jitter."""
        wait = _FIRST_WAIT
        for attempt in range(_ATTEMPTS):
            try:
                return work()
            except PermissionError as error:
                raise PermissionError(
                    f"{self}: the store denies access: {error}. Check the credentials, their permissions, and the "
                    "clock of this host, which may differ from the store's by 15 minutes"
                ) from error
            except _FINAL:
                raise
            except Exception as error:  # the clients of object stores raise exception classes of their own
                if attempt == _ATTEMPTS - 1:
                    raise UnreadableError(f"{self} could not be reached in {_ATTEMPTS} attempts: {error}") from error
            time.sleep(wait * random.uniform(0.5, 1.5))  # noqa: S311
            wait *= 2
        raise AssertionError
