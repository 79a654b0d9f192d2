"""Several optimizers that pass for one, each with parameters of its own: Muon for matrices, AdamW for the rest."""

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from d9d_loop.optimizers.evaluation_weights import Averaging


@final
class JoinedOptimizer(Optimizer):
    """Takes a step of each of its optimizers; its groups and its state are theirs, in this order, not copies.

    Attributes:
        optimizers: Those that it is made of.

    Args:
        optimizers: One or more, none of which has a parameter of another.
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
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss anew; called once, with gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; see `torch.optim.Optimizer.load_state_dict`."""
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
        self._share(self.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; later it would be nobody's.

        Raises:
            TypeError: After that.
        """
        if "optimizers" in vars(self):
            raise TypeError("a JoinedOptimizer takes no more groups; give them to one of the optimizers it is made of.")
        super().add_param_group(param_group)

    @contextmanager
    def evaluation_weights(self) -> Generator[None]:
        """Let the parameters of those that average hold their results in the body."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                if isinstance(optimizer, Averaging):
                    stack.enter_context(optimizer.evaluation_weights())
            yield

    def _share(self, state: defaultdict[Tensor, Any]) -> None:
        self.state = state
        for optimizer in self.optimizers:
            optimizer.state = state
