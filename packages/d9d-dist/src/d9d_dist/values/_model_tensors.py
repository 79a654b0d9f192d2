"""Iteration over the parameters and buffers of a model, and in-place replacement that keeps weight tying."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from d9d_dist.shards import from_local, local_tensor

# Names that the wrappers of activation checkpointing and torch.compile insert.
_WRAPPER_NAMES = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)\.")


def canonical_name(name: str) -> str:
    """Return a parameter's name without the names of wrapper modules (activation checkpointing, `torch.compile`)."""
    return _WRAPPER_NAMES.sub("", name)


class Slot(NamedTuple):
    """Module attribute that holds a parameter or buffer."""

    module: nn.Module
    name: str

    def get(self) -> torch.Tensor | None:
        """Return the tensor; `None` if the attribute is None or missing."""
        held = (self.module._parameters, self.module._buffers)  # of TorchScript, they have no `get`
        return next((each[self.name] for each in held if self.name in each), None)

    def put(self, tensor: torch.Tensor) -> None:
        """Replace the tensor, without the checks of `Module.__setattr__`."""
        holder = self.module._parameters if self.name in self.module._parameters else self.module._buffers
        holder[self.name] = tensor  # ty: ignore[invalid-assignment]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter, then every buffer, with its name. Tied tensors are yielded once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def replace_tensors(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer in place. Tied tensors stay tied; parameters keep their Python attributes."""
    shared = _shared_slots(model)
    attributes = {name: vars(parameter) for name, parameter in model.named_parameters() if vars(parameter)}
    with torch.no_grad():
        model._apply(make)
    for name, found in attributes.items():
        vars(model.get_parameter(name)).update(found)
    for first, other in shared:
        setattr(other.module, other.name, getattr(first.module, first.name))


def empty_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor on a device with the same placements, like `Module.to_empty`."""
    return from_local(torch.empty_like(local_tensor(tensor), device=device), tensor)


def _shared_slots(model: nn.Module) -> list[tuple[Slot, Slot]]:
    """Return pairs of slots with the same tensor; `_apply` would give each slot a tensor of its own."""
    first: dict[int, Slot] = {}
    pairs: list[tuple[Slot, Slot]] = []
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            slot = Slot(module, name)
            if first.setdefault(id(tensor), slot) is not slot:
                pairs.append((first[id(tensor)], slot))
    return pairs
