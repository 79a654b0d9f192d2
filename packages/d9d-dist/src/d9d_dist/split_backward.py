"""Tells custom autograd functions whether a backward pass asks them for gradients of inputs, of weights, or both.

Pipeline schedules that compute input gradients first and weight gradients later run backward twice over one graph.
torch's own operators leave out what a pass does not ask for; a Python `torch.autograd.Function` cannot know:
`ctx.needs_input_grad` says what required a gradient in forward. Without being told, it would compute everything twice.

What a pass wants cannot be found through a thread-local or a context variable in backward, which on accelerators runs
in threads of its own. So the function takes a handle along from its forward, and whoever runs backward sets it:

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            ctx.wanted = gradients_wanted()
            return x @ weight.T

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight if ctx.wanted.inputs else None, grad.T @ x if ctx.wanted.weights else None
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True)
class GradientsWanted:
    """What the backward pass that is running asks for; read it in backward, not before.

    Attributes:
        inputs: Whether gradients of activations are wanted.
        weights: Whether gradients of parameters are wanted.
    """

    inputs: bool = True
    weights: bool = True


_active: ContextVar[GradientsWanted | None] = ContextVar("d9d_gradients_wanted", default=None)


def gradients_wanted() -> GradientsWanted:
    """The handle to keep in `ctx` in a custom function's forward; outside any split it wants everything, always."""
    return _active.get() or GradientsWanted()


@final
class SplitBackward:
    """The executor's side: one for each stage, over all its microbatches. Splits do not disturb each other.

        split = SplitBackward()
        with split.forward():
            y = stage(x)
        with split.only_inputs():
            torch.autograd.grad(y, x, grad_y, retain_graph=True)
        with split.only_weights():
            torch.autograd.grad(y, weights, grad_y)

    A pass runs in one of these contexts or, for both kinds of gradients at once, in none. Its functions are those of
    this split alone; their weights' gradients are the executor's to add up.
    """

    def __init__(self) -> None:
        self._wanted = GradientsWanted()

    @contextmanager
    def forward(self) -> Generator[None]:
        """Functions whose forward runs in here, in this thread, belong to this split; the innermost split counts."""
        token = _active.set(self._wanted)
        try:
            yield
        finally:
            _active.reset(token)

    @contextmanager
    def only_inputs(self) -> Generator[None]:
        """Backward in here computes gradients of activations, whichever threads it runs in."""
        with self._wanting(inputs=True, weights=False):
            yield

    @contextmanager
    def only_weights(self) -> Generator[None]:
        """Backward in here computes gradients of parameters, whichever threads it runs in."""
        with self._wanting(inputs=False, weights=True):
            yield

    @contextmanager
    def _wanting(self, *, inputs: bool, weights: bool) -> Generator[None]:
        before = self._wanted.inputs, self._wanted.weights
        self._wanted.inputs, self._wanted.weights = inputs, weights
        try:
            yield
        finally:
            self._wanted.inputs, self._wanted.weights = before
