from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d9d_dist.gradients._owned_gradient import own_gradient

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
FACTORS = torch.arange(16.0).view(4, 4)


class _Spy(torch.autograd.Function):
    """Records the gradients between `own_gradient` and a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(gradients[0])
        return gradients[0], None


def _gradients(function: Function, *, own: bool = True) -> list[torch.Tensor]:
    """Return the gradient tensors that autograd passes to two parameters, without copies."""
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    leaves = [torch.ones(4, 4, requires_grad=True) for _ in seen]
    spied = [_Spy.apply(leaf, gradients) for leaf, gradients in zip(leaves, seen, strict=True)]
    function(*(own_gradient(x) if own else x for x in spied)).sum().backward()
    return [gradients[0] for gradients in seen]


SHARING: dict[str, Function] = {
    "sum": lambda a, b: (a + b) * FACTORS,
    "sum of a view": lambda a, b: (a + b.view(16).view(4, 4)) * FACTORS,
    "sum of two views": lambda a, b: (a.view(2, 8) + b.view(2, 8)) * FACTORS.view(2, 8),
    "cat": lambda a, b: torch.cat([a, b]) * torch.cat([FACTORS, FACTORS]),
    "stack": lambda a, b: torch.stack([a, b]) * torch.stack([FACTORS, FACTORS]),
    "expanded": lambda a, b: a.sum() + b.sum(),
    "transposed": lambda a, b: (a.t() + b.t()) * FACTORS,
}


@pytest.mark.parametrize("function", SHARING.values(), ids=SHARING.keys())
def test_shared_gradients_are_detected(function: Function) -> None:
    gradients = _gradients(function)
    for found, expected in zip(gradients, _gradients(function, own=False), strict=True):
        assert torch.equal(found, expected)
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == found.nbytes
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 2


@pytest.mark.parametrize("shape", [(4, 4), (16,)], ids=["itself", "view"])
@pytest.mark.parametrize("goes_first", [True, False])
def test_a_gradient_with_other_references_is_copied(goes_first: bool, shape: tuple[int, ...]) -> None:
    """A gradient that also flows into earlier layers, or that a hook keeps, must be copied."""
    kept: list[torch.Tensor] = []
    taken: list[torch.Tensor] = []
    a, b = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    # Backward runs the last created node first.
    stream = None if goes_first else _Spy.apply(b.view(shape).exp(), kept)
    own = own_gradient(_Spy.apply(a, taken)).view(shape)
    stream = _Spy.apply(b.view(shape).exp(), kept) if stream is None else stream
    ((own + stream) * FACTORS.view(shape)).sum().backward()
    assert torch.equal(taken[0].view(shape), kept[0])
    assert taken[0].data_ptr() != kept[0].data_ptr()


UNSHARED: dict[str, Function] = {
    "linear": lambda a, b: F.linear(F.linear(X, a), b),
    "matmul": lambda a, b: (X @ a) @ b,
    "product": lambda a, b: a * X * (b * X),
    "embedding": lambda a, b: F.embedding(torch.tensor([1, 2]), a) @ b,
    "used twice": lambda a, b: F.linear(F.linear(F.linear(X, a), a), b),
    "cast": lambda a, b: a.double().tanh() @ b.double(),
}


@pytest.mark.parametrize("function", UNSHARED.values(), ids=UNSHARED.keys())
def test_gradients_of_ordinary_layers_have_the_same_values(function: Function) -> None:
    for found, expected in zip(_gradients(function), _gradients(function, own=False), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_compiled_code_copies_shared_gradients() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (own_gradient(a) + own_gradient(b)) * FACTORS

    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    leaves = [_Spy.apply(torch.ones(4, 4, requires_grad=True), gradients) for gradients in seen]
    compiled(*leaves).sum().backward()
    assert torch.equal(seen[0][0], FACTORS)
    assert seen[0][0].data_ptr() != seen[1][0].data_ptr()


def test_a_parameter_may_be_used_under_an_activation_checkpoint() -> None:
    leaf = torch.ones(4, 4, requires_grad=True)
    checkpoint(lambda x: own_gradient(x).exp(), leaf, use_reentrant=False).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.ones(4, 4).exp())
