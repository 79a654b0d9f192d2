"""Merge adapters into the weights of their layers, to export and serve a model without adapters."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import DistributedContext, UserError, agree, gather_json
from d9d_peft.adapter import DEFAULT_ADAPTER, Adapter, adapted_layers
from d9d_peft.quantized_base import is_quantized

_logger = logging.getLogger(__name__)


def merge_(model: nn.Module, ctx: DistributedContext | None = None, *, adapter: str = DEFAULT_ADAPTER) -> None:
    """Merge each adapter of a model into its layer's weight, in place, one layer at a time.

    The output is unchanged except for rounding, and training can continue: adapters stay and are reset to have no
    effect. A tied weight is untied first, as in peft: the layer gets a weight of its own, which an existing optimizer
    does not update. Extra memory: this rank's part of one weight, in at least float32, and the full A and B. To
    export the model, use `mapper.inverse()` of the mapper that `inject` returned. Collective if parameters are sharded
    or `ctx` is given.

    Args:
        model: The model, or this rank's pipeline stages of it, after `inject`.
        ctx: Distributed context; all ranks then raise together. `None` for a single process.
        adapter: Name of the adapters to merge, as passed to `inject`. Adapters of other names then act on the merged
            weights.

    Raises:
        UserError: If no rank has adapters of this name, or an adapted layer has a quantized weight, or one that is tied
            and sharded. The model is then unchanged.
    """
    layers = adapted_layers(model, adapter)
    agree(_problem(model, layers), alone=ctx is None)
    if not any(gather_json(bool(layers), alone=ctx is None)):
        named = "" if adapter == DEFAULT_ADAPTER else f" named {adapter!r}"
        raise UserError(f"merge_ got a model without adapters{named}; expected a model after inject().")
    for name, (layer, found) in layers.items():
        if _is_tied(model, layer):
            weight = layer._parameters["weight"]
            assert weight is not None
            layer._parameters["weight"] = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
            _untie_config(model, name)
        found.merge_(layer)


def _problem(model: nn.Module, layers: Mapping[str, tuple[nn.Module, Adapter]]) -> str | None:
    """Return an error message if a layer with an adapter is quantized, or sharded and tied."""
    for name, (layer, _) in layers.items():
        if is_quantized(layer):
            return (
                f"{name}.weight is quantized, and merging would round the update; expected dense weights. Save the "
                "adapters with save_adapters, load them into a model with dense weights, and merge there."
            )
        if _is_tied(model, layer) and isinstance(layer._parameters["weight"], DTensor):
            return (
                f"{name}.weight is tied to a parameter of another module and sharded; expected a model that is not "
                "parallelized, because merging unties it. Save the adapters with save_adapters, load them into such a "
                "model with load_adapters, and merge there."
            )
    return None


def _is_tied(model: nn.Module, layer: nn.Module) -> bool:
    weight = layer._parameters["weight"]
    return sum(each is weight for module in model.modules() for each in module._parameters.values()) > 1


def _untie_config(model: nn.Module, name: str) -> None:
    """Write to the configuration of a `transformers` model that its embeddings are not tied, as peft does."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
        _logger.warning("%s has a weight of its own after the merge; tie_word_embeddings is False from now on.", name)
