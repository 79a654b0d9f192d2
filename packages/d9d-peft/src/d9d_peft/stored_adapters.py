"""Tensors of a model that adapter files hold, with their names in the base checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from torch import Tensor, nn

from d9d_dist import DistributedContext, UserError, agree, canonical_name, gather_json
from d9d_dist.errors import shorten
from d9d_peft._checkpoint_names import JointParameter, checkpoint_name, group_names
from d9d_peft.adapter import DEFAULT_ADAPTER, adapted_layers, adapter_parameters, all_adapters
from d9d_peft.all_linear import weight_of
from d9d_peft.dora import DoraAdapter
from d9d_peft.lora import LoraAdapter
from d9d_peft.peft_config import owners
from d9d_peft.peft_layout import PREFIX, StoredLayer
from d9d_peft.stored_parameter import StoredParameter, nested
from d9d_state import StateMapper
from d9d_state.module_tensors import aliases

_WEIGHT = ".weight"


@final
@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """Tensors of this rank's part of a model that adapter files hold.

    Attributes:
        layers: Layers with adapters.
        parameters: Parameters [experts, out, in] of the base checkpoint with adapters.
        modules: Tensors of modules that are fully fine-tuned, by module name, then by name in the file.
    """

    layers: tuple[StoredLayer, ...] = ()
    parameters: tuple[StoredParameter, ...] = ()
    modules: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of the adapters: "LoRA", "DoRA"."""
        kinds = {DoraAdapter: "DoRA", LoraAdapter: "LoRA"}
        of_layers = {kinds[type(layer.adapter)] for layer in self.layers}
        return frozenset(of_layers | ({"LoRA"} if self.parameters else set()))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors in the files that `save_adapters` writes, by name."""
        shapes = {key: tuple(tensor.shape) for tensors in self.modules.values() for key, tensor in tensors.items()}
        for stored in (*self.layers, *self.parameters):
            shapes.update(stored.shapes())
        return shapes


@final
class StoredNames(NamedTuple):
    """Names of the tensors and layers in adapter files, which ranks can gather without the tensors themselves.

    Attributes:
        tensors: Names of the tensors in the files.
        layers: Names in the base checkpoint of the layers with adapters.
        parameters: Names in the base checkpoint of the parameters [experts, out, in] with adapters.
        trained: Names in the base checkpoint of the tensors of fully fine-tuned modules.
    """

    tensors: frozenset[str]
    layers: frozenset[str]
    parameters: frozenset[str]
    trained: frozenset[str]


def gather_names(stored: StoredAdapters, ctx: DistributedContext | None) -> StoredNames:
    """Return the names of all ranks. Collective; without a context the names of this process only."""
    own = (
        stored.shapes(),
        [name for layer in stored.layers for name in layer.names],
        [parameter.name for parameter in stored.parameters],
        [key.removeprefix(PREFIX) for tensors in stored.modules.values() for key in tensors],
    )
    gathered = gather_json([sorted(names) for names in own], alone=ctx is None)
    return StoredNames(*(frozenset[str]().union(*names) for names in zip(*gathered, strict=True)))


def base_names(model: nn.Module, base_mapper: StateMapper | None) -> list[str]:
    """Return the tensor names of the base checkpoint; without a mapper only those of this rank."""
    if base_mapper is not None:
        return list(base_mapper.inputs)
    names = (canonical_name(name) for name in model.state_dict())
    children = {child for child, _ in all_adapters(model)}
    return [name for name in names if children.isdisjoint(name.split("."))]


def agreed_adapters(
    model: nn.Module, base_mapper: StateMapper | None, ctx: DistributedContext | None, adapter: str
) -> tuple[StoredAdapters, bool]:
    """Collect this rank's tensors to save, with adapters of this name; also return True if the adapters are DoRA.

    Collective over the job.
    Raises `UserError` on all ranks if the `peft` format cannot represent a trained tensor, or the model has no adapters
    or both LoRA and DoRA.
    """
    stored, problem = StoredAdapters(), None
    try:
        stored = stored_adapters(model, base_mapper, adapter)
    except UserError as error:
        problem = error
    agree(problem, alone=ctx is None)
    kinds = frozenset[str]().union(*gather_json(sorted(stored.kinds), alone=ctx is None))
    if not kinds:
        named = "" if adapter == DEFAULT_ADAPTER else f" named {adapter!r}"
        raise UserError(f"got a model without adapters{named}; expected a model after inject() with LoRA or DoRA.")
    if len(kinds) > 1:
        raise UserError(
            "got adapters of LoRA and of DoRA; expected one kind, because a peft file has a single kind. Save the "
            "merged model instead."
        )
    return stored, kinds == {"DoRA"}


def stored_tensor_names(
    model: nn.Module, base_mapper: StateMapper | None = None, *, adapter: str = DEFAULT_ADAPTER
) -> list[str]:
    """Return the names of the tensors that `save_adapters` would write for a whole model, on any device.

    Arguments and errors are those of `save_adapters`, so a job can check before its start that its adapters fit a file.
    """
    return sorted(stored_adapters(model, base_mapper, adapter).shapes())


def stored_adapters(model: nn.Module, base_mapper: StateMapper | None, adapter: str) -> StoredAdapters:
    """Collect this rank's tensors to save in the adapter files.

    Raises `UserError` if the `peft` format cannot represent a trained tensor.
    """
    layers = adapted_layers(model, adapter)
    supported = {
        name: (layer, found) for name, (layer, found) in layers.items() if isinstance(found, LoraAdapter | DoraAdapter)
    }
    if len(supported) < len(layers):
        others = [f"{name} ({type(found).__name__})" for name, (_, found) in layers.items() if name not in supported]
        raise UserError(
            f"got the adapters {shorten(others)}; expected adapters of LoRA or DoRA, because peft files have "
            "no others. Save the merged model instead."
        )
    _refuse_second_names(model, {name: layer for name, (layer, _) in layers.items()})
    tensors = {canonical_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    first = aliases(tensors)
    modules = _tuned_modules(tensors, first, base_mapper, owned=adapter_parameters(model))
    return StoredAdapters(*_stored_layers(supported, first, base_mapper), modules)


def _stored_layers(
    layers: Mapping[str, tuple[nn.Module, LoraAdapter | DoraAdapter]],
    first: Mapping[str, str],
    base_mapper: StateMapper | None,
) -> tuple[tuple[StoredLayer, ...], tuple[StoredParameter, ...]]:
    """Divide the layers into those stored one by one and those stored in a parameter [experts, out, in]."""
    weights = {f"{name}{_WEIGHT}".lstrip("."): adapted for name, adapted in layers.items()}
    shapes = {name: weight_of(layer).shape for name, (layer, _) in weights.items()}
    grouped = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    stored: list[StoredLayer] = []
    joint: dict[str, tuple[LoraAdapter, ...]] = {}
    for name, (layer, found) in weights.items():
        if name in grouped:
            names = group_names(name, grouped, base_mapper)
        else:
            names = (checkpoint_name(name, base_mapper, first=first.get(name)),)
        if isinstance(names, JointParameter):
            parts = [weights[weight][1] for weight in names.weights]
            joint[names.name] = tuple(part for part in parts if isinstance(part, LoraAdapter))
            if len(joint[names.name]) < len(parts):
                raise UserError(
                    f"{names.name} holds all experts of {shorten(list(names.weights))}, with DoRA; expected LoRA, "
                    "because peft files have no DoRA for such parameters. Save the merged model instead."
                )
            continue
        invalid = [each for each in names if not each.endswith(_WEIGHT)]
        if invalid:
            raise UserError(
                f"{name} is {invalid[0]} in the base checkpoint; expected a name that ends in {_WEIGHT!r}. Pass the "
                "base_mapper that loads the base checkpoint."
            )
        stored.append(StoredLayer(tuple(each.removesuffix(_WEIGHT) for each in names), layer, found))
    order = list(joint if base_mapper is None else base_mapper.restrict(inputs=joint).inputs)
    return tuple(stored), nested({name: joint[name] for name in order if name in joint})


def _tuned_modules(
    tensors: Mapping[str, Tensor], first: Mapping[str, str], base_mapper: StateMapper | None, *, owned: Collection[int]
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of modules that own a fully fine-tuned parameter, by owner and name in the file.

    All tensors inside of such a module are included, as in peft's `modules_to_save`. A tied parameter is in several
    modules: peft unties it, so each of these modules is stored. Raises `UserError` if there are adapters inside, too.
    """
    trained = [name for name, tensor in tensors.items() if tensor.requires_grad and id(tensor) not in owned]
    tuned = {name.rpartition(".")[0]: name for name in trained}
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        outer = next((each for each in (*owners(name), "") if each in tuned), None)
        if outer is None:
            continue
        if id(tensor) in owned:
            raise UserError(
                f"{tuned[outer]} is trained in full, and {name} is an adapter inside the same module; expected no "
                "adapter there, because peft files hold such a module whole. Leave one of them out."
            )
        stored = checkpoint_name(name, base_mapper, first=first[name])
        modules.setdefault(stored.rpartition(".")[0], {})[f"{PREFIX}{stored}"] = tensor
    return modules


def _refuse_second_names(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise `UserError` if a layer with an adapter is registered under two names: peft adapts only the first."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(canonical_name(name))
    shared = [" and ".join(found) for layer in layers.values() if len(found := names[id(layer)]) > 1]
    if shared:
        raise UserError(
            f"got adapters of layers with several names: {shorten(shared)}; expected one name for each layer, because "
            "peft adapts a layer under its first name only. Save the merged model instead."
        )
