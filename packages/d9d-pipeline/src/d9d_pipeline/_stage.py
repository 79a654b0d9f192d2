"""Forward and backward of one pipeline stage, with the autograd graph cut at the stage's inputs."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from d9d_dist import SplitBackward, defer_gradient_sync, finish_gradient_sync, set_gradient_sync
from d9d_dist.data_parallel.gathered_parameters import free_gathered, free_gathered_after_backward
from d9d_dist.split_backward import DeferredWeightGrads


@final
@dataclass(slots=True)
class ForwardState:
    """State kept from the forward of a microbatch for its backward.

    `received` has a detached leaf for each input that requires a gradient, `sources` the gradient edge of each output
    that requires a gradient. Edges do not keep the outputs' memory alive.
    """

    received: list[Tensor]
    sources: list[GradientEdge]


@final
class Stage:
    """Forward and backward of a stage's module.

    `last_backward` is the microbatch of the step's last backward, which starts the gradient reduction; None without
    backwards. `splits` is True if any backward is split into its two halves. `accumulates` is True if gradients are
    accumulated over microbatches before their reduction.
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
        """True if the stage has backwards."""
        return self._last_backward is not None

    def forward(
        self, args: tuple[Any, ...], shared: Mapping[str, Any], *, is_stand_in: bool = False
    ) -> tuple[Any, ForwardState | None]:
        """Run the forward of a microbatch; return the output, and the state for its backward if there is one."""
        if not self.trains:
            with torch.no_grad():
                output = self._module(*args, **shared)
            free_gathered(self._module)
            return output, None
        received: list[Tensor] = []
        if not self._is_first:
            args = pytree.tree_map(partial(_receive, received), args)
        split = nullcontext() if self._split is None else self._split.forward()
        with split, _copied_buffers(self._module) if is_stand_in else nullcontext():
            output = self._module(*args, **shared)
        # The last stage's backward starts from the loss, which is computed later.
        return output, ForwardState(received, [] if self._is_last else edges_of(output))

    def backward(self, state: ForwardState, gradients: list[Tensor | None], microbatch: int) -> list[Tensor | None]:
        """Run the whole backward of a microbatch, and return the gradient of each received tensor.

        Gradients are None for outputs that the next stage did not use, and for inputs that this stage did not use.
        """
        if self._split is not None:
            received, deferred = self.backward_input(state, gradients)
            self.backward_weight(deferred, microbatch)
            return received
        if self._accumulates and self._syncs != (microbatch == self._last_backward):
            self._syncs = microbatch == self._last_backward
            set_gradient_sync(self._module, self._syncs)
            free_gathered_after_backward(self._module, self._syncs)
        sources, gradients = _only_used(state.sources, gradients)
        if sources:
            torch.autograd.backward(sources, gradients)
        return [leaf.grad for leaf in state.received]

    def backward_input(
        self, state: ForwardState, gradients: list[Tensor | None]
    ) -> tuple[list[Tensor | None], DeferredWeightGrads]:
        """Run the first half of backward; return the input gradients and the deferred weight gradients."""
        assert self._split is not None, "splits=True is required for a split backward"
        sources, gradients = _only_used(state.sources, gradients)
        deferred = self._split.backward(sources, gradients) if sources else DeferredWeightGrads()
        return [leaf.grad for leaf in state.received], deferred

    def backward_weight(self, deferred: DeferredWeightGrads, microbatch: int) -> None:
        """Run the second half of backward, and start the gradient reduction if this is the step's last backward."""
        deferred.compute()
        if microbatch == self._last_backward:
            finish_gradient_sync(self._module)


@contextmanager
def _copied_buffers(module: nn.Module) -> Generator[None]:
    """Give a module copies of its buffers for the body. Graphs of the body keep the copies."""
    places = [(owner, name, each) for owner in module.modules() for name, each in owner._buffers.items()]
    copies = {id(each): each.clone() for _, _, each in places if each is not None}
    for owner, name, each in places:
        owner._buffers[name] = copies.get(id(each))
    try:
        yield
    finally:
        for owner, name, each in places:
            # The body may have replaced a cache, whose validity depends on attributes of the module.
            if name not in owner._non_persistent_buffers_set or owner._buffers[name] is copies.get(id(each)):
                owner._buffers[name] = each


def edges_of(tree: Any) -> list[GradientEdge]:
    """Return the gradient edge of each tensor of a tree that requires a gradient."""
    leaves = [tree] if isinstance(tree, Tensor) else pytree.tree_leaves(tree)
    return [get_gradient_edge(leaf) for leaf in leaves if needs_gradient(leaf)]


def needs_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _receive(received: list[Tensor], leaf: Any) -> Any:
    """Detach a tensor that requires a gradient, and append the new leaf to `received`."""
    if needs_gradient(leaf):
        leaf = leaf.detach().requires_grad_()
        received.append(leaf)
    return leaf


def _only_used(
    sources: list[GradientEdge], gradients: list[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """Remove the sources whose gradient is None: outputs that the next stage did not use."""
    used = [pair for pair in zip(sources, gradients, strict=True) if pair[1] is not None]
    return [source for source, _ in used], [gradient for _, gradient in used]
