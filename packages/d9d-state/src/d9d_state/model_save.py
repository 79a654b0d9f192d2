"""Atomic export of a module's weights to a folder of safetensors files in the Hugging Face layout."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from d9d_dist import DistributedContext, UserError, full_tensor
from d9d_state._carried_files import add_carried_files
from d9d_state._export import Export, extra_texts, refuse_foreign
from d9d_state._export_plan import Offer, Part, exchange_offers, plan_files
from d9d_state._progress import byte_bar
from d9d_state._ranks import is_main, num_ranks
from d9d_state.errors import describe
from d9d_state.json_value import JsonValue
from d9d_state.mapper.graph import StateGroup
from d9d_state.mapper.names import identity_of
from d9d_state.mapper.state_mapper import StateMapper
from d9d_state.module_tensors import aliases, module_tensors
from d9d_state.safetensors_header import dtype_name
from d9d_state.tensor_info import TensorInfo


def save_model_state(
    model: nn.Module,
    folder: str | Path,
    mapper: StateMapper | None = None,
    ctx: DistributedContext | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
    extra_files: Mapping[str, JsonValue] | None = None,
    source: str | Path | None = None,
    progress: bool = True,
) -> None:
    """Export a model's parameters and persistent buffers as a folder in the Hugging Face layout. Collective.

    The ranks of each pipeline stage gather full tensors, one group of the mapper at a time, so a rank holds one group
    in memory. A stage's files are assigned to its ranks round-robin. After everything is fsynced, the folder is renamed
    to its final name. Until then an earlier export at the target stays unchanged; it is replaced atomically.

    Args:
        model: Whole model or this rank's pipeline stage, on any device, with plain tensors or `DTensor`s.
        folder: Folder to write, on a file system that all ranks share: absent, empty, or an earlier export.
        mapper: Maps names and shapes in memory to those on disk, usually `load_mapper.inverse()`; `None` keeps them.
            Every stage passes the mapper of the whole model, which must consume every tensor; `drop` tensors that
            should not be written. Outputs of `keep` are not written. All inputs of a group must be on one stage. Of
            several stages with the same tensor, such as a tied embedding, the first writes it.
        ctx: Distributed context; `None` for a single process.
        max_shard_bytes: Maximum bytes of tensor data per file. A larger tensor gets a file of its own.
        extra_files: JSON files to write beside the weights, by name: `{"config.json": {...}}`.
        source: Folder of the original weights; only the main process reads it. Its small files, such as tokenizer and
            generation config, are copied unless `extra_files` has the name. A `config.json` with the same `model_type`
            is merged: entries missing from `extra_files` are kept, and `dtype` becomes the exported one. Source code,
            the config entry `auto_map`, adapters and files above 256 MiB are not copied.
        progress: Show a progress bar on each rank if standard error is a terminal.

    Raises:
        UserError: On every rank, if mapper and model do not match, the folder holds other files than an export, or the
            source cannot be read.
        ValueError: If an extra file is not JSON, or its name is not a plain file name. Also if `ctx` is missing
            although there are several ranks.
        StateError: On every rank, if writing failed. An earlier export at the target stays unchanged.
    """
    num_ranks(ctx)
    mapper = identity_of(model) if mapper is None else mapper
    target = Path(folder).absolute()
    texts = extra_texts(extra_files or {})
    stage = 0 if ctx is None else ctx.coordinate("regular", "pp")
    offer = _offer(model, mapper, stage)
    if is_main(ctx) and offer.problem is None:
        try:
            if source is not None:
                texts = extra_texts(add_carried_files(extra_files or {}, Path(source), offer.produced.values()))
            refuse_foreign(target, texts)
        except (UserError, OSError) as error:
            offer = Offer(stage, problem=describe(error))
    parts = exchange_offers(offer, ctx)
    _check_complete(mapper, parts)
    mine = next(part for part in parts if (0 if ctx is None else ctx.rank) in part.ranks)
    groups = [group for group in mapper.groups if not mine.tensors.keys().isdisjoint(group.outputs)]
    export = Export(target, plan_files(parts, max_bytes=max_shard_bytes), ctx)
    tensors = module_tensors(model)
    with byte_bar("saving", sum(info.num_bytes for info in mine.tensors.values()), visible=progress) as bar:
        for group in groups:
            # A failed rank continues with the all-gathers; otherwise the other ranks would hang.
            whole = {name: full_tensor(tensors[name]) for name in group.inputs}
            if not export.names.isdisjoint(group.outputs):
                export.attempt(partial(_write, export, mapper, whole))
            del whole  # free this group before the next one is gathered
            bar.update(sum(mine.tensors[name].num_bytes for name in group.outputs if name in mine.tensors))
    export.commit(texts)


def _write(export: Export, mapper: StateMapper, tensors: Mapping[str, Tensor]) -> None:
    export.write(mapper.apply(tensors))


def _offer(model: nn.Module, mapper: StateMapper, stage: int) -> Offer:
    tensors = module_tensors(model)
    infos = {name: TensorInfo.of(tensors[name]) for name in mapper.inputs if name in tensors}
    try:
        produced = _produced(_held_groups(mapper, infos), mapper, infos)
    except ValueError as error:
        return Offer(stage, problem=str(error))
    return Offer(stage, list(infos), produced, unconsumed=_unconsumed(model, mapper))


def _unconsumed(model: nn.Module, mapper: StateMapper) -> list[str]:
    first_names = aliases(model)
    consumed = {first_names[name] for name in mapper.inputs if name in first_names}
    return [name for name, first in first_names.items() if name == first and first not in consumed]


def _held_groups(mapper: StateMapper, held: Mapping[str, TensorInfo]) -> list[StateGroup]:
    return [group for group in mapper.groups if group.inputs and all(name in held for name in group.inputs)]


def _produced(
    groups: Sequence[StateGroup], mapper: StateMapper, infos: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Infer shape and dtype of the tensors on disk, in the order in which they are written."""
    produced: dict[str, TensorInfo] = {}
    for group in groups:
        outputs = mapper.apply({name: infos[name].to_meta() for name in group.inputs})
        produced.update((name, TensorInfo.of(tensor)) for name, tensor in outputs.items())
    for info in produced.values():
        dtype_name(info.dtype)
    return produced


def _check_complete(mapper: StateMapper, parts: Sequence[Part]) -> None:
    """Raise `UserError` if the mapper and the model do not match, or a group's inputs are on several stages."""
    held = [frozenset(part.consumed) for part in parts]
    everything = frozenset().union(*held)
    absent = [name for name in mapper.inputs if name not in everything]
    split = [
        ", ".join(group.inputs)
        for group in mapper.groups
        if everything.issuperset(group.inputs) and not any(part.issuperset(group.inputs) for part in held)
    ]
    problems = {
        "consumed, but not in the model": ", ".join(absent),
        "in the model, but not consumed; drop() them if this is intended": ", ".join(
            name for part in parts for name in part.unconsumed
        ),
        "consumed together, but on different pipeline stages": "; ".join(split),
    }
    report = [f"\n  {title}: {names}" for title, names in problems.items() if names]
    if report:
        raise UserError(f"the mapper does not match the model to export:{''.join(report)}")
