"""A model in the Hugging Face layout on disk: which tensors it holds and in which files, read from headers only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from d9d_dist import UserError
from d9d_state._files import member
from d9d_state.json_value import parse_json
from d9d_state.safetensors_header import StoredTensor, read_header
from d9d_state.tensor_info import TensorInfo

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_INDEX_BYTES = 1 << 27


@final
@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What a folder of safetensors files holds.

    Attributes:
        path: The folder.
        tensors: Shape and dtype of every tensor.
        files: For every tensor the file that holds it.
        starts: For every tensor the position of its first byte in that file.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, Path]
    starts: Mapping[str, int]

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read the index, if there is one, and the header of every file.

        Args:
            path: A folder with `model.safetensors.index.json` and the files that it names, or with `model.safetensors`.

        Raises:
            UserError: If the folder has neither, or names a file outside it, or a file and the index disagree.
        """
        folder = Path(path)
        if (folder / INDEX_NAME).exists():
            return cls._indexed(folder, _weight_map(member(folder, INDEX_NAME)))
        if not (folder / SINGLE_NAME).exists():
            raise UserError(f"{folder} holds no model; expected {SINGLE_NAME} or {INDEX_NAME} in it.")
        file = member(folder, SINGLE_NAME)
        return cls._of(folder, {name: (file, stored) for name, stored in read_header(file).items()})

    @classmethod
    def _indexed(cls, folder: Path, weight_map: Mapping[str, str]) -> Self:
        paths = {name: member(folder, name) for name in sorted(set(weight_map.values()))}
        headers = {name: read_header(path) for name, path in paths.items()}
        absent = [f"{name} in {file}" for name, file in weight_map.items() if name not in headers[file]]
        if absent:
            raise UserError(f"{folder / INDEX_NAME} names tensors that are not there: {', '.join(absent)}.")
        return cls._of(folder, {name: (paths[file], headers[file][name]) for name, file in weight_map.items()})

    @classmethod
    def _of(cls, folder: Path, places: Mapping[str, tuple[Path, StoredTensor]]) -> Self:
        return cls(
            folder,
            {name: stored.info for name, (_file, stored) in places.items()},
            {name: file for name, (file, _stored) in places.items()},
            {name: stored.start for name, (_file, stored) in places.items()},
        )


def _weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise UserError(f"{path} has {path.stat().st_size} bytes; expected at most {_MAX_INDEX_BYTES}.")
    try:
        index = parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is no valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f'{path} has no sound weight_map; expected {{"weight_map": {{"tensor": "file"}}}}.')
    return {name: file for name, file in weight_map.items() if isinstance(file, str)}
