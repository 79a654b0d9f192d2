"""Merge adapters into the weights of their layers, to export and serve a model without adapters."""

from collections import Counter
from collections.abc import Mapping

from torch import nn

from d9d_dist import DistributedContext, UserError, agree, gather_json
from d9d_peft.adapter import DEFAULT_ADAPTER, Adapter, adapted_layers
from d9d_peft.quantized_base import is_quantized


def merge_(model: nn.Module, ctx: DistributedContext | None = None, *, adapter: str = DEFAULT_ADAPTER) -> None:
    """Merge each adapter of a model into its layer's weight, in place, one layer at a time.

    The output is unchanged except for rounding, and training can continue: adapters stay and are reset to have no
    effect. Extra memory: this rank's part of one weight, in at least float32, and the full A and B. To export the
    model, use `mapper.inverse()` of the mapper that `inject` returned. Collective if parameters are sharded or `ctx` is
    given.

    Args:
        model: The model, or this rank's pipeline stages of it, after `inject`.
        ctx: Distributed context; all ranks then raise together. `None` for a single process.
        adapter: Name of the adapters to merge, as passed to `inject`. Adapters of other names then act on the merged
            weights.

    Raises:
        UserError: If no rank has adapters of this name, or an adapted layer has a tied or quantized weight. The
            model is then unchanged.
    """
    layers = adapted_layers(model, adapter)
    agree(_problem(model, layers), alone=ctx is None)
    if not any(gather_json(bool(layers), alone=ctx is None)):
        named = "" if adapter == DEFAULT_ADAPTER else f" named {adapter!r}"
        raise UserError(f"merge_ got a model without adapters{named}; expected a model after inject().")
    for layer, found in layers.values():
        found.merge_(layer)


def _problem(model: nn.Module, layers: Mapping[str, tuple[nn.Module, Adapter]]) -> str | None:
    """Return an error message if a layer with an adapter is quantized or shares a parameter with another module."""
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    own = {id(parameter) for parameter in model.parameters()}
    for name, (layer, _) in layers.items():
        if is_quantized(layer):
            return (
                f"{name}.weight is quantized, and merging would round the update; expected dense weights. Save the "
                "adapters with save_adapters, load them into a model with dense weights, and merge there."
            )
        for parameter_name, parameter in layer.named_parameters(recurse=False):
            if owners[id(parameter)] > 1 or id(parameter) not in own:
                return (
                    f"{name}.{parameter_name} is tied to a parameter of another module, which merging would change "
                    "too; expected untied parameters. Untie them, or save the adapters with save_adapters."
                )
    return None
