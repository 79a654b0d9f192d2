from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from d9d_dist.split_backward import SplitBackward, WeightGradHandle, defer_weight_grad


class _ScaleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slot: WeightGradHandle) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slot = slot
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, ctx.slot.give(lambda: (gradients[0] * x).sum((0, 1))), None


def _scale(x: Tensor, weight: Tensor) -> Tensor:
    """A custom function with a deferred weight gradient."""
    weight, slot = defer_weight_grad(weight, x)
    return _ScaleFunction.apply(x, weight, slot)


def _shift(x: Tensor, weight: Tensor) -> Tensor:
    weight, slot = defer_weight_grad(weight, x)
    return _ShiftFunction.apply(x, weight, slot)


class _ShiftFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slot: WeightGradHandle) -> Tensor:
        ctx.slot = slot
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradients[0], ctx.slot.give(lambda: gradients[0]), None


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class _Stage(nn.Module):
    """A stage with and without biases, a weight that is used twice, a custom function and a parametrized weight."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.third = parametrize.register_parametrization(nn.Linear(4, 4), "weight", _Doubled())
        self.scale, self.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.double()

    def block(self, x: Tensor) -> Tensor:
        x = x + self.first(x).tanh()
        x = _scale(self.second(x), self.scale)
        return self.first(x) + self.shift

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return F.linear(self.third(x).relu(), self.second.weight)


DEFERRED = ("first.weight", "second.weight", "third.parametrizations.weight.original", "scale")


def _stage(**options: bool) -> tuple[_Stage, Tensor, Tensor]:
    torch.manual_seed(0)
    stage = _Stage(**options)
    x, grad_y = (torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(2))
    return stage, x.requires_grad_(), grad_y


def _gradients(stage: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in stage.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
def test_deferred_weight_gradients_equal_one_backward(recompute: bool) -> None:
    stage, x, grad_y = _stage(recompute=recompute)
    stage(x).backward(grad_y)
    expected, expected_x = _gradients(stage), x.grad
    stage.zero_grad()
    x.grad = None

    split = SplitBackward()
    with split.forward():
        y = stage(x)
    later = split.backward([y], [grad_y])
    torch.testing.assert_close(x.grad, expected_x, rtol=1e-12, atol=1e-12)
    early = _gradients(stage)
    # Bias gradients of first and third are not deferred. The gradient behind a parametrized weight is.
    assert {name for name, gradient in early.items() if gradient is None} == set(DEFERRED)
    later.compute()
    assert len(later) == 0
    torch.testing.assert_close(_gradients(stage), expected, rtol=1e-12, atol=1e-12)


def test_in_flight_microbatches_are_accumulated() -> None:
    stage, x, grad_y = _stage()
    for factor in (1.0, 2.0, 3.0):
        stage(factor * x).backward(grad_y)
    expected = _gradients(stage)
    stage.zero_grad()

    split = SplitBackward()
    with split.forward():
        outputs = [stage(factor * x) for factor in (1.0, 2.0, 3.0)]
    waiting = [split.backward([output], [grad_y]) for output in outputs]
    for later in reversed(waiting):
        later.compute()
    torch.testing.assert_close(_gradients(stage), expected, rtol=1e-12, atol=1e-12)


def test_each_weight_is_accumulated_once() -> None:
    stage, x, grad_y = _stage()
    added: list[str] = []
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: added.append(name))
    split = SplitBackward()
    with split.forward():
        y = stage(x)
    later = split.backward([y], [grad_y])
    later.compute()
    assert sorted(added) == sorted(dict(stage.named_parameters()))


def test_a_backward_that_is_not_split_computes_everything() -> None:
    stage, x, grad_y = _stage()
    stage(x).backward(grad_y)
    expected = _gradients(stage)
    stage.zero_grad()
    with SplitBackward().forward():
        y = stage(x)
    y.backward(grad_y)
    torch.testing.assert_close(_gradients(stage), expected, rtol=1e-12, atol=1e-12)


def test_deferred_gradients_are_not_shared() -> None:
    """`shift` gets the gradient tensor that the linear layer has saved; the next gradient must not change it."""
    torch.manual_seed(0)
    linear, shift = nn.Linear(3, 3, bias=False).double(), nn.Parameter(torch.zeros(2, 5, 3, dtype=torch.float64))
    x, grad_y = (torch.randn(2, 5, 3, dtype=torch.float64) for _ in range(2))
    split, waiting = SplitBackward(), []
    for _ in range(2):
        with split.forward():
            y = (linear(x.clone().requires_grad_()) + shift).view(-1)
        waiting.append(split.backward([y], [grad_y.view(-1).clone()]))
    for later in waiting:
        later.compute()
    torch.testing.assert_close(linear.weight.grad, 2 * grad_y.flatten(0, 1).T @ x.flatten(0, 1))


@pytest.mark.parametrize("change", [nn.Linear.requires_grad_, torch.no_grad], ids=["frozen", "no_grad"])
def test_frozen_weights_defer_nothing(change: Callable[..., Any]) -> None:
    linear = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    split = SplitBackward()
    if change is torch.no_grad:
        with torch.no_grad(), split.forward():
            assert not linear(x).requires_grad
        return
    linear.requires_grad_(False)
    with split.forward():
        y = linear(x)
    later = split.backward([y.sum()], [None])
    assert len(later) == 0
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(2, 3))


def test_weight_gradients_under_autocast_are_not_deferred() -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    split = SplitBackward()
    with split.forward(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    later = split.backward([y.sum()], [None])
    assert len(later) == 0
    assert linear.weight.grad is not None


def test_layers_on_meta_run_without_a_deferred_gradient() -> None:
    """A stage computes on `meta` what other stages compute for it; `meta` has no autocast."""
    linear = nn.Linear(4, 4, device="meta")
    with SplitBackward().forward():
        assert linear(torch.empty(2, 4, device="meta")).shape == (2, 4)


def test_backward_may_run_in_another_thread() -> None:
    stage, x, grad_y = _stage()
    split = SplitBackward()
    with split.forward():
        y = stage(x)
    with ThreadPoolExecutor(1) as other:
        later = other.submit(split.backward, [y], [grad_y]).result()
    assert len(later) == len(DEFERRED)


def _fail() -> None:
    raise RuntimeError("failed")


def test_the_innermost_split_applies() -> None:
    outer, inner = SplitBackward(), SplitBackward()
    linear = nn.Linear(3, 3, bias=False)
    x = torch.randn(2, 3, requires_grad=True)
    with outer.forward():
        with inner.forward():
            y = linear(x)
        z = linear(y)
    assert len(outer.backward([z.sum()], [None])) == 1  # the gradient of the inner split is computed immediately
    assert linear.weight.grad is not None


def test_a_function_outside_any_split_uses_autograd() -> None:
    x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    (found,) = torch.autograd.grad(_scale(x, weight).sum(), weight)
    torch.testing.assert_close(found, x.detach().sum((0, 1)))
    assert _scale(x, weight.detach()).grad_fn is not None  # a frozen weight has no gradient, and its work is not called
    assert torch.autograd.grad(_scale(x, weight.detach()).sum(), x)[0].shape == x.shape


def test_nothing_is_deferred_without_inputs_that_need_gradients() -> None:
    linear, split = nn.Linear(3, 3), SplitBackward()
    with split.forward():
        y = linear(torch.randn(2, 3))
    later = split.backward([y.sum()], [None])
    assert len(later) == 0
    assert linear.weight.grad is not None


def test_an_exception_ends_the_context() -> None:
    split = SplitBackward()
    with pytest.raises(RuntimeError, match="failed"), split.forward():
        _fail()
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert defer_weight_grad(weight, x)[0] is weight
    x.register_hook(lambda _: _fail())
    for _ in range(2):  # the failed pass must not block the second one
        with pytest.raises(RuntimeError, match="failed"):
            split.backward([x.sum()], [None])


def test_a_deferred_computation_may_return_a_shared_tensor() -> None:
    x, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    split = SplitBackward()
    with split.forward():
        y = _shift(_shift(_shift(x, weight), weight), weight)
    split.backward([y], [torch.ones(3)]).compute()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0, 3.0]


def test_weight_gradients_of_1d_inputs_are_correct() -> None:
    linear, latent = nn.Linear(3, 2), torch.ones(3, requires_grad=True)
    split = SplitBackward()
    with split.forward():
        y = linear(latent)
    split.backward([y], [torch.ones(2)]).compute()
    assert linear.weight.grad is not None
    torch.testing.assert_close(linear.weight.grad, torch.ones(2, 3))


def test_stages_are_independent() -> None:
    (first, x, grad_y), (second, z, grad_w) = _stage(), _stage()
    one, other = SplitBackward(), SplitBackward()
    with one.forward():
        y = first(x)
    with other.forward():
        w = second(z)
    assert len(one.backward([w], [grad_w])) == 0  # weight gradients of the other stage are not deferred
    one.backward([y], [grad_y]).compute()
    torch.testing.assert_close(_gradients(first), _gradients(second), rtol=1e-12, atol=1e-12)
