"""Evaluation weights of optimizers that train with different weights, such as averaging optimizers."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from d9d_dist.data_parallel.gathered_parameters import free_all_gathered


@runtime_checkable
class Averaging(Protocol):
    """Optimizer, or `WeightAverage`, with averaged evaluation weights; the parameters hold the training weights."""

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Swap in the evaluation weights for the body of the `with` block, and restore the parameters bit for bit."""
        ...


@contextmanager
def evaluation_weights(model: nn.Module, optimizer: Optimizer | Averaging) -> Generator[None]:
    """Swap in the evaluation weights for the body of the `with` block, to evaluate or export a model.

    For optimizers that are not `Averaging`, the weights do not change. `optimizer` may also be a `WeightAverage`.
    The training weights are restored bit for bit.
    No collectives. Do not save job checkpoints in the body, since they must contain the training weights.
    """
    if not isinstance(optimizer, Averaging):
        yield
        return
    try:
        free_all_gathered(model)
        with optimizer.evaluation_weights():
            yield
    finally:
        free_all_gathered(model)
