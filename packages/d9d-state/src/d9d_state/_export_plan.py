"""What will be in every file of an export and who writes it: decided by all ranks alike, before a tensor is touched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from d9d_dist import DistributedContext, UserError
from d9d_state._consensus import exchange_json
from d9d_state.json_value import JsonValue
from d9d_state.model_folder import SINGLE_NAME
from d9d_state.safetensors_header import dtype_name, dtype_of
from d9d_state.tensor_info import TensorInfo


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank can give to an export.

    Attributes:
        part: Ranks of the same part hold the same values: those of one pipeline stage, or one rank alone.
        consumed: What it can consume.
        produced: What it makes of that, in order.
        unconsumed: What it has besides.
        problem: Why it can give nothing at all; `None` if it can.
    """

    part: int
    consumed: Sequence[str] = ()
    produced: Mapping[str, TensorInfo] = field(default_factory=dict)
    unconsumed: Sequence[str] = ()
    problem: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of which the same ranks have the values.

    Attributes:
        ranks: Who can write them; files go to each in turn.
        consumed: What they are made of.
        tensors: What they are, in the order in which they are written.
        unconsumed: What the ranks have besides.
    """

    ranks: Sequence[int]
    consumed: Sequence[str]
    tensors: Mapping[str, TensorInfo]
    unconsumed: Sequence[str] = ()


@final
@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of an export.

    Attributes:
        name: Its name.
        rank: Who writes it.
        tensors: What is in it.
    """

    name: str
    rank: int
    tensors: Mapping[str, TensorInfo]


def exchange_offers(offer: Offer, ctx: DistributedContext | None) -> tuple[Part, ...]:
    """The parts of all ranks; what two of them offer is the first one's. Collective.

    Raises:
        UserError: On every rank, with the problem of each rank that has one.
    """
    gathered: list[Any] = exchange_json(_to_json(offer), ctx)
    problems = {rank: each["problem"] for rank, each in enumerate(gathered) if each["problem"] is not None}
    if problems:
        same = len(set(problems.values())) == 1
        raise UserError(
            next(iter(problems.values()))
            if same
            else "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        )
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
        "problem": offer.problem,
    }


def plan_files(parts: Sequence[Part], *, max_bytes: int) -> tuple[PlannedFile, ...]:
    """Cut tensors into files: as many as fit, in order, no file with tensors of two parts.

    Args:
        parts: All tensors of the export; the names are all different.
        max_bytes: Bytes of tensors in one file, unless a single tensor is larger.
    """
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
