"""Gradients with memory of their own, where autograd cannot see inside a DTensor whether memory is shared.

Autograd stores a gradient in a parameter's `.grad` without a copy if no other tensor refers to it, else it copies it.
For example, both operands of a sum receive the same gradient tensor, and later accumulation into `.grad` is in place. A
gradient that is wrapped as a DTensor always looks unshared, so sharing has to be checked before wrapping.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch


def own_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with a gradient that is contiguous and owns its memory; backward copies it only if needed."""
    if torch.compiler.is_compiling():
        return _CopyGradient.apply(x)
    return _OwnGradient.apply(x, _unshared_references())


class _References(NamedTuple):
    """Reference counts of a gradient, its storage and, if it is a view, its base.

    Each tensor has two counts, Python's and C++'s: all Python references together count as one in C++.
    """

    gradient: tuple[int, int]
    storage: int
    base: tuple[int, int] | None


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unshared: frozenset[_References]) -> torch.Tensor:
        ctx.unshared = unshared
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if _references(gradients) in ctx.unshared and _owns_its_storage(gradients[0]):
            return gradients[0], None
        return gradients[0].clone(memory_format=torch.contiguous_format), None


class _CopyGradient(torch.autograd.Function):
    """Variant for compiled code, which always copies: a traced graph has no reference counts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clone(memory_format=torch.contiguous_format)


class _CountReferences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, found: list[_References]) -> torch.Tensor:
        ctx.found = found
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.found.append(_references(gradients))
        return gradients[0], None


def _references(gradients: tuple[torch.Tensor, ...]) -> _References:
    """Return the reference counts of the only gradient passed to a backward, as seen from within that backward."""
    gradient = (sys.getrefcount(gradients[0]), gradients[0]._use_count())
    storage = torch._C._storage_Use_Count(gradients[0].untyped_storage()._cdata)
    base = gradients[0]._base
    return _References(gradient, storage, None if base is None else (sys.getrefcount(base), base._use_count()))


def _owns_its_storage(gradient: torch.Tensor) -> bool:
    return gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes


@cache
def _unshared_references() -> frozenset[_References]:
    """Return the reference counts of unshared gradients: a new tensor, and a view of a new tensor.

    The counts include references held by autograd itself, whose number depends on the versions of torch and Python.
    """
    # In a separate thread: the first forward may run under activation checkpointing, which counts saved tensors.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_count_unshared_references).result()


def _count_unshared_references() -> frozenset[_References]:
    found: list[_References] = []
    with torch.inference_mode(False), torch.enable_grad():  # the first forward may run in inference mode
        x = torch.ones(1, device="cpu", requires_grad=True)
        _CountReferences.apply(x, found).exp().backward()
        _CountReferences.apply(x, found).view(()).exp().backward()
    return frozenset(found)
