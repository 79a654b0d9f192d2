"""Digests of batches, by which the ranks of one data-parallel coordinate find that they have different batches.

Otherwise a pipeline would train on the tokens of one batch and the labels of another. Ranks read the same batches, so
digests are exact. Only if they differ, the ranks compare each value: floating-point values may have been computed on
each rank, such as rewards by a model in bfloat16, and may then differ by rounding.

Large tensors on the CPU are sampled with a fixed odd stride; with an even one, all samples of a matrix could be in one
column. Of tensors on an accelerator all integers are compared, and no other values; of sparse and nested ones, none.
"""

import ctypes
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from xxhash import xxh3_64

from d9d_dist import gather_json
from d9d_dist.collectives.tree_gather import all_gather_trees

_MAX_INTEGERS, _MAX_FLOATS = 1 << 17, 1 << 13  # samples of a tensor
_FACTOR = 0x9E3779B97F4A7C1
_MODULUS = (1 << 50) - 1  # exact as float64
_ROUNDING = 2.0**-6  # twice the largest distance of neighboring bfloat16 values, relative to the value
_SMALLEST = 1e-5  # rounding of float32 log-probabilities about 50, also where a difference of them is about 0


def digest_batches(batches: Sequence[Any]) -> int:
    """Return a digest of batches, equal for equal batches. No collectives.

    Of tensors on an accelerator only dtypes and shapes are included; see `digest_on_device`.
    """
    digest = xxh3_64(b"%d" % len(batches))
    for path, leaf in _leaves(batches, ""):
        _add(leaf, path, digest)
    return digest.intdigest()


def find_difference(batches: Sequence[Any], group: dist.ProcessGroup) -> tuple[int, int, str] | None:
    """Return a rank whose batches differ by more than rounding from the group's first rank, that first rank, the key.

    `None` if no rank differs. Collective: `gather_json`, and `all_gather_trees` of samples if only floats differ.
    """
    leaves = dict(_leaves(batches, ""))
    digests = {path: [_kind(leaf), _add(leaf, "", xxh3_64()).intdigest()] for path, leaf in leaves.items()}
    first, *others = gather_json(digests, group)
    ranks = dist.get_process_group_ranks(group)
    floats: set[str] = set()
    for rank, other in zip(ranks[1:], others, strict=True):
        for path in {**first, **other}:
            mine, its = first.get(path, [None, 0]), other.get(path, [None, 0])
            if mine[0] != its[0] or (mine[1] != its[1] and not re.search("float|complex", mine[0])):
                return rank, ranks[0], _name(path)
            if mine[1] != its[1]:
                floats.add(path)
    samples = all_gather_trees({path: _samples(_as_tensor(leaves[path])) for path in sorted(floats)}, group)
    for rank, other in zip(ranks, samples, strict=True):
        for path, values in other.items():
            if not _are_close(samples[0][path], values):
                return rank, ranks[0], _name(path)
    return None


def digest_on_device(batches: Iterable[Any], previous: Tensor | None) -> Tensor | None:
    """Return a digest of the integers on an accelerator, 0-dim int64, below 2 ** 50; `previous` without any.

    `previous` is the digest of earlier batches, on which the result also depends. The host does not wait.
    """
    for leaf in pytree.tree_leaves(list(batches)):
        is_tensor = isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
        if is_tensor and leaf.device.type != "cpu" and not (leaf.is_floating_point() or leaf.is_complex()):
            previous = mix(leaf.detach(), previous)
    return previous


def mix(integers: Tensor, previous: Tensor | None) -> Tensor:
    """Return a digest of integers and of an earlier digest."""
    values = integers.flatten().to(torch.int64)
    factors = torch.arange(1, len(values) + 1, device=values.device) * _FACTOR + 1
    found = (values * factors).sum()  # wraps around
    found = found ^ (found >> 29)
    return (found if previous is None else found + previous * 31) & _MODULUS


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their paths; faster than `pytree` for dicts, lists and tuples."""
    if isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from _leaves(tree[key], f"{path}.{key}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}.{index}")
    elif tree is None or isinstance(tree, (Tensor, str, int, float)):  # a union is built in each call
        yield path, tree
    elif isinstance(tree, Mapping):
        yield from _leaves(dict(tree), path)
    elif is_dataclass(tree):
        yield from _leaves({each.name: getattr(tree, each.name) for each in fields(tree)}, path)
    else:
        for index, value in enumerate(pytree.tree_leaves(tree)):
            yield f"{path}.{index}", _as_tensor(value)


def _as_tensor(leaf: Any) -> Any:
    """Return a NumPy array or a number as a tensor; an array of other objects as a list; other leaves unchanged."""
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float64)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(leaf, numpy.ndarray | numpy.generic):
        return leaf
    array = numpy.array(leaf, order="C", copy=None)
    try:
        return torch.as_tensor(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):  # texts, dates, objects
        return leaf.tolist()


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _add(leaf: Any, path: str, digest: xxh3_64) -> xxh3_64:
    """Add a leaf and its path to a digest, and return the digest."""
    if isinstance(leaf, Tensor):
        digest.update(f"{path}{leaf.dtype}{leaf.shape}".encode())
        if leaf.is_cpu and leaf.layout is torch.strided and not isinstance(leaf, DTensor):
            values = _samples(leaf)
            digest.update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
    elif isinstance(leaf, str | bytes | int | float | complex | list | None):
        digest.update(f"{path}{leaf!r}".encode())
    return digest


def _samples(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.reshape(-1)
    limit = _MAX_FLOATS if flat.is_floating_point() else _MAX_INTEGERS
    size = len(flat)
    return (flat if size <= limit else flat[:: -(-size // limit) | 1]).contiguous()


def _are_close(values: Tensor, others: Tensor) -> bool:
    """Return True if values differ by rounding to bfloat16, relative to themselves or to their median."""
    wide = values.double()
    sizes = wide[wide.isfinite() & (wide != 0)].abs()
    typical = sizes.median().item() if sizes.numel() else 0.0
    smallest = _SMALLEST + _ROUNDING * typical
    return torch.allclose(wide, others.double(), rtol=_ROUNDING, atol=smallest, equal_nan=True)


def _name(path: str) -> str:
    number, _, name = path[1:].partition(".")
    return f"{name} of batch {number}" if name else f"batch {number}"
