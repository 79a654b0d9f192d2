"""Who writes which part of which tensor: every rank says what it holds, and all of them come to the same plan.

Which part of a `DTensor` a rank holds is what torch's checkpoint planner says. Its way to a common plan is not used: it
sends pickled objects. Here descriptions travel as JSON, and only when one changed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from d9d_dist import DistributedContext
from d9d_state._consensus import agree, exchange_json
from d9d_state.checkpoint.boxes import Box, cover_problem
from d9d_state.errors import StateError
from d9d_state.json_value import JsonValue, dump_json
from d9d_state.safetensors_header import dtype_name, dtype_of, parse_shape
from d9d_state.tensor_info import TensorInfo

Part = tuple[str, Box]
"""A tensor's name, and which part of it."""


@final
@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a checkpoint will hold, and who writes it. Equal on all ranks.

    Attributes:
        tensors: Every tensor of every rank.
        parts: What each rank writes, in order.
        digest: Equal plans have equal ones.
    """

    tensors: Mapping[str, TensorInfo]
    parts: tuple[tuple[Part, ...], ...]
    digest: str

    def num_bytes(self, rank: int) -> int:
        """How many bytes of tensors a rank writes."""
        return sum(box.num_elements * self.tensors[name].dtype.itemsize for name, box in self.parts[rank])


@final
class SavePlanner:
    """Makes plans, and keeps the last one for as long as every rank has the same tensors in the same places."""

    def __init__(self) -> None:
        self._key: object = None
        self._items: dict[Part, WriteItem] = {}
        self._plan: SavePlan | None = None
        self.num_plans = 0

    def plan(self, tensors: Mapping[str, Tensor], ctx: DistributedContext | None) -> SavePlan:
        """The plan for some tensors. Collective: a digest of each rank, and descriptions if anything changed on one.

        Raises:
            StateError: On every rank, if a tensor cannot be saved, or ranks hold what does not fit together.
            ValueError: The same, for a process on its own.
        """
        problem, key = None, None
        try:
            key = tuple(_key(name, tensor) for name, tensor in tensors.items())
            is_known = self._plan is not None and key == self._key
            description, items = (None, self._items) if is_known else _describe(tensors)
        except (ValueError, RuntimeError) as error:
            if ctx is None or ctx.world_size == 1:
                raise
            problem, description, items, is_known = str(error), None, {}, False
        agree(problem, ctx)
        known = self._plan.digest if is_known and self._plan is not None else None
        answers = exchange_json(known, ctx)
        if known is not None and all(answer == known for answer in answers):
            assert self._plan is not None
            return self._plan
        if description is None:
            description, items = _describe(tensors)
        plan = _merge(exchange_json(description, ctx))
        self._key, self._items, self._plan = key, items, plan
        self.num_plans += 1
        return plan

    def local_parts(self, tensors: Mapping[str, Tensor], plan: SavePlan, rank: int) -> dict[str, Tensor]:
        """What this rank writes by that plan, by the key of each part in the file; no copies."""
        planner = _torch_planner(tensors)
        parts: dict[str, Tensor] = {}
        for name, box in plan.parts[rank]:
            local = planner.resolve_data(self._items[name, box])
            assert isinstance(local, Tensor), f"{name} is no tensor"
            parts[part_key(name, box)] = local.detach()
        return parts


def part_key(name: str, box: Box) -> str:
    """The name of a part in a file of tensors."""
    return f"{name}@{','.join(map(str, box.offset))}"


def _key(name: str, tensor: Tensor) -> object:
    """What the plan for a tensor depends on, cheaply: the description costs some 50 µs a tensor."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is of type {type(tensor).__name__}; expected a tensor. Put it into state.")
    layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return name, tensor.shape, tensor.dtype, layout


def _torch_planner(tensors: Mapping[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    return planner


def _describe(tensors: Mapping[str, Tensor]) -> tuple[JsonValue, dict[Part, WriteItem]]:
    """What this rank holds: `{name: [dtype, shape, [[offset, sizes], ...]]}`, and how to get at it."""
    held: dict[str, list[JsonValue]] = {name: [] for name in tensors}
    items: dict[Part, WriteItem] = {}
    for item in _torch_planner(tensors).create_local_plan().items:
        data = item.tensor_data
        assert data is not None, f"{item.index.fqn} is no tensor"
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        if box.num_elements > 0:
            items[item.index.fqn, box] = item
            held[item.index.fqn].append([list(box.offset), list(box.shape)])
    return {name: [dtype_name(tensor.dtype), list(tensor.shape), held[name]] for name, tensor in tensors.items()}, items


def _merge(descriptions: list[JsonValue]) -> SavePlan:
    """The plan that follows from what all ranks hold. Equal on all of them, and so is what is raised."""
    tensors: dict[str, TensorInfo] = {}
    first: dict[str, int] = {}
    holders: dict[Part, list[int]] = {}
    for rank, description in enumerate(descriptions):
        for name, (info, boxes) in _parse(rank, description).items():
            if tensors.setdefault(name, info) != info:
                raise StateError(
                    f"{name} is {info.describe()} on rank {rank}, {tensors[name].describe()} on rank {first[name]}; "
                    "expected the same on all ranks that have it. Give different tensors different names."
                )
            first.setdefault(name, rank)
            for box in boxes:
                holders.setdefault((name, box), []).append(rank)
    _check_cover(tensors, holders)
    parts = _share_out(tensors, holders, len(descriptions))
    return SavePlan(tensors, parts, hashlib.sha256(dump_json(descriptions)).hexdigest())


def _share_out(
    tensors: Mapping[str, TensorInfo], holders: Mapping[Part, list[int]], num_ranks: int
) -> tuple[tuple[Part, ...], ...]:
    """Give each part to one of the ranks that hold it: the largest first, to the rank that has least to write."""
    loads = [0] * num_ranks
    given: list[list[Part]] = [[] for _ in range(num_ranks)]
    sizes = {part: part[1].num_elements * tensors[part[0]].dtype.itemsize for part in holders}
    # Where there is no choice, there is load; what can be moved is moved around it.
    for part in sorted(holders, key=lambda part: (len(holders[part]) > 1, -sizes[part], part)):
        rank = min(holders[part], key=lambda rank: loads[rank])
        loads[rank] += sizes[part]
        given[rank].append(part)
    return tuple(tuple(sorted(parts)) for parts in given)


def _check_cover(tensors: Mapping[str, TensorInfo], holders: Mapping[Part, list[int]]) -> None:
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for name, box in holders:
        boxes[name].append(box)
    for name, info in tensors.items():
        problem = cover_problem(info.shape, boxes[name])
        if problem is not None:
            raise StateError(
                f"{name} {info.describe()} cannot be put together from what the ranks hold: {problem} "
                "Pass the same tensors on all ranks of its mesh."
            )


def _parse(rank: int, description: Any) -> dict[str, tuple[TensorInfo, list[Box]]]:
    """What a rank said, checked: it runs the same code, but perhaps not the same version of it."""
    try:
        return {
            name: (
                TensorInfo(parse_shape(shape), dtype_of(dtype)),
                [Box(parse_shape(offset), parse_shape(sizes)) for offset, sizes in boxes],
            )
            for name, (dtype, shape, boxes) in description.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise StateError(f"rank {rank} does not describe its tensors as this rank does: {error}") from error
