"""Models are built on `meta`, parallelised, and only then filled, so that no rank ever holds more than its own part.

Initial values are a function of (seed, parameter name, global index). A rank computes the values of its own shard and
no others, and a job starts from the same model whatever its layout.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d9d_dist._counter_random import normal_at, uniform_at
from d9d_dist.errors import UserError
from d9d_dist.seeds import stream_key

_CHUNK_ELEMENTS = 1 << 20
# Names that wrappers put between a model's own names: activation checkpointing and torch.compile.
_WRAPPER_NAMES = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)\.")


@runtime_checkable
class ModuleLateInit(Protocol):
    """A module that can fill the parameters and buffers it owns itself; its children fill theirs.

    `torch.nn.Linear`, `torch.nn.Embedding` and most other layers of torch are of this kind.
    """

    def reset_parameters(self) -> None:
        """Set every parameter and buffer in place, through `torch.nn.init` or in-place tensor methods."""
        ...


def canonical_name(name: str) -> str:
    """A parameter's name in the user's model, without what wrapper modules add to it."""
    return _WRAPPER_NAMES.sub("", name)


def materialize(model: nn.Module, *, device: torch.device, seed: int) -> None:
    """Give a model built on `meta` its storage and its initial values, in place.

    Every submodule that has `reset_parameters` is asked to fill itself, children before parents. Random numbers drawn
    into a parameter by `normal_` or `uniform_`, and so by `torch.nn.init`, are a function of (seed, parameter name,
    global index): equal in every layout, and computed without building the full tensor of a sharded parameter. Other
    random functions work on plain tensors only. Parameters that share one tensor still share it afterwards. No
    collectives.

    Args:
        model: A model on `meta`, parallelised or not.
        device: Where its parameters and buffers go.
        seed: Seed of the initial values.

    Raises:
        ValueError: If a parameter or buffer was not set by any `reset_parameters`; all of them are listed.
        UserError: If another random function than those two is used with a DTensor, or a parameter's size does not fit
            its mesh: ranks of two axes that split one dim hold other parts than its placements say.
    """
    shared = _shared_tensors(model)
    with torch.no_grad():
        model._apply(partial(_empty_on, device))
    for (first, first_name), (other, other_name) in shared:
        setattr(other, other_name, getattr(first, first_name))
    versions = {name: (tensor, _version(tensor)) for name, tensor in _named_tensors(model)}
    names = {id(tensor): canonical_name(name) for name, tensor in _named_tensors(model)}
    accelerators = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(accelerators, device_type=device.type), torch.no_grad():
        for module_name, module in reversed(list(model.named_modules())):
            if isinstance(module, ModuleLateInit):
                scope = canonical_name(f"{module_name}.")
                torch.manual_seed(stream_key(seed, scope))
                with _RandomByIndex(seed, scope, names):
                    module.reset_parameters()
    unset = [
        canonical_name(name)
        for name, tensor in _named_tensors(model)
        if tensor is versions[name][0] and _version(tensor) == versions[name][1] and tensor.numel()
    ]
    if unset:
        raise ValueError(
            f"not set by any reset_parameters: {', '.join(unset)}. Give the module that owns each of them a method "
            "reset_parameters(self) that fills it in place (through torch.nn.init, not through .data)."
        )


class _RandomByIndex(TorchDispatchMode):
    """Replaces random in-place fills by numbers that depend on names and global indices only."""

    def __init__(self, seed: int, scope: str, names: dict[int, str]) -> None:
        super().__init__()
        self._seed, self._scope, self._names = seed, scope, names
        self._draws: dict[str, int] = {}
        self._last_draw = scope

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.normal_.default:
            mean, std = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
            return self._fill(args[0], normal_at, scale=std, shift=mean)
        if func is torch.ops.aten.uniform_.default:
            low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
            return self._fill(args[0], uniform_at, scale=high - low, shift=low)
        if func is torch.ops.aten.any.default and isinstance(args[0], DTensor):
            # trunc_normal_ draws again until no element is out of bounds. Elements do not depend on each other, so each
            # rank does so for its own part, without collectives.
            return func(args[0].to_local())
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse_distributed(func, [*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _fill(
        self, tensor: torch.Tensor, draw: Callable[[torch.Tensor, int], torch.Tensor], *, scale: float, shift: float
    ) -> torch.Tensor:
        key = self._next_key(tensor)
        for block, index in _blocks(tensor, self._name(tensor)):
            block.copy_(draw(index, key).mul_(scale).add_(shift))
        return tensor

    def _next_key(self, tensor: torch.Tensor) -> int:
        """A new stream for each draw into a tensor.

        Tensors that are no parameters count from the last draw into a parameter on: how often trunc_normal_ draws again
        for one parameter differs between ranks, and must not change what the next one gets.
        """
        name = self._names.get(id(tensor), f"{self._last_draw}<temporary>")
        draw = self._draws[name] = self._draws.get(name, 0) + 1
        if id(tensor) in self._names:
            self._last_draw = f"{name}#{draw}"
        return stream_key(self._seed, name, draw)

    def _name(self, tensor: torch.Tensor) -> str:
        return self._names.get(id(tensor), f"{self._scope}<temporary>")

    def _refuse_distributed(self, func: Any, arguments: list[Any]) -> None:
        """What a generator hands out for a shard depends on the layout; nobody would see it."""
        for argument in tree_leaves(arguments):
            if isinstance(argument, DTensor):
                raise UserError(
                    f"{self._scope}reset_parameters draws random numbers with {func.name()} for the distributed tensor "
                    f"{self._name(argument)}; expected normal_ or uniform_ (which torch.nn.init uses), whose numbers "
                    "do not depend on the layout. Draw with one of these and compute what you need from it."
                )


def _blocks(tensor: torch.Tensor, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split this rank's part of a tensor along dim 0; give each block with the global flat index of its elements."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    places = [place.to(local.device) for place in _global_places(tensor)]
    if local.shape != torch.Size(map(len, places)):
        raise UserError(
            f"{name} has the shape {tuple(tensor.shape)}, of which this rank holds {tuple(local.shape)}, but its "
            f"placements say {tuple(map(len, places))}: the size does not divide by the axes that split one dim, each "
            "rounding up by itself. torch cannot put such a parameter together again. Choose a size that is a multiple "
            "of their product, or lower a degree."
        )
    if not local.numel():
        return
    if not local.ndim:
        yield local, torch.zeros((), dtype=torch.int64, device=local.device)
        return
    row = torch.zeros((), dtype=torch.int64, device=local.device)
    stride = 1
    for size, place in zip(tensor.shape[:0:-1], places[:0:-1], strict=True):
        # Built from the last dim backwards: each dim is put in front of those that vary faster.
        row = place.mul(stride).view(-1, *(1,) * row.ndim) + row
        stride *= size
    rows = max(_CHUNK_ELEMENTS // max(row.numel(), 1), 1)
    for begin in range(0, local.shape[0], rows):
        block = local[begin : begin + rows]
        yield block, places[0][begin : begin + rows].mul(stride).view(-1, *(1,) * row.ndim) + row


def _global_places(tensor: torch.Tensor) -> list[torch.Tensor]:
    """For each dim, the positions in the full tensor of what this rank holds; not contiguous where a split is strided.

    They are found by splitting all positions as torch splits the values, so that no rule of it is repeated here.
    """
    places = [torch.arange(size, device="cpu") for size in tensor.shape]
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard | _StridedShard):
                dim = placement.dim
                parts, _ = placement._split_tensor(
                    places[dim].view(*(1,) * dim, -1), tensor.device_mesh.size(axis), with_padding=False
                )
                places[dim] = parts[tensor.device_mesh.get_local_rank(axis)].flatten()
    return places


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Counters that every in-place write raises; a DTensor's local part has one of its own."""
    return tensor._version, tensor._local_tensor._version if isinstance(tensor, DTensor) else 0


def _empty_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """What `Module.to_empty` makes, without asking DTensor how placements propagate: seconds on a mesh of many axes."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    local = torch.empty_like(tensor.to_local(), device=device)
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


_Slot = tuple[nn.Module, str]


def _shared_tensors(model: nn.Module) -> list[tuple[_Slot, _Slot]]:
    """Pairs of places in a model that hold the same tensor; `_apply` would give each its own."""
    first: dict[int, _Slot] = {}
    pairs: list[tuple[_Slot, _Slot]] = []
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            slot = (module, name)
            if first.setdefault(id(tensor), slot) is not slot:
                pairs.append((first[id(tensor)], slot))
    return pairs
