"""Checkpoints from one layout into another, on any number of processes, without a model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from d9d_dist import DistributedContext, UserError
from d9d_state._consensus import is_main, num_ranks
from d9d_state._export import Export, extra_texts, refuse_foreign
from d9d_state._export_plan import Offer, exchange_offers, plan_files
from d9d_state.errors import StateError, describe
from d9d_state.json_value import JsonValue
from d9d_state.mapper.graph import StateMapper
from d9d_state.mapper.names import identity
from d9d_state.model_folder import ModelFolder
from d9d_state.model_read import produced_tensors, read_model_state


def convert_model_state(
    source: str | Path,
    target: str | Path,
    mapper: StateMapper | None = None,
    ctx: DistributedContext | None = None,
    *,
    unused: Literal["error", "ignore"] = "error",
    max_shard_bytes: int = 5_000_000_000,
    extra_files: Mapping[str, JsonValue] | None = None,
    num_readers: int = 4,
    progress: bool = True,
) -> None:
    """Write what a mapper makes of one folder as another, both in the Hugging Face layout. Collective.

    Ranks share out the groups of the mapper by their bytes. Each reads, transforms and writes one group after the
    other, into files of its own. The folder gets its name when everything in it is on the disk; an earlier export of
    that name stays until then and is replaced in one step.

    Args:
        source: Where `model.safetensors` is, or `model.safetensors.index.json` and the files that it names.
        target: Where to write, on a file system that all ranks share. Absent, empty, or an earlier export.
        mapper: From the names and shapes in `source` to those in `target`; `None` changes nothing but the files.
        ctx: The ranks; `None` for a process on its own.
        unused: Whether tensors of the source that the mapper does not consume are refused.
        max_shard_bytes: Bytes of tensors in one file, unless a single tensor is larger.
        extra_files: JSON files to write beside the weights, by name: `{"config.json": {...}}`.
        num_readers: How many threads of a rank read a large tensor.
        progress: Whether each rank shows a bar, where the standard error is a terminal.

    Raises:
        UserError: On every rank, listing every mismatch between files and mapper; if the source is not sound, or the
            target holds something else than an export or is the source.
        ValueError: If an extra file is no JSON or has no plain name; if `ctx` is missing on several ranks.
        StateError: On every rank, if reading or writing failed. The earlier export is then still there.
    """
    ranks, rank = num_ranks(ctx), 0 if ctx is None else ctx.rank
    place = Path(target).absolute()
    texts = extra_texts(extra_files or {})
    share: StateMapper | None = None
    try:
        if is_main(ctx):
            _refuse_same(Path(source), place)
            refuse_foreign(place, texts)
        folder = ModelFolder.open(source)
        whole = identity(*folder.tensors) if mapper is None else mapper
        produced = produced_tensors(whole, folder, unused=unused)
        sizes = {name: info.num_bytes for name, info in folder.tensors.items()}
        share = whole.shard(ranks, rank, num_bytes=sizes)
        offer = Offer(rank, produced={name: produced[name] for name in share.outputs if name in produced})
    except (UserError, StateError, OSError) as error:  # whatever the disk says, the other ranks wait for the offer
        offer = Offer(rank, problem=describe(error))
    parts = exchange_offers(offer, ctx)
    assert share is not None, "a rank without a share has a problem, which was raised"
    export = Export(place, plan_files(parts, max_bytes=max_shard_bytes), ctx)
    tensors = read_model_state(source, share, unused="ignore", num_readers=num_readers, progress=progress)
    export.attempt(lambda: _write_all(tensors, export))
    export.commit(texts)


def _write_all(tensors: Iterator[tuple[str, Tensor]], export: Export) -> None:
    for name, tensor in tensors:
        export.write({name: tensor})


def _refuse_same(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        raise UserError(f"got {target} as source and target; expected another folder to write to.")
