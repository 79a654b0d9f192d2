"""The manifest of a checkpoint: the one file that makes a folder a checkpoint, written last and proving all others."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from d9d_dist import UserError
from d9d_state._files import FileRecord, member
from d9d_state.errors import StateError
from d9d_state.json_value import JsonValue, dump_json, parse_json
from d9d_state.safetensors_header import dtype_name, dtype_of, parse_shape
from d9d_state.tensor_info import TensorInfo

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
_FORMAT = "d9d-checkpoint"
_VERSION = 1
_MAX_BYTES = 1 << 28


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where it lies.

    Attributes:
        offset: First index in every dim of the tensor.
        shape: Sizes of the box.
        file: Name of the safetensors file.
        key: Name in that file.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@final
@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor: what it is, and the chunks that it is made of."""

    info: TensorInfo
    chunks: tuple[Chunk, ...]


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint consists of.

    Attributes:
        run_id: Which run wrote it; all checkpoints of a run share it.
        step: Number of optimizer steps that were done.
        mesh: Size of every mesh axis at saving, for the reader.
        num_ranks: How many ranks saved.
        tensors: The tensors by name.
        files: Size and digest of each other file in the folder.
    """

    run_id: str
    step: int
    mesh: Mapping[str, int]
    num_ranks: int
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]

    def dump(self) -> bytes:
        """The canonical text, which holds its own digest."""
        body: dict[str, JsonValue] = {
            "format": _FORMAT,
            "version": _VERSION,
            "run_id": self.run_id,
            "step": self.step,
            "mesh": dict(self.mesh),
            "num_ranks": self.num_ranks,
            "tensors": {name: _dump_tensor(record) for name, record in self.tensors.items()},
            "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in self.files.items()},
        }
        return _with_digest(body)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a folder and prove it.

        Raises:
            StateError: If there is none, or any byte of it is not as it was written, or a later version wrote it.
        """
        path = folder / MANIFEST_NAME
        try:
            if member(folder, MANIFEST_NAME).stat().st_size > _MAX_BYTES:
                raise StateError(f"{path} is larger than {_MAX_BYTES} bytes; it is no manifest.")
            return cls._parse(path.read_bytes())
        except (UserError, OSError) as error:
            raise StateError(str(error)) from error
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{path} is damaged: {error}") from error

    @classmethod
    def _parse(cls, data: bytes) -> Self:
        body = _object(parse_json(data))
        version = body.get("version")
        if body.get("format") == _FORMAT and isinstance(version, int) and version > _VERSION:
            raise ValueError(
                f"it has format version {version}; this d9d-state reads up to {_VERSION}, so install a newer."
            )
        body.pop("sha256", None)
        if body.get("format") != _FORMAT or _with_digest(body) != data:
            raise ValueError("its content does not have the digest that it was written with.")
        return cls(
            run_id=_text(body["run_id"]),
            step=_integer(body["step"]),
            mesh={name: _integer(size) for name, size in _object(body["mesh"]).items()},
            num_ranks=_integer(body["num_ranks"]),
            tensors={name: _parse_tensor(_object(record)) for name, record in _object(body["tensors"]).items()},
            files={name: _parse_file(_object(record)) for name, record in _object(body["files"]).items()},
        )


def rank_state_name(rank: int) -> str:
    """The file with what only one rank knows."""
    return f"rank-{rank:05d}.json"


def tensors_name(rank: int) -> str:
    """The file with the tensors that one rank wrote."""
    return f"tensors-{rank:05d}.safetensors"


def _with_digest(body: Mapping[str, JsonValue]) -> bytes:
    digest = hashlib.sha256(dump_json(body)).hexdigest()
    return dump_json({**body, "sha256": digest}, indent=1) + b"\n"


def _dump_tensor(record: TensorRecord) -> JsonValue:
    return {
        "dtype": dtype_name(record.info.dtype),
        "shape": record.info.shape,
        "chunks": [
            {"offset": chunk.offset, "shape": chunk.shape, "file": chunk.file, "key": chunk.key}
            for chunk in record.chunks
        ],
    }


def _parse_tensor(record: Mapping[str, JsonValue]) -> TensorRecord:
    chunks = record["chunks"]
    if not isinstance(chunks, list):
        raise TypeError("chunks must be a list.")
    return TensorRecord(
        TensorInfo(parse_shape(record["shape"]), dtype_of(record["dtype"])),
        tuple(
            Chunk(parse_shape(chunk["offset"]), parse_shape(chunk["shape"]), _text(chunk["file"]), _text(chunk["key"]))
            for chunk in map(_object, chunks)
        ),
    )


def _parse_file(record: Mapping[str, JsonValue]) -> FileRecord:
    return FileRecord(_integer(record["size"]), _text(record["sha256"]))


def _object(value: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise TypeError(f"got {value!r}; expected an object.")
    return dict(value)


def _text(value: JsonValue) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {value!r}; expected a text.")
    return value


def _integer(value: JsonValue) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"got {value!r}; expected an integer.")
    return value
