"""A module's weights as a folder of safetensors files in the Hugging Face layout, complete or not there at all."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from d9d_dist import DistributedContext, UserError
from d9d_state._carried_files import add_carried_files
from d9d_state._consensus import is_main, num_ranks
from d9d_state._export import Export, extra_texts, refuse_foreign
from d9d_state._export_plan import Offer, Part, exchange_offers, plan_files
from d9d_state._progress import byte_bar
from d9d_state._sharding import gather_whole
from d9d_state.errors import describe
from d9d_state.json_value import JsonValue
from d9d_state.mapper.graph import StateGroup, StateMapper
from d9d_state.mapper.names import identity_of
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
    """Write a model's parameters and persistent buffers as a folder in the Hugging Face layout. Collective.

    The ranks of each pipeline stage gather whole tensors, one group of the mapper at a time, in the same order. Every
    file has one writer, a stage's files go to its ranks in turn, and nobody holds more than a group. The folder gets
    its name when everything in it is on the disk; an earlier export of that name stays until then and is replaced in
    one step.

    Args:
        model: On any device; tensors are plain or `DTensor`. The whole model, or this rank's pipeline stage of it.
        folder: Where to write, on a file system that all ranks share. Absent, empty, or an earlier export.
        mapper: From the names and shapes in memory to those on disk, usually `load_mapper.inverse()`; `None` keeps
            them. On every stage it is that of the whole model. It consumes every tensor of the model; `drop` those that
            are not wanted. What it keeps (`keep`, the inverse of `drop`) is not written, since there is no value for
            it. What a group consumes has to be on one stage. What several stages hold, such as a tied embedding, the
            first one writes.
        ctx: The ranks; `None` for a process on its own.
        max_shard_bytes: Bytes of tensors in one file, unless a single tensor is larger.
        extra_files: JSON files to write beside the weights, by name: `{"config.json": {...}}`.
        source: Folder that the weights came from; only the main process reads it. Its small files, such as tokenizer
            and generation config, are copied unless `extra_files` has one of that name. Of a `config.json` of the same
            `model_type`, entries that `extra_files` lacks are kept, and `dtype` becomes that of the exported weights.
            Code, adapters and files above 256 MiB are not copied, nor is the `auto_map` that names code.
        progress: Whether each rank shows a bar, where the standard error is a terminal.

    Raises:
        UserError: On every rank, if mapper and model do not fit together, or the folder holds something else than an
            export; if the source cannot be read.
        ValueError: If an extra file is no JSON or has no plain name; if `ctx` is missing on several ranks.
        StateError: On every rank, if writing failed. The earlier export is then still there.
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
            # A rank that failed must go on gathering, or the others would wait for it for ever.
            whole = {name: gather_whole(tensors[name]) for name in group.inputs}
            if not export.names.isdisjoint(group.outputs):
                export.attempt(partial(_write, export, mapper, whole))
            del whole  # or it would stand beside the next
            bar.update(sum(mine.tensors[name].num_bytes for name in group.outputs if name in mine.tensors))
    export.commit(texts)


def _write(export: Export, mapper: StateMapper, tensors: Mapping[str, Tensor]) -> None:
    export.write(mapper.apply(tensors))


def _offer(model: nn.Module, mapper: StateMapper, stage: int) -> Offer:
    """What this rank has for the export."""
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
    """What will be on disk, in the order in which it is written."""
    produced: dict[str, TensorInfo] = {}
    for group in groups:
        outputs = mapper.apply({name: infos[name].to_meta() for name in group.inputs})
        produced.update((name, TensorInfo.of(tensor)) for name, tensor in outputs.items())
    for info in produced.values():
        dtype_name(info.dtype)
    return produced


def _check_complete(mapper: StateMapper, parts: Sequence[Part]) -> None:
    """Refuse a mapper that consumes what no stage has, or together what different stages have, or not everything.

    Raises:
        UserError: Listing all of it.
    """
    held = [frozenset(part.consumed) for part in parts]
    everything = frozenset().union(*held)
    absent = [name for name in mapper.inputs if name not in everything]
    torn = [
        ", ".join(group.inputs)
        for group in mapper.groups
        if everything.issuperset(group.inputs) and not any(part.issuperset(group.inputs) for part in held)
    ]
    problems = {
        "consumed, but not in the model": ", ".join(absent),
        "in the model, but not consumed; drop() them if that is meant": ", ".join(
            name for part in parts for name in part.unconsumed
        ),
        "consumed together, but on different pipeline stages": "; ".join(torn),
    }
    report = [f"\n  {title}: {names}" for title, names in problems.items() if names]
    if report:
        raise UserError(f"the mapper does not fit the model that is to be saved:{''.join(report)}")
