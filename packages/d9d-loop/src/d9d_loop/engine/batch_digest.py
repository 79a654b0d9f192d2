"""Digests of batches, by which the ranks of one data-parallel coordinate find that they have different batches.

Otherwise a pipeline would train on the tokens of one batch and the labels of another. Integers are compared exactly:
token ids, labels, masks. Floating-point values may have been computed on each rank, so they may differ by rounding.
Large tensors on the CPU are sampled with a fixed odd stride; with an even one, all samples of a matrix could be in one
column. Of tensors on an accelerator all integers are compared, and no other values.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

_MAX_INTEGERS, _MAX_FLOATS = 1 << 17, 1 << 12  # samples of a tensor
_FACTOR = 0x9E3779B97F4A7C1
_MODULUS = (1 << 50) - 1  # exact as float64
_FLOAT_SCALE = 1e4  # for a float, the tolerance is about 1 percent, but at least 1e-6
_SMALLEST = 1e-3  # differences of 1e-6 are rounding also in values about 0, such as those of two equal policies
TOLERANCE = 1e-2
"""Largest difference of a digest of floating-point values: of values that are different, almost all digests differ."""


def digest_batches(batches: Sequence[Any]) -> list[float]:
    """Return a digest as JSON: an exact number, and two that may differ by `TOLERANCE`. No collectives.

    Of tensors on an accelerator only dtypes and shapes are included; see `digest_on_device`.
    """
    exact, close = len(batches), [0.0, 0.0]
    for number, (path, leaf) in enumerate(_leaves(batches, "")):
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
            exact = zlib.crc32(f"{path}{leaf.dtype}{leaf.shape}".encode(), exact)
            if leaf.device.type != "cpu" or not leaf.numel():
                continue
            values = _samples(leaf.detach())
            if values.is_floating_point():
                along, length = _project(values, number)
                close[0], close[1] = close[0] + along, close[1] + length
            else:
                # Wraps around. An order of magnitude faster than a checksum of the bytes.
                values = values if values.dtype == torch.int64 else values.to(torch.int64)
                dot = int(torch.dot(values, _factors(values.numel())).item())
                exact = zlib.crc32(dot.to_bytes(8, "little", signed=True), exact)
        elif isinstance(leaf, float) and math.isfinite(leaf):
            exact = zlib.crc32(f"{path}float".encode(), exact)
            close[0] += math.asinh(max(min(leaf, 1e300), -1e300) * _FLOAT_SCALE) * (1 + number % 7)
        elif isinstance(leaf, str | bytes | int | float | complex | None):
            exact = zlib.crc32(f"{path}{leaf!r}".encode(), exact)
    return [exact, *close]


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


def are_close(digest: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if two results of `digest_batches` are those of the same batches."""
    return digest[:1] == other[:1] and all(abs(a - b) <= TOLERANCE for a, b in zip(digest[1:], other[1:], strict=True))


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
    else:
        for index, value in enumerate(pytree.tree_leaves(tree)):
            yield f"{path}.{index}", value


def _samples(tensor: Tensor) -> Tensor:
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    limit = _MAX_FLOATS if flat.is_floating_point() else _MAX_INTEGERS
    return flat if len(flat) <= limit else flat[:: -(-len(flat) // limit) | 1].contiguous()


def _project(values: Tensor, number: int) -> tuple[float, float]:
    """Return the projection of a vector on one direction, and the logarithm of its length."""
    wide = values.to(torch.float32)
    length, along = math.sqrt(torch.dot(wide, wide).item()), torch.dot(wide, _direction(len(wide))).item()
    if not (math.isfinite(length) and math.isfinite(along)):
        return _project(wide.nan_to_num(nan=0.5, posinf=2.0, neginf=-2.0).clamp(-1e9, 1e9), number)
    return along / max(length, _SMALLEST * math.sqrt(len(wide))) * (1 + number % 7), math.log1p(length)


@lru_cache(maxsize=16)
def _factors(size: int) -> Tensor:
    return torch.arange(1, size + 1) * _FACTOR + 1


@lru_cache(maxsize=16)
def _direction(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))
