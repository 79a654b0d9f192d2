"""Folds adapters into the weights they adapt, so that a fine-tuned model is exported and served like any other."""

from collections import Counter
from typing import Protocol, runtime_checkable

from torch import nn

from d9d_dist import UserError


@runtime_checkable
class MergeableAdapter(Protocol):
    """A module that can fold its own adapter into the weights it holds."""

    def merge_adapter(self) -> None:
        """Change the weights in place, and reset the adapter so that it adds nothing any more."""
        ...


def merge_(model: nn.Module) -> None:
    """Fold every adapter of a model into its base weight, in place, one layer at a time.

    The model computes the same as before, but for rounding, and goes on training from there. Export it through
    `mapper.inverse()` of the mapper that `inject` returned. For sharded parameters this issues collectives: every rank
    must call it.

    Args:
        model: A model on which `inject` was called.

    Raises:
        UserError: If the model has no adapters, or one adapts a weight that another module uses as well; nothing is
            changed then.
    """
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, MergeableAdapter)}
    if not adapters:
        raise UserError("merge_ got a model without adapters; expected one that inject() was called on with LoRA.")
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    for name, module in adapters.items():
        for parameter_name, parameter in module.named_parameters():
            if owners[id(parameter)] > 1:
                raise UserError(
                    f"{name}.{parameter_name} is tied to a parameter of another module, which merging would change "
                    "too; untie them, or save the adapters alone."
                )
    for module in adapters.values():
        module.merge_adapter()
