"""Index of a model folder in the Hugging Face layout: its tensors and their files, read from headers only."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_state._member import AnyPath, as_folder, is_plain, read_member, stamp_of
from d9d_state.errors import StateError
from d9d_state.json_value import parse_json, shortened
from d9d_state.safetensors_header import StoredTensor, read_header
from d9d_state.tensor_info import TensorInfo

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_INDEX_BYTES = 1 << 25  # room for about 200,000 tensors
_MAX_NESTED = 10_000  # bounds the memory of a malicious index: a parsed empty list takes 30 times its text's size


@final
@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Index of a folder of safetensors files.

    Attributes:
        path: The folder, or its prefix in an object store.
        tensors: Shape and dtype of every tensor.
        files: Path of each tensor's file.
        starts: Byte offset of each tensor in its file.
        stamps: Stamp of each tensor's file, to find out if it was replaced since; `None` if not known.
    """

    path: AnyPath
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, AnyPath]
    starts: Mapping[str, int]
    stamps: Mapping[str, tuple[object, ...] | None]

    @classmethod
    def open(cls, path: str | AnyPath) -> Self:
        """Read the header of `model.safetensors`, or of every file in `model.safetensors.index.json`.

        If a local folder is replaced meanwhile, the new one is read.

        Raises:
            UserError: If the folder has neither file, or two models, or the index or a header is malformed. Also if the
                index names a file outside the folder, or a listed tensor is missing from its file.
        """
        folder = as_folder(path)
        while True:
            before = _stamps(folder)
            try:
                found = cls._read(folder)
            except (UserError, StateError):
                if _stamps(folder) == before:
                    raise
            else:
                if _stamps(folder) == before:
                    return found

    @classmethod
    def _read(cls, folder: AnyPath) -> Self:
        file = folder / SINGLE_NAME
        if _exists(folder / INDEX_NAME):
            weight_map = _weight_map(folder)
            names = set(weight_map.values())
            if SINGLE_NAME in names or not _exists(file):
                return cls._indexed(folder, weight_map)
            if all(_exists(_plain(folder, name)) for name in names):  # else an index of files that a save has replaced
                raise UserError(f"{folder} has {SINGLE_NAME} and {INDEX_NAME} of other files; delete the older model.")
        elif not _exists(file):
            raise UserError(f"{folder} contains no model; expected {SINGLE_NAME} or {INDEX_NAME} in it.")
        return cls.of(folder, {name: (file, stored) for name, stored in read_header(file).items()})

    @classmethod
    def _indexed(cls, folder: AnyPath, weight_map: Mapping[str, str]) -> Self:
        paths = {name: _plain(folder, name) for name in sorted(set(weight_map.values()))}
        headers = {name: read_header(path) for name, path in paths.items()}
        absent = [f"{name} in {file}" for name, file in weight_map.items() if name not in headers[file]]
        if absent:
            raise UserError(f"{folder / INDEX_NAME} lists tensors that are not in their files: {shorten(absent)}.")
        return cls.of(folder, {name: (paths[file], headers[file][name]) for name, file in weight_map.items()})

    @classmethod
    def of(cls, folder: AnyPath, places: Mapping[str, tuple[AnyPath, StoredTensor]]) -> Self:
        """Return the index of tensors in some files of a folder."""
        return cls(
            folder,
            {name: stored.info for name, (_file, stored) in places.items()},
            {name: file for name, (file, _stored) in places.items()},
            {name: stored.start for name, (_file, stored) in places.items()},
            {name: stored.stamp for name, (_file, stored) in places.items()},
        )


def _stamps(folder: AnyPath) -> list[tuple[int, ...]]:
    """Return a value that changes if a local folder or its index is replaced."""
    stamps: list[tuple[int, ...]] = []
    for path in (folder, folder / INDEX_NAME) if isinstance(folder, Path) else ():
        with suppress(OSError):
            stamps.append(stamp_of(path.stat()))
    return stamps


def _exists(path: AnyPath) -> bool:
    return os.path.lexists(path) if isinstance(path, Path) else path.is_file()


def _plain(folder: AnyPath, name: str) -> AnyPath:
    if not is_plain(name):
        raise UserError(
            f"the index of {folder} names the file {shortened(name)}; expected the plain name of a file in that folder."
        )
    return folder / name


def _weight_map(folder: AnyPath) -> dict[str, str]:
    path = folder / INDEX_NAME
    data = read_member(folder, INDEX_NAME, _MAX_INDEX_BYTES + 1)
    if len(data) > _MAX_INDEX_BYTES or data.count(b"{") + data.count(b"[") > _MAX_NESTED:
        raise UserError(f"{path} is not an index: it has more than {_MAX_INDEX_BYTES} bytes or {_MAX_NESTED} objects.")
    try:
        index = parse_json(data)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f'{path} has no valid weight_map; expected {{"weight_map": {{"tensor": "file"}}}}.')
    return {name: file for name, file in weight_map.items() if isinstance(file, str)}
