"""Gradients of inputs now, gradients of weights later: what zero-bubble pipeline schedules fill their bubbles with.

Other ranks wait for the gradients of a stage's inputs; nobody waits for those of its weights, which cost as much. So
in `SplitBackward.backward` every linear layer puts what its weight's gradient is computed from aside
and goes on. Later, `LaterGradients.compute` does that work, and adds the results to `.grad` as backward would have.

Backward runs once, so activation checkpoints are recomputed once, a weight that is used twice receives both gradients,
and whatever cannot wait, such as the gradient of a norm's weight or of compiled code, is simply there early. A custom
autograd function takes part by asking for its weight, which autograd then must not see:

    def scale(x, weight):
        weight, slot = take_weight(weight, x)
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

The idea of the split is that of "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
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


@final
class LaterGradients:
    """Gradients of weights that are yet to be computed: those of one backward pass."""

    def __init__(self) -> None:
        self._weights: dict[int, Tensor] = {}
        self._works: dict[int, list[Callable[[], Tensor]]] = {}

    def __len__(self) -> int:
        """The number of weights that wait for a gradient."""
        return len(self._weights)

    def put(self, weight: Tensor, work: Callable[[], Tensor]) -> None:
        """Compute a gradient of a weight later; several of one weight are added up."""
        self._weights[id(weight)] = weight
        self._works.setdefault(id(weight), []).append(work)

    def compute(self) -> None:
        """Compute all gradients and add them to `.grad`, one weight after the other, freeing what each needed."""
        for key in list(self._weights):
            weight, works = self._weights.pop(key), self._works.pop(key)
            with torch.no_grad():
                gradient = works.pop()()
                while works:  # not in place: what a work gives may be somebody else's tensor
                    gradient = gradient + works.pop()()
            # Not always a leaf: of a DTensor the layer sees this rank's part.
            torch.autograd.backward(weight, gradient)


@final
class SplitBackward:
    """One for each stage, over all its microbatches; splits do not disturb each other.

    split = SplitBackward()
    with split.forward():
        y = stage(x)
    later = split.backward([y], [grad_y])   # x.grad is there
    later.compute()                         # and now those of the weights
    """

    def __init__(self) -> None:
        self._later: LaterGradients | None = None
        self._linear = _LinearMode(self)

    @contextmanager
    def forward(self) -> Generator[None]:
        """Linear layers and functions whose forward runs in here, in this thread, belong to this split."""
        token = _active.set(self)
        try:
            with self._linear:
                yield
        finally:
            _active.reset(token)

    def backward(self, outputs: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> LaterGradients:
        """Run backward, and leave the gradients of weights out where they can wait.

        Args:
            outputs: Tensors that forward gave, or their gradient edges, which do not keep the tensors' memory.
            gradients: Those of the outputs; None for a scalar counts as 1.

        Returns:
            What is yet to be computed.
        """
        assert self._later is None, "one backward pass at a time"
        # Of edges torch does not ask whether a mode wants to take backward's place, and hide itself meanwhile.
        edges = [get_gradient_edge(x) if isinstance(x, Tensor) else x for x in outputs]
        self._later = later = LaterGradients()
        try:
            with self.forward():  # activation checkpoints run forward again, and must find what they found
                torch.autograd.backward(edges, list(gradients))
        finally:
            self._later = None
        return later


@final
class GradientSlot:
    """Where a custom function's backward puts the gradient of its weight. Made by `take_weight`."""

    __slots__ = ("_split", "_weight")

    def __init__(self, split: SplitBackward | None, weight: Tensor) -> None:
        self._split, self._weight = split, weight

    def give(self, work: Callable[[], Tensor]) -> Tensor | None:
        """The gradient for autograd, which backward returns; None if the weight needs none, or gets it another way.

        Args:
            work: Computes the gradient, now or later. What it refers to is kept until then; let it refer to the
                gradient that backward was given, not to a view of it, so that autograd does not reuse its memory.
        """
        if not self._weight.requires_grad:
            return None
        if self._split is None:
            return work()
        later = self._split._later
        if later is not None:
            later.put(self._weight, work)
            return None
        now = LaterGradients()
        now.put(self._weight, work)
        now.compute()
        return None


_active: ContextVar[SplitBackward | None] = ContextVar("d9d_split_backward", default=None)


def take_weight(weight: Tensor, *inputs: Tensor) -> tuple[Tensor, GradientSlot]:
    """What to pass to a custom function in place of a weight, and where its gradient goes.

    Outside any split it is the weight itself, and autograd treats it as ever.

    Args:
        weight: A parameter, or what was made of one.
        inputs: The function's other tensors. If none of them needs a gradient, the weight's cannot wait: backward
            would not come to the function at all.
    """
    return _take_weight(_active.get(), weight, *inputs)


def _take_weight(split: SplitBackward | None, weight: Tensor, *inputs: Tensor) -> tuple[Tensor, GradientSlot]:
    needed = weight.requires_grad and torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if split is None or not needed:
        return weight, GradientSlot(None, weight)
    return weight.detach(), GradientSlot(split, weight)


class _LinearMode(TorchFunctionMode):
    """Takes the place of `torch.nn.functional.linear` where a weight's gradient could wait.

    It knows its split: on accelerators activation checkpoints run forward again in threads of autograd's own, where
    torch enters its modes, but Python not its context variables.
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
    is_plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in (input, weight))
    if not is_plain or input.dim() < 2 or torch.is_autocast_enabled(input.device.type) or torch.compiler.is_compiling():
        return F.linear(input, weight, bias)
    taken, slot = _take_weight(split, weight, input)
    return F.linear(input, weight, bias) if taken is weight else _Linear.apply(input, taken, bias, slot)


class _Linear(torch.autograd.Function):
    """`x @ weight.T + bias`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slot: GradientSlot) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.slot = weight, slot
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        (x,) = ctx.saved_tensors
        grad_x = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        grad_weight = ctx.slot.give(lambda: gradient.flatten(end_dim=-2).T @ x.flatten(end_dim=-2))
        grad_bias = gradient.flatten(end_dim=-2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None
