"""Plan of an export: the tensors of each file and the rank that writes it. Every rank computes the same plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from d9d_dist import DistributedContext, UserError, agree, gather_json
from d9d_state.json_value import JsonValue
from d9d_state.model_folder import SINGLE_NAME
from d9d_state.safetensors_header import dtype_name, dtype_of
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """Tensors that one rank can write.

    `part` identifies a set of ranks that can write the same tensors: the ranks of a pipeline stage, or a single rank.
    """

    part: int
    consumed: Sequence[str] = ()
    produced: Mapping[str, TensorInfo] = field(default_factory=dict)
    unconsumed: Sequence[str] = ()
    problem: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that the same set of ranks can write."""

    ranks: Sequence[int]
    consumed: Sequence[str]
    tensors: Mapping[str, TensorInfo]
    unconsumed: Sequence[str] = ()


@final
@dataclass(frozen=True, slots=True)
class PlannedFile:
    """File of an export."""

    name: str
    rank: int
    tensors: Mapping[str, TensorInfo]


def exchange_offers(offer: Offer, ctx: DistributedContext | None) -> tuple[Part, ...]:
    """All-gather the offers and merge them into parts; a tensor of several parts goes to the first part. Collective.

    Raises `UserError` on every rank, with the problem of each rank that has one.
    """
    agree(None if offer.problem is None else UserError(offer.problem), alone=ctx is None)
    gathered = gather_json(_to_json(offer), alone=ctx is None)
    parts: dict[int, Part] = {}
    taken: set[str] = set()
    for number in sorted({each["part"] for each in gathered}):
        ranks = [rank for rank, each in enumerate(gathered) if each["part"] == number]
        first = gathered[ranks[0]]
        produced = {name: TensorInfo(tuple(shape), dtype_of(dtype)) for name, dtype, shape in first["produced"]}
        tensors = {name: info for name, info in produced.items() if name not in taken}
        taken.update(tensors)
        parts[number] = Part(ranks, first["consumed"], tensors, first["unconsumed"])
    return tuple(parts.values())


def _to_json(offer: Offer) -> JsonValue:
    return {
        "part": offer.part,
        "consumed": list(offer.consumed),
        "produced": [[name, dtype_name(info.dtype), list(info.shape)] for name, info in offer.produced.items()],
        "unconsumed": list(offer.unconsumed),
    }


def plan_files(parts: Sequence[Part], *, max_bytes: int) -> tuple[PlannedFile, ...]:
    """Assign tensors to files in order, filling each file up to `max_bytes`. A file never spans two parts."""
    files: list[tuple[int, dict[str, TensorInfo]]] = []
    for part in parts:
        shards: list[dict[str, TensorInfo]] = []
        room = 0
        for name, info in part.tensors.items():
            if not shards or info.num_bytes > room:
                shards.append({})
                room = max_bytes
            shards[-1][name] = info
            room -= info.num_bytes
        files += [(part.ranks[index % len(part.ranks)], shard) for index, shard in enumerate(shards)]
    if not files:
        files = [(0, {})]
    return tuple(PlannedFile(_file_name(index, len(files)), *file) for index, file in enumerate(files))


def _file_name(index: int, num_files: int) -> str:
    return SINGLE_NAME if num_files == 1 else f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
