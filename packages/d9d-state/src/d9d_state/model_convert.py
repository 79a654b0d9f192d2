"""Conversion of a checkpoint to another layout, on any number of ranks, without building the model."""

from collections.abc import Mapping
from pathlib import Path

from d9d_dist import DistributedContext, UserError
from d9d_state._export import Export, extra_texts, refuse_foreign
from d9d_state._export_plan import exchange_parts, plan_files
from d9d_state._ranks import failing_together, is_main, num_ranks, rank_of
from d9d_state.json_value import JsonValue
from d9d_state.mapper._check import Unused
from d9d_state.mapper.names import identity
from d9d_state.mapper.state_mapper import StateMapper
from d9d_state.model_folder import ModelFolder
from d9d_state.model_read import produced_tensors, read_model_state


def convert_model_state(
    source: str | Path,
    target: str | Path,
    mapper: StateMapper | None = None,
    ctx: DistributedContext | None = None,
    *,
    unused: Unused = "error",
    max_shard_bytes: int = 5_000_000_000,
    extra_files: Mapping[str, JsonValue] | None = None,
    num_readers: int = 4,
    progress: bool = True,
) -> None:
    """Convert a model folder with a mapper and write the result; both use the Hugging Face layout. Collective.

    The mapper's groups are distributed over the ranks, balanced by bytes. Each rank reads, transforms and writes one
    group at a time, to its own files. After everything is fsynced, the folder is renamed to its final name. Until then
    an earlier export at the target stays unchanged; it is replaced atomically.

    Args:
        source: Folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it lists.
        target: Folder to write, on a file system that all ranks share: absent, empty, or an earlier export. If it is a
            symbolic link, the folder that it points to is written.
        mapper: Maps names and shapes in `source` to those in `target`; `None` only redistributes tensors over files.
        ctx: Distributed context; `None` for a single process.
        unused: `"error"` refuses tensors in the source that the mapper does not consume; `"ignore"` skips them.
        max_shard_bytes: Maximum bytes of tensor data per file. A larger tensor gets a file of its own.
        extra_files: JSON files to write beside the weights, by name: `{"config.json": {...}}`.
        num_readers: Number of threads per rank that read a large tensor.
        progress: Show a progress bar on each rank if standard error is a terminal.

    Raises:
        UserError: On every rank, listing every mismatch between files and mapper. Also if the source is malformed, or
            the target is the source or holds other files than an export.
        ValueError: If an extra file is not JSON, or its name is not a plain file name. Also if `ctx` is missing
            although there are several ranks.
        StateError: On every rank, if reading or writing failed. An earlier export at the target stays unchanged.
    """
    ranks, rank = num_ranks(ctx), rank_of(ctx)
    place = Path(target).resolve()
    texts = extra_texts(extra_files or {})
    with failing_together(ctx, f"{source} cannot be converted to {place}"):
        if is_main(ctx):
            if Path(source).resolve() == place:
                raise UserError(f"got {place} as both source and target; expected a different target folder.")
            refuse_foreign(place, texts)
        folder = ModelFolder.open(source)
        whole = identity(*folder.tensors) if mapper is None else mapper
        infos = produced_tensors(whole, folder, unused=unused)
        sizes = {name: info.num_bytes for name, info in folder.tensors.items()}
        share = whole.shard(ranks, rank, num_bytes=sizes)
    parts = exchange_parts(rank, {name: infos[name] for name in share.outputs if name in infos}, ctx)
    export = Export(place, plan_files(parts, max_bytes=max_shard_bytes), ctx)

    def write_all() -> None:
        tensors = read_model_state(source, share, unused="ignore", num_readers=num_readers, progress=progress)
        for name, tensor in tensors:
            export.write({name: tensor})

    export.attempt(write_all)
    export.commit(texts)
