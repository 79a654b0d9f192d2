"""One stage on its rank: forward, and backward as a whole or in two halves, cut off from the stages around it."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from d9d_dist import LaterGradients, SplitBackward, defer_gradient_sync, finish_gradient_sync, set_gradient_sync


@final
@dataclass(slots=True)
class Flight:
    """What is remembered of a forward until its backward.

    Attributes:
        received: For each tensor of the stage's input that needs a gradient, the leaf that gathers it.
        sources: Where backward starts: for each tensor of the output that needs a gradient, its edge of the graph,
            which does not keep the tensor's memory.
    """

    received: list[Tensor]
    sources: list[GradientEdge]


@final
class Stage:
    """A module, and how backward runs through it.

    Args:
        module: The stage.
        is_first: Whether there is none before it.
        is_last: Whether there is none after it.
        last_backward: The microbatch whose gradients come last in a step; None if there are no backwards.
        splits: Whether some of its backwards are split.
        accumulates: Whether a step has several microbatches.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        is_first: bool,
        is_last: bool,
        last_backward: int | None,
        splits: bool,
        accumulates: bool,
    ) -> None:
        self._module, self._is_first, self._is_last = module, is_first, is_last
        self._syncs: bool | None = None
        self._last_backward, self._accumulates = last_backward, accumulates
        self._split = SplitBackward() if splits else None
        if splits:
            defer_gradient_sync(module)

    @property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return self._last_backward is not None

    def forward(self, args: tuple[Any, ...], shared: Mapping[str, Any]) -> tuple[Any, Flight | None]:
        """Run forward.

        Args:
            args: The positional arguments. Those of the first stage are a user's own; from others' tensors that need
                gradients the graph is cut off, and starts anew.
            shared: The keyword arguments.

        Returns:
            What the stage returned, and what its backward needs; None where there is no backward.
        """
        if not self.trains:
            with torch.no_grad():
                return self._module(*args, **shared), None
        received: list[Tensor] = []
        if not self._is_first:
            args = pytree.tree_map(_receive_into(received), args)
        with nullcontext() if self._split is None else self._split.forward():
            output = self._module(*args, **shared)
        # The last stage's backward starts from the loss, which is yet to come.
        return output, Flight(received, [] if self._is_last else edges_of(output))

    def backward(self, flight: Flight, gradients: list[Tensor | None], microbatch: int) -> list[Tensor | None]:
        """Run backward, of inputs and weights.

        Args:
            flight: What forward left.
            gradients: The gradient of each source; None where the next stage did not use it.
            microbatch: Which one it is.

        Returns:
            The gradient of each received tensor; None where this stage did not use it.
        """
        if self._split is not None:
            received, later = self.backward_input(flight, gradients)
            self.backward_weight(later, microbatch)
            return received
        if self._accumulates and self._syncs != (microbatch == self._last_backward):
            self._syncs = microbatch == self._last_backward
            set_gradient_sync(self._module, self._syncs)
        sources, gradients = _only_used(flight.sources, gradients)
        if sources:
            torch.autograd.backward(sources, gradients)
        return [leaf.grad for leaf in flight.received]

    def backward_input(
        self, flight: Flight, gradients: list[Tensor | None]
    ) -> tuple[list[Tensor | None], LaterGradients]:
        """Run the first half of backward; see `backward`.

        Returns:
            The gradients of received tensors, and what is yet to be done.
        """
        assert self._split is not None, "a stage whose backward is split says so"
        sources, gradients = _only_used(flight.sources, gradients)
        later = self._split.backward(sources, gradients) if sources else LaterGradients()
        return [leaf.grad for leaf in flight.received], later

    def backward_weight(self, later: LaterGradients, microbatch: int) -> None:
        """Run the second half of backward.

        Args:
            later: What the first half left.
            microbatch: Which one it is.
        """
        later.compute()
        if microbatch == self._last_backward:
            finish_gradient_sync(self._module)


def edges_of(tree: Any) -> list[GradientEdge]:
    """Where backward starts: an edge for each tensor of a tree that needs a gradient."""
    leaves = [tree] if isinstance(tree, Tensor) else pytree.tree_leaves(tree)
    return [get_gradient_edge(leaf) for leaf in leaves if needs_gradient(leaf)]


def needs_gradient(leaf: object) -> bool:
    """Whether a leaf of a tree is a tensor whose gradient is wanted."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _receive_into(received: list[Tensor]) -> Callable[[Any], Any]:
    """Cut the graph at a stage's boundary: each tensor that needs a gradient becomes a leaf that gathers it."""

    def receive(leaf: Any) -> Any:
        if not needs_gradient(leaf):
            return leaf
        leaf = leaf.detach().requires_grad_()
        received.append(leaf)
        return leaf

    return receive


def _only_used(
    sources: list[GradientEdge], gradients: list[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """Drop the outputs that the next stage did not use."""
    assert len(sources) == len(gradients), "one gradient for each output that needs one"
    if all(gradient is not None for gradient in gradients):
        return sources, gradients
    used = [index for index, gradient in enumerate(gradients) if gradient is not None]
    return [sources[index] for index in used], [gradients[index] for index in used]
