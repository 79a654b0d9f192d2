"""Combination of several optimizers with disjoint parameters, such as Muon for matrices and AdamW for others."""

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from d9d_loop.optimizers.averaging import Averaging
from d9d_loop.optimizers.groupwise import loss_of


@final
class JoinedOptimizer(Optimizer):
    """Optimizer that steps one or more optimizers of disjoint parameters.

    It shares their parameter groups and state without copies.

    Attributes:
        optimizers: The combined optimizers. `param_groups` has their groups in this order.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([{"params": []}], {})
        self.optimizers = tuple(optimizers)
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            state.update(optimizer.state)
        self._share(state)

    @torch.no_grad()
    def step(  # ty: ignore[incompatible-method-override]  (torch declares an overload for each kind of closure)
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step all optimizers; the closure is called once, with gradients enabled."""
        loss = loss_of(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into all optimizers."""
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
        self._share(self.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Only for the constructor: a later group has no optimizer and raises `TypeError`."""
        if "optimizers" in vars(self):
            raise TypeError(
                "a JoinedOptimizer does not support add_param_group; add the group to one of its optimizers."
            )
        super().add_param_group(param_group)

    @contextmanager
    def evaluation_weights(self) -> Generator[None]:
        """Swap in the evaluation weights of the averaging optimizers for the body of the `with` block."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                if isinstance(optimizer, Averaging):
                    stack.enter_context(optimizer.evaluation_weights())
            yield

    def _share(self, state: defaultdict[Tensor, Any]) -> None:
        self.state = state
        for optimizer in self.optimizers:
            optimizer.state = state


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers of a `JoinedOptimizer`, at any depth; another optimizer is its only part."""
    if isinstance(optimizer, JoinedOptimizer):
        return [part for each in optimizer.optimizers for part in parts_of(each)]
    return [optimizer]
