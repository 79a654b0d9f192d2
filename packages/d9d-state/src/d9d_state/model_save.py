"""Atomic export of a module's weights to a folder of safetensors files in the Hugging Face layout."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from d9d_dist import DistributedContext, UserError, full_tensor
from d9d_state._carried_files import add_carried_files, earlier_tokenizer
from d9d_state._export import Export, extra_texts, refuse_foreign
from d9d_state._export_plan import exchange_stages, plan_files
from d9d_state._progress import byte_bar
from d9d_state._ranks import failing_together, is_main, num_ranks
from d9d_state.json_value import JsonValue
from d9d_state.mapper.names import identity_of
from d9d_state.mapper.state_mapper import StateMapper
from d9d_state.module_tensors import module_tensors


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
        folder: Folder to write, on a file system that all ranks share: absent, empty, or an earlier export, whose
            tokenizer files are kept. If it is a symbolic link, the folder that it points to is written.
        mapper: Maps names and shapes in memory to those on disk, usually `load_mapper.inverse()`; `None` keeps them.
            Every stage passes the mapper of the whole model, which must consume every tensor; `drop` tensors that
            should not be written. Outputs of `keep` are not written. All inputs of a group must be on one stage. If
            several stages have the same tensor, such as a tied embedding, the first stage writes the tensor.
        ctx: Distributed context; `None` for a single process.
        max_shard_bytes: Maximum bytes of tensor data per file. A larger tensor gets a file of its own.
        extra_files: JSON files to write beside the weights, by name: `{"config.json": {...}}`.
        source: Folder of the original weights; only the main process reads it. Its small files, such as tokenizer and
            generation config, are copied unless `extra_files` has the name. A `config.json` with the same `model_type`
            is merged: entries missing from `extra_files` are kept, except `auto_map` and `quantization_config`, and
            `dtype` becomes the exported dtype. Source code, adapters and files above 256 MiB are not copied.
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
    target = Path(folder).resolve()
    texts = extra_texts(extra_files or {})
    parts, mine = exchange_stages(model, mapper, ctx)
    with failing_together(ctx, f"{target} cannot be written"):
        if is_main(ctx):
            if source is not None:
                infos = [info for part in parts for info in part.tensors.values()]
                texts = extra_texts(add_carried_files(extra_files or {}, Path(source), infos))
            texts = {**earlier_tokenizer(target), **texts}
            refuse_foreign(target, texts)
    export = Export(target, plan_files(parts, max_bytes=max_shard_bytes), ctx)
    tensors = module_tensors(model)
    with byte_bar("saving", sum(info.num_bytes for info in mine.tensors.values()), visible=progress) as bar:
        for group in mine.groups(mapper):
            # A failed rank continues with the all-gathers; otherwise the other ranks would hang.
            whole = {name: full_tensor(tensors[name]) for name in group.inputs}
            if not export.names.isdisjoint(group.outputs):
                export.attempt(lambda whole=whole: export.write(mapper.apply(whole)))
            del whole  # free this group before the next one is gathered
            bar.update(sum(mine.tensors[name].num_bytes for name in group.outputs if name in mine.tensors))
    export.commit(texts)


def check_export(
    folder: str | Path, *, extra_files: Mapping[str, JsonValue] | None = None, source: str | Path | None = None
) -> None:
    """Raise `UserError` if `save_model_state` could not write its files to a folder. Writes nothing; no collectives.

    The folder must be absent, empty or an earlier export, extra files must be JSON, and the source readable.
    """
    files = extra_files or {}
    try:
        texts = extra_texts(files if source is None else add_carried_files(files, Path(source), ()))
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, UserError) else UserError(f"the files beside the weights: {error}") from None
    target = Path(folder).resolve()
    refuse_foreign(target, {**earlier_tokenizer(target), **texts})
