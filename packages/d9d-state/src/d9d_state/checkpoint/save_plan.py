"""Save plan: the rank that writes each part of each tensor. All ranks compute the same plan.

torch's `DefaultSavePlanner` sends pickled objects. Here the ranks exchange JSON descriptions of their tensors, only if
the description of a rank has changed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.distributed.tensor import DTensor

from d9d_dist import DistributedContext, Region, agree, gather_json, local_region, local_tensor
from d9d_state._tensor_bytes import check_memory
from d9d_state.checkpoint.cover import cover_problem
from d9d_state.errors import StateError
from d9d_state.json_value import JsonValue, dump_json
from d9d_state.safetensors_header import dtype_name, dtype_of
from d9d_state.tensor_info import TensorInfo

Part = tuple[str, Region]
"""Name of a tensor, and a region of it."""


@final
@dataclass(frozen=True, slots=True)
class SavePlan:
    """Tensors of a checkpoint and the parts that each rank writes. Equal on all ranks, as is `digest`."""

    tensors: Mapping[str, TensorInfo]
    parts: tuple[tuple[Part, ...], ...]
    digest: str


@final
class SavePlanner:
    """Planner of saves; it reuses the last plan while names, shapes, dtypes and placements stay equal."""

    def __init__(self) -> None:
        self._key: object = None
        self._description: JsonValue = None
        self._plan: SavePlan | None = None
        self.num_plans = 0

    def plan(self, tensors: Mapping[str, Tensor], ctx: DistributedContext | None) -> SavePlan:
        """Return the plan for some tensors. Collective: all-gathers a digest, and descriptions if any tensor changed.

        Raises `StateError` on every rank if tensors cannot be saved or are inconsistent; `ValueError` in a single
        process.
        """
        problem = None
        try:
            key = tuple(_key(name, tensor) for name, tensor in tensors.items())
            if key != self._key:
                self._plan, self._description, self._key = None, _describe(tensors), key
        except (ValueError, RuntimeError) as error:
            if ctx is None or ctx.world_size == 1:
                raise
            problem = str(error)
        known = None if self._plan is None else self._plan.digest
        answers = gather_json([problem is not None, known], alone=ctx is None)
        if any(failed for failed, _ in answers):
            agree(problem, error=StateError, alone=ctx is None)
        if self._plan is None or any(answer != known for _, answer in answers):
            self._plan = _merge(gather_json(self._description, alone=ctx is None))
            self.num_plans += 1
        return self._plan


def check_saveable(tensors: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` if a value is not a tensor, or a tensor that a checkpoint cannot store."""
    for name, tensor in tensors.items():
        _key(name, tensor)
        try:
            dtype_name(tensor.dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def local_parts(tensors: Mapping[str, Tensor], plan: SavePlan, rank: int) -> dict[str, Tensor]:
    """Return views of the tensor parts that a rank writes, by `part_key`."""
    return {part_key(name, region): local_tensor(tensors[name]).detach() for name, region in plan.parts[rank]}


def part_key(name: str, region: Region) -> str:
    """Return the name of a tensor part in a safetensors file: `<name>@<offsets>`."""
    return f"{name}@{','.join(map(str, region.offsets))}"


def _key(name: str, tensor: Tensor) -> object:
    """Return the values that determine a tensor's description. Comparing them is faster than a description (50 µs)."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is of type {type(tensor).__name__}; expected a tensor. Pass other values in state=.")
    check_memory(name, local_tensor(tensor))
    layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return name, tensor.shape, tensor.dtype, layout


def _describe(tensors: Mapping[str, Tensor]) -> JsonValue:
    """Describe this rank's tensors: `{name: [dtype, shape, offsets, sizes]}`."""
    regions = {name: local_region(tensor, name) for name, tensor in tensors.items()}
    return {
        name: [dtype_name(tensor.dtype), list(tensor.shape), regions[name].offsets, regions[name].sizes]
        for name, tensor in tensors.items()
    }


def _merge(descriptions: list[Any]) -> SavePlan:
    """Compute the plan from all ranks' descriptions. Plan and errors are equal on all ranks."""
    tensors: dict[str, TensorInfo] = {}
    first: dict[str, int] = {}
    holders: dict[Part, list[int]] = {}
    for rank, description in enumerate(descriptions):
        for name, (dtype, shape, offsets, sizes) in description.items():
            info, region = TensorInfo(tuple(shape), dtype_of(dtype)), Region(tuple(offsets), tuple(sizes))
            if tensors.setdefault(name, info) != info:
                raise StateError(
                    f"{name} is {info.describe()} on rank {rank}, {tensors[name].describe()} on rank {first[name]}; "
                    "expected equal shapes and dtypes on all ranks. Give different tensors different names."
                )
            first.setdefault(name, rank)
            if region.num_elements:
                holders.setdefault((name, region), []).append(rank)
    _check_cover(tensors, holders)
    parts = _first_holders(holders, len(descriptions))
    return SavePlan(tensors, parts, hashlib.sha256(dump_json(descriptions)).hexdigest())


def _first_holders(holders: Mapping[Part, list[int]], num_ranks: int) -> tuple[tuple[Part, ...], ...]:
    """Assign each part to the first rank that holds it.

    If replicas differ, for example the running statistics of a model in torch's DDP, the checkpoint has the values of
    one replica. A balanced assignment would mix the replicas.
    """
    given: list[list[Part]] = [[] for _ in range(num_ranks)]
    for part, ranks in holders.items():
        given[ranks[0]].append(part)
    return tuple(tuple(sorted(parts)) for parts in given)


def _check_cover(tensors: Mapping[str, TensorInfo], holders: Mapping[Part, list[int]]) -> None:
    regions: dict[str, list[Region]] = {name: [] for name in tensors}
    for name, region in holders:
        regions[name].append(region)
    for name, info in tensors.items():
        problem = cover_problem(info.shape, regions[name])
        if problem is not None:
            raise StateError(
                f"{name} {info.describe()} cannot be assembled from the ranks' shards: {problem} "
                "Pass the tensor on all ranks of its mesh."
            )
