"""What of a model belongs into the files of its adapters, under the names of the base checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from d9d_dist import DistributedContext, UserError, canonical_name
from d9d_peft._checkpoint_names import checkpoint_name, group_names
from d9d_peft._consensus import agree, exchange
from d9d_peft._targets import shorten
from d9d_peft.adapter import AdaptedLayer, adapted_layers
from d9d_peft.peft_layout import StoredLayer, kind, module_key
from d9d_state import StateMapper

_WEIGHT = ".weight"


@final
@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """The part of a model that its adapters' files hold, on this rank.

    Attributes:
        layers: The layers with adapters.
        modules: What else is trained, by the names of modules and then of their tensors in the files.
    """

    layers: tuple[StoredLayer, ...]
    modules: Mapping[str, Mapping[str, Tensor]]

    @property
    def kinds(self) -> frozenset[str]:
        """What the layout calls the adapters."""
        return frozenset(filter(None, (kind(layer.adapted.adapter) for layer in self.layers)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors in the files."""
        shapes = {key: tuple(tensor.shape) for tensors in self.modules.values() for key, tensor in tensors.items()}
        for layer in self.layers:
            shapes.update(layer.shapes())
        return shapes


def agreed_adapters(
    model: nn.Module, base_mapper: StateMapper | None, ctx: DistributedContext | None
) -> tuple[StoredAdapters, bool]:
    """What belongs into the files, and whether adapters are those of DoRA; the same on every rank. Collective.

    Args:
        model: The model, or this rank's pipeline stages of it.
        base_mapper: From the names of the base checkpoint to those of the model before `inject`.
        ctx: The ranks; `None` for this process alone.

    Raises:
        UserError: On every rank, if something that is trained has no place in the files, or there are no adapters, or
            of both kinds.
    """
    stored, problem = StoredAdapters((), {}), None
    try:
        stored = stored_adapters(model, base_mapper)
    except UserError as error:
        problem = str(error)
    agree(problem, ctx)
    kinds = frozenset[str]().union(*exchange(stored.kinds, ctx))
    if not kinds:
        raise UserError("got a model without adapters; expected one that inject() was called on with LoRA or DoRA.")
    if len(kinds) > 1:
        raise UserError("got adapters of LoRA and of DoRA; expected one kind, since the files of peft have no other.")
    return stored, kinds == {"DoRA"}


def stored_adapters(model: nn.Module, base_mapper: StateMapper | None) -> StoredAdapters:
    """Find what belongs into the files, and how it is called there.

    Args:
        model: The model, or this rank's pipeline stages of it.
        base_mapper: From the names of the base checkpoint to those of the model before `inject`.

    Raises:
        UserError: If something that is trained has no place in the files.
    """
    layers = adapted_layers(model)
    nameless = [f"{name} ({type(it.adapter).__name__})" for name, it in layers.items() if kind(it.adapter) is None]
    if nameless:
        raise UserError(f"{shorten(nameless)}: expected adapters of LoRA or DoRA; the files of peft have no others.")
    stored = tuple(StoredLayer(_layer_names(name, adapted, base_mapper), adapted) for name, adapted in layers.items())
    adapter_parameters = {id(parameter) for it in layers.values() for parameter in it.adapter.parameters()}
    return StoredAdapters(stored, _tuned_modules(model, adapter_parameters, base_mapper))


def _layer_names(name: str, adapted: AdaptedLayer, base_mapper: StateMapper | None) -> tuple[str, ...]:
    weight = adapted.layer._parameters["weight"]
    assert weight is not None
    weight_name = f"{name}{_WEIGHT}".lstrip(".")
    if weight.ndim == 2:
        names = (checkpoint_name(weight_name, base_mapper),)
    else:
        names = group_names(weight_name, weight.shape[0], base_mapper)
    odd = [each for each in names if not each.endswith(_WEIGHT)]
    if odd:
        raise UserError(f"{weight_name} is {odd[0]} in the base checkpoint; expected a name that ends in {_WEIGHT!r}.")
    return tuple(each.removesuffix(_WEIGHT) for each in names)


def _tuned_modules(
    model: nn.Module, adapter_parameters: set[int], base_mapper: StateMapper | None
) -> dict[str, dict[str, Tensor]]:
    """The tensors of modules of which parameters are trained as they are: all of each module, as `peft` keeps them."""
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), canonical_name(name))
    modules: dict[str, dict[str, Tensor]] = {}
    for module in model.modules():
        own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if id(tensor) in names]
        if not any(
            tensor.requires_grad and id(tensor) not in adapter_parameters for tensor in own if tensor is not None
        ):
            continue
        for tensor in own:
            assert tensor is not None
            name = checkpoint_name(names[id(tensor)], base_mapper)
            modules.setdefault(name.rpartition(".")[0], {})[module_key(name)] = tensor
    return modules
