"""Folds adapters into the weights they adapt, so that a fine-tuned model is exported and served like any other."""

from collections import Counter

from torch import nn

from d9d_dist import DistributedContext, UserError
from d9d_peft._consensus import agree, exchange
from d9d_peft.adapter import adapted_layers


def merge_(model: nn.Module, ctx: DistributedContext | None = None) -> None:
    """Fold every adapter of a model into its layer's weight, in place, one layer at a time.

    The model computes the same as before, but for rounding, and goes on training from there. Beside the model stands no
    more than this rank's part of one weight in float32. Export it through `mapper.inverse()` of the mapper that
    `inject` returned. For sharded parameters this issues collectives: every rank must call it.

    Args:
        model: The model, or this rank's pipeline stages of it, on which `inject` was called.
        ctx: The ranks, which then refuse a model together; `None` for a process on its own.

    Raises:
        UserError: If no rank's part of the model has adapters, or one adapts a weight that another module uses as well;
            nothing is changed then.
    """
    layers = adapted_layers(model)
    agree(_tied(model), ctx)
    if not any(exchange(bool(layers), ctx)):
        raise UserError("merge_ got a model without adapters; expected one that inject() was called on.")
    for adapted in layers.values():
        adapted.adapter.merge_(adapted.layer)


def _tied(model: nn.Module) -> str | None:
    """What merging would change besides the layers that are adapted."""
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    own = {id(parameter) for parameter in model.parameters()}
    for name, adapted in adapted_layers(model).items():
        for parameter_name, parameter in adapted.layer.named_parameters(recurse=False):
            if owners[id(parameter)] > 1 or id(parameter) not in own:
                return (
                    f"{name}.{parameter_name} is tied to a parameter of another module, which merging would change "
                    "too; untie them, or save the adapters alone."
                )
    return None
