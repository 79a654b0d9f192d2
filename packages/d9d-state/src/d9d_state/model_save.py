"""A module's weights as a folder of safetensors files in the Hugging Face layout, complete or not there at all."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

from torch import Tensor, nn

from d9d_dist import DistributedContext, UserError
from d9d_state import _files
from d9d_state._consensus import agree, is_main, num_ranks
from d9d_state._sharding import gather_whole
from d9d_state.json_value import JsonValue, dump_json
from d9d_state.mapper.graph import StateGroup, StateMapper
from d9d_state.mapper.names import identity_of
from d9d_state.model_folder import INDEX_NAME, SINGLE_NAME
from d9d_state.module_tensors import aliases, module_tensors
from d9d_state.safetensors_file import write_safetensors
from d9d_state.safetensors_header import dtype_name
from d9d_state.tensor_info import TensorInfo

_OWN_NAMES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


def save_model_state(
    model: nn.Module,
    folder: str | Path,
    mapper: StateMapper | None = None,
    ctx: DistributedContext | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
    extra_files: Mapping[str, JsonValue] | None = None,
) -> None:
    """Write a module's parameters and persistent buffers as a folder in the Hugging Face layout. Collective.

    Whole tensors are gathered one group of the mapper at a time, on every rank in the same order; the main process
    writes. The folder gets its name when everything in it is on the disk; an earlier export of that name stays until
    then and is replaced in one step.

    Args:
        model: On any device; tensors are plain or `DTensor`. The whole model, not one pipeline stage.
        folder: Where to write. Absent, empty, or an earlier export.
        mapper: From the names and shapes in memory to those on disk, usually `load_mapper.inverse()`; `None` keeps
            them. It consumes every tensor of the model; `drop` those that are not wanted. What it keeps (`keep`, the
            inverse of `drop`) is not written, since there is no value for it.
        ctx: The ranks; `None` for a process on its own.
        max_shard_bytes: Bytes of tensors in one file, unless a single tensor is larger. The main process holds as much
            in memory.
        extra_files: JSON files to write beside the weights, by name: `{"config.json": {...}}`.

    Raises:
        UserError: If mapper and model do not fit together, or the folder holds something else than an export.
        ValueError: If an extra file is no JSON or has no plain name; if `ctx` is missing on several ranks.
        StateError: On every rank, if writing failed. The earlier export is then still there.
    """
    num_ranks(ctx)
    mapper = identity_of(model) if mapper is None else mapper
    target = Path(folder).absolute()
    texts = _extra_texts(extra_files or {})
    infos = _output_infos(mapper, model)
    _refuse_foreign(target, texts)
    export = _Export(target, _shards(infos, max_shard_bytes)) if is_main(ctx) else None
    tensors = module_tensors(model)
    problem: str | None = None
    for group in _groups(mapper):
        whole = {name: gather_whole(tensors[name]) for name in group.inputs}
        # A rank that failed must go on gathering, or the others would wait for it for ever.
        if export is not None and problem is None:
            try:
                export.add(mapper.apply(whole))
            except (OSError, ValueError) as error:
                problem = f"{target} could not be written: {error}"
    if export is not None and problem is None:
        try:
            export.commit(texts, infos)
        except OSError as error:
            problem = f"{target} could not be written: {error}"
    agree(problem, ctx)


@final
class _Export:
    """The files of one export while they are being written, in a folder beside the final one."""

    def __init__(self, target: Path, shards: list[list[str]]) -> None:
        self._target = target
        self._partial = target.with_name(f"{target.name}.partial")
        self._shards = shards
        self._shard_of = {name: index for index, names in enumerate(shards) for name in names}
        self._pending: dict[int, dict[str, Tensor]] = {}
        self._started = False

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the next tensors; write the files that they complete."""
        self._start()
        for name, tensor in tensors.items():
            shard = self._shard_of[name]
            pending = self._pending.setdefault(shard, {})
            pending[name] = tensor.to("cpu")
            if len(pending) == len(self._shards[shard]):
                write_safetensors(self._partial / self._file_name(shard), pending, metadata={"format": "pt"})
                del self._pending[shard]

    def commit(self, texts: Mapping[str, bytes], infos: Mapping[str, TensorInfo]) -> None:
        """Write what is no tensor, the index last, and give the folder its name."""
        self._start()
        for name, text in texts.items():
            _files.write_file(self._partial / name, [text])
        if len(self._shards) > 1:
            _files.write_file(self._partial / INDEX_NAME, [self._index(infos)])
        _files.fsync_folder(self._partial)
        if self._target.exists():
            _files.exchange(self._partial, self._target)
            _files.fsync_folder(self._target.parent)
            _files.remove_folder(self._partial)
        else:
            _files.rename(self._partial, self._target)
            _files.fsync_folder(self._target.parent)

    def _start(self) -> None:
        if self._started:
            return
        if self._partial.is_dir():
            _files.remove_folder(self._partial)
        _files.make_folder(self._partial)
        self._started = True

    def _file_name(self, shard: int) -> str:
        return (
            SINGLE_NAME if len(self._shards) == 1 else f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"
        )

    def _index(self, infos: Mapping[str, TensorInfo]) -> bytes:
        weight_map = {name: self._file_name(shard) for name, shard in self._shard_of.items()}
        total = sum(info.num_bytes for info in infos.values())
        return dump_json({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def _groups(mapper: StateMapper) -> list[StateGroup]:
    """The groups that take part: all that have values."""
    return [group for group in mapper.groups if group.inputs]


def _output_infos(mapper: StateMapper, model: nn.Module) -> dict[str, TensorInfo]:
    """What will be on disk, in the order in which it is written."""
    tensors = module_tensors(model)
    first_names = aliases(model)
    consumed = {first_names[name] for name in mapper.inputs if name in first_names}
    unknown = [name for name in mapper.inputs if name not in tensors]
    lost = [name for name, first in first_names.items() if name == first and first not in consumed]
    problems = {
        "consumed, but not in the model": unknown,
        "in the model, but not consumed; drop() them if that is meant": lost,
    }
    report = [f"\n  {title}: {', '.join(names)}" for title, names in problems.items() if names]
    if report:
        raise UserError(f"the mapper does not fit the model that is to be saved:{''.join(report)}")
    infos: dict[str, TensorInfo] = {}
    for group in _groups(mapper):
        outputs = mapper.apply({name: TensorInfo.of(tensors[name]).to_meta() for name in group.inputs})
        infos.update((name, TensorInfo.of(tensor)) for name, tensor in outputs.items())
    for info in infos.values():
        dtype_name(info.dtype)
    return infos


def _shards(infos: Mapping[str, TensorInfo], max_bytes: int) -> list[list[str]]:
    """The names in each file: as many as fit, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in infos.items():
        if shards[-1] and size + info.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.num_bytes
    return shards


def _extra_texts(extra_files: Mapping[str, JsonValue]) -> dict[str, bytes]:
    for name in extra_files:
        if name in ("", ".", "..") or "/" in name or _OWN_NAMES.fullmatch(name):
            raise ValueError(
                f"got the extra file {name!r}; expected a plain file name that is not one of the weights'."
            )
    return {name: dump_json(value, indent=2) + b"\n" for name, value in extra_files.items()}


def _refuse_foreign(target: Path, own: Iterable[str]) -> None:
    """Refuse to replace a folder that nobody would call an export.

    Raises:
        UserError: Naming what is in the way.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target} is a file; expected a folder to write the model to.")
    known = set(own)
    foreign = sorted(path.name for path in target.iterdir() if not _is_own(path, known))
    if foreign:
        raise UserError(
            f"{target} holds {', '.join(foreign)}, which this export would delete; choose another folder or move them."
        )


def _is_own(path: Path, known: set[str]) -> bool:
    return path.is_file() and (path.name in known or _OWN_NAMES.fullmatch(path.name) is not None)
