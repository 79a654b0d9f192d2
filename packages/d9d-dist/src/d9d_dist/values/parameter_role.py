"""Roles of parameters, which decide weight decay and the choice of an optimizer.

The number of dims does not determine the role: the biases of stacked experts have two dims, as do depthwise filters.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from d9d_dist.values._model_tensors import canonical_name

ParameterRole: TypeAlias = Literal["matrix", "filter", "vector"]
"""Role of a parameter.

matrix: A matrix or a stack of matrices, including embeddings. filter: The filters of a convolution, or a parameter that
broadcasts. vector: Norm weights, biases, scalars, stacks of these, and other parameters without weight decay.
"""

_NORM = re.compile(r"(Layer|RMS|Batch|Group|Instance)_?Norm|Norm(\dd|Gated)?$")


@runtime_checkable
class DeclaresParameterRoles(Protocol):
    """Module that declares the roles of its own parameters, by name."""

    parameter_roles: Mapping[str, ParameterRole]


@runtime_checkable
class _DeclaresNoDecay(Protocol):
    """Module that names parameters without weight decay, as timm's models do."""

    def no_weight_decay(self) -> Collection[str]: ...


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of each parameter of a model, by its canonical name.

    Decided by the first of these that applies: the declaration of the module (`DeclaresParameterRoles`); the method
    `no_weight_decay` of a module above it; the attribute `_no_weight_decay` of the parameter; a norm module; a name
    with "bias"; fewer than two dims; a module for convolutions. Other parameters are matrices, except those of three
    or more dims that broadcast over the first dim or the last ones, such as [1, tokens, features], outside of torch's
    own layers.
    """
    plain: set[str] = set()
    roles: dict[str, ParameterRole] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _DeclaresNoDecay):
            plain |= {canonical_name(f"{prefix}.{name}".lstrip(".")) for name in module.no_weight_decay()}
        for name, parameter in module.named_parameters(recurse=False):
            full_name = canonical_name(f"{prefix}.{name}".lstrip("."))
            roles[full_name] = _role(module, name, parameter, is_plain=full_name in plain)
    return roles


def _role(module: nn.Module, name: str, parameter: Tensor, *, is_plain: bool) -> ParameterRole:
    if isinstance(module, DeclaresParameterRoles) and name in module.parameter_roles:
        return module.parameter_roles[name]
    flagged: Any = parameter  # the attribute of Mamba's parameters
    is_norm = _NORM.search(type(module).__name__) is not None
    if is_plain or getattr(flagged, "_no_weight_decay", False) or is_norm or "bias" in name.split("_"):
        return "vector"
    if parameter.ndim < 2:
        return "vector"
    if isinstance(module, _ConvNd):
        return "filter"
    broadcasts = parameter.ndim > 2 and 1 in (parameter.shape[0], *parameter.shape[-2:])
    return "filter" if broadcasts and not type(module).__module__.startswith("torch.nn") else "matrix"
