"""Atomic writer of token files, whose folder is renamed into place at the end, and a cache of token files."""

import fcntl
import hashlib
import os
import shutil
import socket
import struct
import tempfile
import time
import zlib
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, final
from uuid import uuid4

from pydantic import JsonValue
from torch import Tensor

from d9d_dist import UserError
from d9d_dist.host_lock import host_lock
from d9d_loop.data.token_file import (
    DOCUMENTS,
    MANIFEST,
    MASKS,
    TOKENS,
    FileRecord,
    TokenDtype,
    TokenFile,
    TokenManifest,
)

_TYPE_CODES = {"uint16": "H", "uint32": "I"}


@final
class TokenFileWriter:
    """Context manager that writes a folder for `TokenFile`.

    The complete folder appears when the `with` block ends; after an exception, nothing remains. The temporary folder of
    a killed process is removed by the next process on the same machine that writes to the same parent folder.

    Args:
        vocab_size: Vocabulary size. Up to 65,536 tokens are stored as uint16, larger vocabularies as uint32.
        about: Metadata for the manifest, such as the name of the tokenizer.
        with_masks: If True, each document has a loss mask.

    Raises:
        UserError: If the folder exists or `vocab_size` is not in 1 to 2^32; at exit, if no document was appended.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        vocab_size: int,
        about: Mapping[str, JsonValue] | None = None,
        with_masks: bool = False,
    ) -> None:
        self._folder, self._about, self._with_masks = Path(folder), dict(about or {}), with_masks
        if self._folder.exists() or self._folder.is_symlink():  # also a link to nothing
            raise UserError(f"{folder} already exists; expected a new folder. Remove it, or choose another folder.")
        if not 0 < vocab_size <= 1 << 32:
            raise UserError(f"vocab_size = {vocab_size}; expected 1 to 2^32.")
        self._vocab_size = vocab_size
        self._dtype: TokenDtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._num_tokens = self._num_documents = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._path = stack.enter_context(new_folder(self._folder))
            self._tokens, self._documents = (_DigestedFile(self._path / name) for name in (TOKENS, DOCUMENTS))
            self._documents.write(struct.pack("<q", 0))
            self._masks = _DigestedFile(self._path / MASKS) if self._with_masks else None
            stack.push(self._finish)
            self._stack = stack.pop_all()
        return self

    def append(self, tokens: Sequence[int] | Tensor, *, mask: Sequence[bool] | None = None) -> None:
        """Append a document: a sequence of integers, or an integer tensor [n].

        `mask` has a value for each token, True if the token contributes to the loss. It is required if the file has
        masks, and an error otherwise. An empty document, a token outside the vocabulary, or a mask of another length
        raises `UserError`.
        """
        # A list, because array(code, bytes) would reinterpret the bytes.
        values = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        if not values:
            raise UserError(f"document {self._num_documents} has no tokens; expected at least one. Omit the document.")
        if min(values) < 0 or max(values) >= self._vocab_size:
            raise UserError(
                f"document {self._num_documents} has the tokens {min(values)} to {max(values)}; expected 0 to "
                f"{self._vocab_size - 1}. Pass the tokenizer's vocab_size, special tokens included."
            )
        if (self._masks is None) != (mask is None) or (mask is not None and len(mask) != len(values)):
            raise UserError(
                f"document {self._num_documents} has {len(values)} tokens and "
                f"{'no mask' if mask is None else f'a mask of length {len(mask)}'}; expected a mask of the same length "
                "if with_masks is set, else no mask."
            )
        if self._masks is not None and mask is not None:
            self._masks.write(bytes(map(bool, mask)))
        self._tokens.write(array(_TYPE_CODES[self._dtype], values).tobytes())
        self._num_tokens += len(values)
        self._num_documents += 1
        self._documents.write(struct.pack("<q", self._num_tokens))

    def describe(self, **about: JsonValue) -> None:
        """Add metadata to the manifest, such as counts that are known at the end."""
        self._about.update(about)

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def _finish(self, kind: type[BaseException] | None, *_: object) -> None:
        files = {TOKENS: self._tokens.finish(), DOCUMENTS: self._documents.finish()}
        if self._masks is not None:
            files[MASKS] = self._masks.finish()
        if kind is not None:
            return
        if not self._num_documents:
            raise UserError(f"{self._folder}: no documents were written; expected at least one. Check the input.")
        manifest = TokenManifest(
            dtype=self._dtype,
            num_tokens=self._num_tokens,
            num_documents=self._num_documents,
            files=files,
            about=self._about,
        )
        last = _DigestedFile(self._path / MANIFEST)
        last.write(manifest.model_dump_json(indent=2).encode() + b"\n")
        last.finish()


@final
class _DigestedFile:
    """New file, with the SHA-256 digest of the bytes written to it."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self._digest, self._bytes = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def finish(self) -> FileRecord:
        """Flush, fsync and close the file; return its size and digest."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return FileRecord(bytes=self._bytes, sha256=self._digest.hexdigest())


def cached_token_file(
    documents: Sequence[bytes],
    cache: str | Path,
    *,
    tokenize: Callable[[bytes], Sequence[int] | Tensor] = list,
    name: str = "bytes",
    vocab_size: int = 256,
) -> TokenFile:
    """Open the token file of some documents, and write it first if the cache does not contain it.

    The cache key is `name` with a digest of the documents and `vocab_size`. All ranks of a job may call this at once:
    one rank of each machine tokenizes, and the others wait. If tokenizing takes too long, write a token file before the
    job starts with `python -m d9d_loop.data`.

    Documents are text or other data; documents without tokens are skipped. By default, each byte is a token. `name`
    identifies `tokenize` in the cache key, since a function has no digest.

    Raises:
        UserError: If no document has tokens, or a token is outside the vocabulary.
    """
    digest = hashlib.sha256(str(vocab_size).encode())
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    folder = Path(cache, f"{name.replace('/', '-')}-{digest.hexdigest()[:16]}")

    def write() -> None:
        with TokenFileWriter(folder, vocab_size=vocab_size, about={"tokenizer": name}) as writer:
            for document in documents:
                if len(tokens := tokenize(document)):
                    writer.append(tokens)

    return open_or_write(folder, write)


def open_or_write(folder: Path, write: Callable[[], object]) -> TokenFile:
    """Open a token file; see `write_once`."""
    write_once(folder, write)
    return TokenFile(folder)


def write_once(folder: Path, write: Callable[[], object]) -> None:
    """Call `write`, which writes a folder, if there is no such folder. All ranks of a job may call this at once.

    One rank of each machine writes, and the others wait for it. Each writes a temporary folder, and the first one to
    finish renames its folder into place. If `write` raises `UserError`, the other ranks of its machine raise it too,
    also those that call this later. A process that has raised it before, or that started later, writes again.
    """
    key = str(folder.resolve())
    failure = Path(tempfile.gettempdir()) / f"d9d-failed-{os.getuid()}-{zlib.crc32(key.encode()):08x}"
    before = _RAISED.get(failure) or _process_start()
    if folder.exists():
        return
    with host_lock("tokens", key):
        if folder.exists():
            return
        if failure.exists() and (failed := failure.stat().st_mtime_ns) > before:
            _RAISED[failure] = failed
            raise UserError(failure.read_text(encoding="utf-8"))
        try:
            write()
        except (OSError, ValueError) as error:
            if folder.exists():  # another machine has written it
                return
            if isinstance(error, UserError):
                descriptor = os.open(failure, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(str(error))
                _RAISED[failure] = failure.stat().st_mtime_ns
            raise
        failure.unlink(missing_ok=True)


_RAISED: dict[Path, int] = {}
"""Times in ns of the failures that this process has raised."""


def _process_start() -> int:
    """Return the time in ns at which this process started; the current time on a system without `/proc`."""
    now = time.time_ns()
    with suppress(FileNotFoundError):
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return now - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return now


_SUFFIX = ".d9d-partial"


@contextmanager
def new_folder(target: Path) -> Generator[Path]:
    """Yield a new, empty folder beside `target`; rename it to `target` at the end, or remove it after an exception.

    Folders beside `target` that killed processes of this machine left are removed first: a writer holds a `flock`,
    which the operating system releases when the writer dies. On a file system without locks, no folder is removed.
    Since locks may be local to a machine, a process removes only folders whose name contains its own host name. At the
    end, `OSError` is raised if `target` is a file or a non-empty folder.
    """
    here = f".{socket.gethostname()}."
    for left in target.parent.glob(f".*{_SUFFIX}"):
        if here in left.name:
            _remove_abandoned(left)
    unlocked = target.with_name(f".{target.name}{here}{uuid4().hex}")
    path = unlocked.with_name(f"{unlocked.name}{_SUFFIX}")
    unlocked.mkdir(parents=True)
    descriptor = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # the file system does not support locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        unlocked.rename(path)  # others search for this name, so the lock comes first
        yield path
        path.rename(target)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder if its lock is free, which means that its writer has ended."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
