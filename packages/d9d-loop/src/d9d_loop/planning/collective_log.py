"""Collectives that operators issue: name, ranks of the group, and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
# Operators that transfer no data: `wait_tensor` waits for an earlier collective, `monitored_barrier_` is a barrier.
_WITHOUT_TRAFFIC = {"wait_tensor", "monitored_barrier_"}
_GATHERS = ("allgather_", "_allgather_base_", "all_gather_into_tensor", "all_gather_into_tensor_out")
_NAMES = {
    **dict.fromkeys(("allreduce_", "all_reduce_"), "all_reduce"),
    **dict.fromkeys(_GATHERS, "all_gather"),
    **dict.fromkeys(("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor"), "reduce_scatter"),
    **dict.fromkeys(("alltoall_", "alltoall_base_", "all_to_all_single"), "all_to_all"),
    "broadcast_": "broadcast",
    "recv_": "receive",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective, send or receive of this rank.

    Attributes:
        name: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `receive`, or the name
            of torch's operator without a trailing underscore.
        ranks: Global ranks of the process group; for a send or receive, only the peer.
        num_bytes: Size of this rank's larger buffer: its input or its output.
    """

    name: str
    ranks: tuple[int, ...]
    num_bytes: int


def collective_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Collective | None:
    """Return the collective that an operator call issues; `None` for any other operator."""
    name = func._schema.name.partition("::")[2]
    if func.namespace not in COLLECTIVE_NAMESPACES or name in _WITHOUT_TRAFFIC:
        return None
    leaves = pytree.tree_leaves((args, kwargs))
    group = next((found for leaf in leaves if (found := _group(leaf)) is not None), None)
    if group is None:
        return None
    arguments = [argument.name for argument in func._schema.arguments]
    given = dict(zip(arguments, args, strict=False)) | kwargs
    ranks = _ranks(group)
    if name in ("send", "recv_"):
        ranks = (ranks[given.get("dst", given.get("src"))],)
    sides = [_num_bytes(value) for value in given.values()]
    if func.namespace != "c10d":
        sides.append(_num_bytes(result))
    return Collective(_NAMES.get(name, name.rstrip("_")), ranks, max(sides, default=0))


# A group of a large job has thousands of ranks, and a step thousands of collectives.
_RANKS_OF: WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    if group not in _RANKS_OF:
        _RANKS_OF[group] = tuple(dist.get_process_group_ranks(group))
    return _RANKS_OF[group]


def _group(leaf: Any) -> dist.ProcessGroup | None:
    if isinstance(leaf, torch.ScriptObject) and leaf._type().name() == "ProcessGroup":
        return dist.ProcessGroup.unbox(leaf)
    if isinstance(leaf, dist.ProcessGroup):
        return leaf
    if isinstance(leaf, str) and leaf in dist.distributed_c10d._world.pg_names.values():
        return dist.distributed_c10d._resolve_process_group(leaf)
    return None


def _num_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operator, including those in lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found
