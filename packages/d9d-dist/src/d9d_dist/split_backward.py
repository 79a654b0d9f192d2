"""Deferred weight gradients (the W pass of zero-bubble schedules).

The previous pipeline stage waits for the gradients of a stage's inputs, but no rank waits for weight gradients, which
cost as much to compute. In `SplitBackward.backward` every linear layer saves the operands of its weight gradient.
`DeferredWeightGrads.compute` computes the weight gradients later and accumulates them into `.grad`.

Backward runs once, so activation checkpoints are recomputed once, and a weight that is used twice receives both
gradients. Gradients that cannot be deferred, such as those of norms and of compiled code, are computed in backward. A
custom autograd function defers its weight gradient by `defer_weight_grad`, which detaches the weight from autograd:

    def scale(x, weight):
        weight, slot = defer_weight_grad(weight, x)
        return Scale.apply(x, weight, slot)

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, slot):
            ctx.save_for_backward(x, weight)
            ctx.slot = slot
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, ctx.slot.give(lambda: (grad * x).sum(0)), None

The split follows "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from d9d_dist.gradients.first_derivative import first_derivative_only


@final
class DeferredWeightGrads:
    """Deferred weight gradients of one backward pass."""

    def __init__(self) -> None:
        self._weights: dict[int, Tensor] = {}
        self._works: dict[int, list[Callable[[], Tensor]]] = {}

    def __len__(self) -> int:
        """Return the number of weights with deferred gradients."""
        return len(self._weights)

    def put(self, weight: Tensor, work: Callable[[], Tensor]) -> None:
        """Defer a gradient of a weight. Several gradients of one weight are summed."""
        self._weights[id(weight)] = weight
        self._works.setdefault(id(weight), []).append(work)

    def compute(self) -> None:
        """Compute all gradients and accumulate them into `.grad`, one weight at a time; free the saved operands."""
        for key in list(self._weights):
            weight, works = self._weights.pop(key), self._works.pop(key)
            with torch.no_grad():
                gradient = works.pop()()
                while works:  # not in place: a callable may return a tensor that is used elsewhere
                    gradient = gradient + works.pop()()
            # The weight is not always a leaf: for a DTensor parameter it is the local tensor.
            torch.autograd.backward(weight, gradient)


@final
class SplitBackward:
    """Backward of one pipeline stage, split into input gradients and weight gradients.

    One object serves all microbatches of the stage:

        split = SplitBackward()
        with split.forward():
            y = stage(x)
        later = split.backward([y], [grad_y])   # sets x.grad
        later.compute()                         # sets .grad of the weights
    """

    def __init__(self) -> None:
        self._later: DeferredWeightGrads | None = None
        self._linear = _LinearMode(self)

    @contextmanager
    def forward(self) -> Generator[None]:
        """Make linear layers and `defer_weight_grad` use this split in the body's forward passes, in this thread."""
        token = _active.set(self)
        try:
            with self._linear:
                yield
        finally:
            _active.reset(token)

    def backward(
        self, outputs: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]
    ) -> DeferredWeightGrads:
        """Run backward, defer weight gradients where possible, and return the deferred ones.

        Args:
            outputs: Outputs of forward, or their gradient edges, which do not keep the outputs' memory alive.
            gradients: Gradients of the outputs; `None` means 1 for a scalar output.
        """
        assert self._later is None, "one backward pass at a time"
        # Given tensors instead of edges, torch would dispatch backward to active modes, and disable these modes.
        edges = [get_gradient_edge(x) if isinstance(x, Tensor) else x for x in outputs]
        self._later = later = DeferredWeightGrads()
        try:
            with self.forward():  # recomputation of activation checkpoints must run in the same mode as forward
                torch.autograd.backward(edges, list(gradients))
        finally:
            self._later = None
        return later


@final
class WeightGradHandle:
    """Handle through which a custom autograd function returns the gradient of its weight; see `defer_weight_grad`."""

    __slots__ = ("_split", "_weight")

    def __init__(self, split: SplitBackward | None, weight: Tensor) -> None:
        self._split, self._weight = split, weight

    def give(self, work: Callable[[], Tensor]) -> Tensor | None:
        """Compute or defer the weight gradient. Return the result for backward: the gradient, or None if deferred.

        Args:
            work: Function that computes the gradient, now or later; objects that it refers to are kept alive until
                then. It should refer to the gradient passed to backward, not to a view, so that autograd does not reuse
                the memory.
        """
        if not self._weight.requires_grad:
            return None
        if self._split is None:
            return work()
        later = self._split._later
        if later is not None:
            later.put(self._weight, work)
            return None
        now = DeferredWeightGrads()
        now.put(self._weight, work)
        now.compute()
        return None


_active: ContextVar[SplitBackward | None] = ContextVar("d9d_split_backward", default=None)


def defer_weight_grad(weight: Tensor, *inputs: Tensor) -> tuple[Tensor, WeightGradHandle]:
    """Return the weight to pass to a custom function, and the handle for its gradient.

    Outside of a split the weight itself is returned, and autograd handles it as usual.

    Args:
        weight: A parameter, or a tensor computed from one.
        inputs: Other tensors of the function. If none requires a gradient, the weight gradient is not deferred:
            backward would not reach the function.
    """
    return _defer_weight_grad(_active.get(), weight, *inputs)


def _defer_weight_grad(split: SplitBackward | None, weight: Tensor, *inputs: Tensor) -> tuple[Tensor, WeightGradHandle]:
    needed = weight.requires_grad and torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if split is None or not needed:
        return weight, WeightGradHandle(None, weight)
    return weight.detach(), WeightGradHandle(split, weight)


class _LinearMode(TorchFunctionMode):
    """Function mode that replaces `torch.nn.functional.linear` if the weight gradient can be deferred.

    The mode holds its split instead of reading the context variable. On accelerators, activation checkpoints are
    recomputed in autograd's threads, which inherit torch's modes but not Python's context variables.
    """

    def __init__(self, split: SplitBackward) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return _linear(self._split, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(split: SplitBackward, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  (torch's own name)
    is_plain = all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta for x in (input, weight))
    if not is_plain or input.dim() < 2 or torch.is_autocast_enabled(input.device.type) or torch.compiler.is_compiling():
        return F.linear(input, weight, bias)
    taken, slot = _defer_weight_grad(split, weight, input)
    return F.linear(input, weight, bias) if taken is weight else _Linear.apply(input, taken, bias, slot)


class _Linear(torch.autograd.Function):
    """`x @ weight.T + bias`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slot: WeightGradHandle) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.slot = weight, slot
        return F.linear(x, weight, bias)

    @staticmethod
    @first_derivative_only("a linear layer of a pipeline schedule that splits the backward pass")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        (x,) = ctx.saved_tensors
        grad_x = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        grad_weight = ctx.slot.give(lambda: gradient.flatten(end_dim=-2).T @ x.flatten(end_dim=-2))
        grad_bias = gradient.flatten(end_dim=-2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None
