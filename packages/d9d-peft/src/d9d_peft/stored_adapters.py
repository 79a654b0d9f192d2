"""What of a model belongs into the files of its adapters, under the names of the base checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor, nn

from d9d_dist import DistributedContext, UserError, canonical_name
from d9d_peft._checkpoint_names import JointParameter, checkpoint_name, group_names
from d9d_peft._consensus import agree, exchange
from d9d_peft._targets import shorten
from d9d_peft.adapter import ADAPTER, AdaptedLayer, adapted_layers
from d9d_peft.lora import LoraAdapter
from d9d_peft.peft_layout import StoredLayer, kind, module_key, module_name
from d9d_peft.stored_parameter import StoredParameter, nested
from d9d_state import StateMapper

_WEIGHT = ".weight"


@final
@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """The part of a model that its adapters' files hold, on this rank.

    Attributes:
        layers: The layers with adapters.
        parameters: The parameters [experts, out, in] of the checkpoint with adapters.
        modules: What else is trained, by the names of modules and then of their tensors in the files.
    """

    layers: tuple[StoredLayer, ...] = ()
    parameters: tuple[StoredParameter, ...] = ()
    modules: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def kinds(self) -> frozenset[str]:
        """What the layout calls the adapters."""
        of_layers = (kind(layer.adapted.adapter) for layer in self.layers)
        return frozenset(filter(None, (*of_layers, "LoRA" if self.parameters else None)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors in the files that `save_adapters` writes."""
        shapes = {key: tuple(tensor.shape) for tensors in self.modules.values() for key, tensor in tensors.items()}
        for stored in (*self.layers, *self.parameters):
            shapes.update(stored.shapes())
        return shapes


@final
@dataclass(frozen=True, slots=True)
class StoredNames:
    """Names of what the files hold, which ranks exchange.

    Attributes:
        tensors: The tensors in the files.
        layers: The layers with adapters, as the base checkpoint names them.
        parameters: The parameters [experts, out, in] with adapters, as the base checkpoint names them.
        trained: The tensors that are trained as they are, as the base checkpoint names them.
    """

    tensors: frozenset[str]
    layers: frozenset[str]
    parameters: frozenset[str]
    trained: frozenset[str]

    @staticmethod
    def union(names: Sequence["StoredNames"]) -> "StoredNames":
        """The names of all ranks."""
        return StoredNames(
            tensors=frozenset[str]().union(*(each.tensors for each in names)),
            layers=frozenset[str]().union(*(each.layers for each in names)),
            parameters=frozenset[str]().union(*(each.parameters for each in names)),
            trained=frozenset[str]().union(*(each.trained for each in names)),
        )


def stored_names(stored: StoredAdapters) -> StoredNames:
    """The names of this rank's adapters."""
    return StoredNames(
        tensors=frozenset(stored.shapes()),
        layers=frozenset(name for layer in stored.layers for name in layer.names),
        parameters=frozenset(parameter.name for parameter in stored.parameters),
        trained=frozenset(module_name(key) for tensors in stored.modules.values() for key in tensors),
    )


def base_names(model: nn.Module, base_mapper: StateMapper | None) -> list[str]:
    """The names of the tensors of the base checkpoint; without a mapper, of those that this rank has.

    Args:
        model: The model, or this rank's pipeline stages of it.
        base_mapper: From the names of the base checkpoint to those of the model before `inject`.
    """
    if base_mapper is not None:
        return list(base_mapper.inputs)
    names = (canonical_name(name) for name in model.state_dict())
    return [name for name in names if ADAPTER not in name.split(".")]


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
    stored, problem = StoredAdapters(), None
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
    adapter_parameters = {id(parameter) for it in layers.values() for parameter in it.adapter.parameters()}
    modules = _tuned_modules(model, adapter_parameters, base_mapper)
    return StoredAdapters(*_stored_layers(layers, base_mapper), modules)


def _stored_layers(
    layers: Mapping[str, AdaptedLayer], base_mapper: StateMapper | None
) -> tuple[tuple[StoredLayer, ...], tuple[StoredParameter, ...]]:
    """Share layers out to those that the checkpoint has as layers, and to parameters that hold several."""
    weights = {f"{name}{_WEIGHT}".lstrip("."): adapted for name, adapted in layers.items()}
    grouped = {name: _shape(adapted) for name, adapted in weights.items() if len(_shape(adapted)) == 3}
    stored: list[StoredLayer] = []
    joint: dict[str, tuple[LoraAdapter, ...]] = {}
    for name, adapted in weights.items():
        names = group_names(name, grouped, base_mapper) if name in grouped else (checkpoint_name(name, base_mapper),)
        if isinstance(names, JointParameter):
            parts = [weights[weight].adapter for weight in names.weights]
            joint[names.name] = tuple(part for part in parts if isinstance(part, LoraAdapter))
            continue
        odd = [each for each in names if not each.endswith(_WEIGHT)]
        if odd:
            raise UserError(f"{name} is {odd[0]} in the base checkpoint; expected a name that ends in {_WEIGHT!r}.")
        stored.append(StoredLayer(tuple(each.removesuffix(_WEIGHT) for each in names), adapted))
    order = list(joint if base_mapper is None else base_mapper.restrict(inputs=joint).inputs)
    return tuple(stored), nested({name: joint[name] for name in order if name in joint})


def _shape(adapted: AdaptedLayer) -> Sequence[int]:
    weight = adapted.layer._parameters["weight"]
    assert weight is not None
    return weight.shape


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
