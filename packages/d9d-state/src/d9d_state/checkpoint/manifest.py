"""Manifest of a checkpoint: tensors, files and digests. It is written last and marks a complete checkpoint."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Self, final

from d9d_dist import Region, UserError
from d9d_state._digests import ALGORITHM, PartRecord
from d9d_state._member import AnyPath, open_reader
from d9d_state.checkpoint.cover import cover_problem
from d9d_state.errors import StateError, VersionError, as_state_error
from d9d_state.json_value import JsonValue, as_list, as_object, dump_json, parse_json
from d9d_state.safetensors_header import dtype_name, dtype_of, parse_shape
from d9d_state.tensor_info import TensorInfo

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
_FORMAT = "d9d-checkpoint"
_VERSION = 3
MAX_MANIFEST_BYTES = 1 << 29  # enough for about three million chunks
_DIGEST = re.compile(r"[0-9a-f]{32}")


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Region of a tensor, with the name of its safetensors file, its byte offset there and its hexadecimal digest."""

    region: Region
    file: str
    start: int
    digest: str


@final
@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Shape, dtype and chunks of a tensor. A tensor without elements has no chunks."""

    info: TensorInfo
    chunks: tuple[Chunk, ...]


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """Record of a file beside the manifest.

    `head` covers the bytes before the tensor chunks: the safetensors header, or the whole file if it has no tensors.
    """

    size: int
    head: PartRecord


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a complete checkpoint.

    `mesh` is informational: the size of every mesh axis at the save. `num_ranks` is the number of ranks that saved.
    `files` has every file except the manifest; heads and chunks cover all bytes of these files.
    """

    run_id: str
    step: int
    metric: float | None
    mesh: Mapping[str, int]
    num_ranks: int
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]

    def dump(self) -> bytes:
        """Encode the manifest as canonical JSON, including its own digest."""
        return with_digest(self.body())

    def body(self) -> dict[str, JsonValue]:
        """Return the manifest as a JSON object, without its digest."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "digests": ALGORITHM,
            "run_id": self.run_id,
            "step": self.step,
            "metric": self.metric,
            "mesh": dict(self.mesh),
            "num_ranks": self.num_ranks,
            "tensors": {name: _dump_tensor(record) for name, record in self.tensors.items()},
            "files": {
                name: {"size": file.size, "head": file.head.size, "digest": file.head.digest}
                for name, file in self.files.items()
            },
        }

    @classmethod
    def joined(cls, shares: Sequence[Self]) -> Self:
        """Return the manifest of a save from all ranks' shares, in rank order, without calling `check`."""
        infos: dict[str, TensorInfo] = {}
        chunks: dict[str, list[Chunk]] = {}
        files: dict[str, FileRecord] = {}
        for share in shares:
            files.update(share.files)
            for name, record in share.tensors.items():
                infos.setdefault(name, record.info)
                chunks.setdefault(name, []).extend(record.chunks)
        tensors = {name: TensorRecord(info, tuple(chunks[name])) for name, info in infos.items()}
        return replace(shares[0], tensors=tensors, files=files)

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the encoded manifest. Equal digests mean identical checkpoints."""
        return hashlib.sha256(self.dump()).hexdigest()

    @classmethod
    def read(cls, folder: AnyPath) -> Self:
        """Read a folder's manifest; raise `StateError` if it is missing or damaged.

        Raise `VersionError` if the manifest is intact, but has another format version or another type of digests.
        """
        path = folder / MANIFEST_NAME
        with as_state_error(errors=(UserError, OSError)), closing(open_reader(folder, MANIFEST_NAME)) as reader:
            if reader.size > MAX_MANIFEST_BYTES:
                raise StateError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes; it is not a manifest.")
            data = reader.read(reader.size, 0)
        try:
            return cls._parse(data)
        except VersionError as error:
            raise VersionError(f"{path}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{path} is damaged: {error}") from error

    @classmethod
    def _parse(cls, data: bytes) -> Self:
        body = without_digest(data)
        if body.get("format") != _FORMAT:
            raise ValueError(f"it does not have the format {_FORMAT}.")
        _check_version(body.get("version"))  # only after the digest matches: otherwise the version may be damaged
        manifest = cls.of_body(body)
        manifest.check()
        return manifest

    @classmethod
    def of_body(cls, body: dict[str, JsonValue]) -> Self:
        """Parse the result of `body`, without calling `check`.

        Raise `ValueError`, `TypeError` or `KeyError` if `body` is malformed, and `VersionError` if its digests are of
        another type.
        """
        names = ("run_id", "step", "metric", "mesh", "num_ranks", "tensors", "files", "digests", "format", "version")
        run_id, step, metric, mesh, num_ranks, tensors, files, digests, *_ = _fields(body, *names)
        if digests != ALGORITHM:
            name = str(digests)[:20]
            raise VersionError(f"its digests are {name}; this d9d-state reads {ALGORITHM}. Install a newer d9d-state.")
        return cls(
            _text(run_id),
            _count(step),
            _metric(metric),
            {name: _count(size) for name, size in as_object(mesh).items()},
            _count(num_ranks),
            {name: _parse_tensor(record) for name, record in as_object(tensors).items()},
            {name: _parse_file(record) for name, record in as_object(files).items()},
        )

    def check(self) -> None:
        """Raise `ValueError` unless chunks cover every tensor, and heads and chunks every file, exactly once."""
        if len(self.files) != 1 + 2 * self.num_ranks:
            raise ValueError(
                f"it lists {len(self.files)} files for {self.num_ranks} ranks; expected 2 per rank and 1 shared file."
            )
        allowed = set(map(tensors_name, range(self.num_ranks)))
        foreign = self.files.keys() - allowed - {STATE_NAME, *map(rank_state_name, range(self.num_ranks))}
        if foreign:
            raise ValueError(f"it lists {', '.join(sorted(foreign))}, which do not belong to a checkpoint.")
        spans: dict[str, list[tuple[int, int, str]]] = {name: [] for name in self.files if name in allowed}
        for name, record in self.tensors.items():
            problem = cover_problem(record.info.shape, [chunk.region for chunk in record.chunks])
            if problem is not None:
                raise ValueError(f"{name}: {problem}")
            for chunk in record.chunks:
                if chunk.file not in spans:
                    raise ValueError(
                        f"{name} is stored in {chunk.file}, which is not a tensor file of this checkpoint."
                    )
                size = chunk.region.num_elements * record.info.dtype.itemsize
                spans[chunk.file].append((chunk.start, chunk.start + size, name))
        for file, record in self.files.items():
            _check_spans(file, record, spans.get(file, []))


def rank_state_name(rank: int) -> str:
    """Return the name of the file with a rank's own state."""
    return f"rank-{rank:05d}.json"


