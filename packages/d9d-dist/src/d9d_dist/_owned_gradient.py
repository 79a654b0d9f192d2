"""Makes sure that nobody else holds the memory of a gradient, where autograd cannot see it inside a DTensor.

Autograd takes a gradient into a parameter's `.grad` without a copy if no other tensor refers to it, and copies it if
one does: the two operands of a sum receive one tensor, and both will add to it in place. Wrapped as a DTensor every
gradient looks unshared, so the question has to be asked before it is wrapped.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch


def own_gradient(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself; its gradient is contiguous memory of its own, copied in backward only where it is not yet."""
    if torch.compiler.is_compiling():
        return _CopyGradient.apply(x)
    return _OwnGradient.apply(x, _references_of_unshared())


class _References(NamedTuple):
    """How often a gradient, its memory and, if it is a view, its base are referred to.

    A tensor counts as one reference to itself all those that Python holds, so both counts are needed.
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
        if _references(gradients) in ctx.unshared and _is_all_of_its_memory(gradients[0]):
            return gradients[0], None
        return gradients[0].clone(memory_format=torch.contiguous_format), None


class _CopyGradient(torch.autograd.Function):
    """What compiled code uses: in a traced graph there is nothing to count."""

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
    """Those of the only gradient that autograd passes to a backward, as counted from within it."""
    gradient = (sys.getrefcount(gradients[0]), gradients[0]._use_count())
    storage = torch._C._storage_Use_Count(gradients[0].untyped_storage()._cdata)
    base = gradients[0]._base
    return _References(gradient, storage, None if base is None else (sys.getrefcount(base), base._use_count()))


def _is_all_of_its_memory(gradient: torch.Tensor) -> bool:
    return gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes


@cache
def _references_of_unshared() -> frozenset[_References]:
    """What is counted for gradients that are known to be unshared, new tensors and views of such.

    Autograd's own calls hold some references too; versions of torch and of Python differ in how many.
    """
    # In a thread of its own: the first forward may be under an activation checkpoint, which counts what is saved.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_count_references_of_unshared).result()


def _count_references_of_unshared() -> frozenset[_References]:
    found: list[_References] = []
    with torch.inference_mode(False), torch.enable_grad():  # the first forward may be one of inference
        x = torch.ones(1, device="cpu", requires_grad=True)
        _CountReferences.apply(x, found).exp().backward()
        _CountReferences.apply(x, found).view(()).exp().backward()
    return frozenset(found)
