"""Stand-ins and batch norms: their running statistics would include stand-in batches, so this is an error."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

STAND_INS = (
    "the model has batch norms in training mode, whose statistics would include stand-in batches; expected as many "
    "microbatches on all ranks. Pass equal numbers, or call eval() on the batch norms."
)


def trains_batch_norm(model: nn.Module) -> bool:
    """Return True if a model has batch norms in training mode."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