def tensors_name(rank: int) -> str:
    """Return the name of the file with the tensors that a rank wrote."""
    return f"tensors-{rank:05d}.safetensors"


def with_digest(body: Mapping[str, JsonValue]) -> bytes:
    """Encode a JSON object as canonical JSON, with the SHA-256 of its encoding as another key."""
    digest = hashlib.sha256(dump_json(body)).hexdigest()
    return dump_json({**body, "sha256": digest}) + b"\n"


def without_digest(data: bytes) -> dict[str, JsonValue]:
    """Return the JSON object from the result of `with_digest`; raise `ValueError` or `TypeError` for other bytes."""
    body = as_object(parse_json(data))
    body.pop("sha256", None)
    if with_digest(body) != data:
        raise ValueError("its content does not match its digest.")
    return body


def _check_version(version: JsonValue) -> None:
    if type(version) is not int:
        raise TypeError(f"got the format version {str(version)[:20]!r}; expected an integer.")
    if version == _VERSION:
        return
    advice = "Install a newer d9d-state" if version > _VERSION else "Load it with the d9d-state version that saved it"
    raise VersionError(f"it has format version {version}; this d9d-state reads version {_VERSION}. {advice}.")


def _check_spans(file: str, record: FileRecord, spans: list[tuple[int, int, str]]) -> None:
    position = record.head.size
    for start, end, name in sorted(spans):
        if start != position:
            raise ValueError(f"{name} starts at byte {start} of {file}; expected {position}.")
        position = end
    if position != record.size:
        raise ValueError(f"{file} has {record.size} bytes, but its header and tensors have {position}.")


def _dump_tensor(record: TensorRecord) -> JsonValue:
    return {
        "dtype": dtype_name(record.info.dtype),
        "shape": record.info.shape,
        "chunks": [
            {
                "offset": chunk.region.offsets,
                "shape": chunk.region.sizes,
                "file": chunk.file,
                "start": chunk.start,
                "digest": chunk.digest,
            }
            for chunk in record.chunks
        ],
    }


def _parse_tensor(value: JsonValue) -> TensorRecord:
    dtype, shape, chunks = _fields(value, "dtype", "shape", "chunks")
    info = TensorInfo(parse_shape(shape), dtype_of(dtype))
    return TensorRecord(info, tuple(map(_parse_chunk, as_list(chunks))))


def _parse_chunk(value: JsonValue) -> Chunk:
    offset, shape, file, start, digest = _fields(value, "offset", "shape", "file", "start", "digest")
    return Chunk(Region(parse_shape(offset), parse_shape(shape)), _text(file), _count(start), _digest(digest))


def _parse_file(value: JsonValue) -> FileRecord:
    size, head, digest = _fields(value, "size", "head", "digest")
    return FileRecord(_count(size), PartRecord(_count(head), _digest(digest)))


def _fields(value: JsonValue, *names: str) -> list[JsonValue]:
    """Return the values of an object that has exactly these keys."""
    fields = as_object(value)
    if fields.keys() != set(names):
        raise ValueError(f"got the keys {', '.join(sorted(fields))}; expected {', '.join(sorted(names))}.")
    return [fields[name] for name in names]


def _text(value: JsonValue) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {value!r}; expected a string.")
    return value


def _digest(value: JsonValue) -> str:
    if _DIGEST.fullmatch(_text(value)) is None:
        raise ValueError(f"got {value!r}; expected a digest of 32 hexadecimal digits.")
    return _text(value)


def _count(value: JsonValue) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise TypeError(f"got {value!r}; expected an integer of 0 or more.")
    return value


def _metric(value: JsonValue) -> float | None:
    if value is not None and (not isinstance(value, float) or not math.isfinite(value)):
        raise TypeError(f"got metric = {value!r}; expected a finite float or null.")
    return value
