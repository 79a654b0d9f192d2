"""Some optimizers train with other weights than those that are their result; this puts the result in place."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer


@runtime_checkable
class Averaging(Protocol):
    """An optimizer whose result is an average that its parameters do not hold while it trains."""

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the parameters hold the result in the body, and the same bits as before after it."""
        ...


@contextmanager
def evaluation_weights(model: nn.Module, optimizer: Optimizer) -> Generator[None]:
    """Let a model hold what its optimizer's training has come to, to evaluate or export it.

    With most optimizers that is what the model holds anyway. After the body the training weights are back, bit for bit.
    No collectives. Job checkpoints are saved outside of it: they continue a training.

    Args:
        model: Materialised and parallelised.
        optimizer: Over its parameters.
    """
    if not isinstance(optimizer, Averaging):
        yield
        return
    try:
        _forget_gathered(model)
        with optimizer.evaluation_weights():
            yield
    finally:
        _forget_gathered(model)


def _forget_gathered(model: nn.Module) -> None:
    """Free what FSDP may have kept of the full parameters: it would not see that their parts change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
