"""Late initialization: models are built on `meta`, parallelized and then filled, so ranks hold only their own shards.

Initial values are a function of (seed, parameter name, global index), so they do not depend on the layout. Where
possible a rank computes only the values of its own shards.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, final, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist.errors import UserError
from d9d_dist.shards import copy_from_full_
from d9d_dist.values._fill_by_index import FillByIndex, Named, NeedsFullTensor, storage_key
from d9d_dist.values._model_tensors import Slot, canonical_name, empty_on, named_tensors, replace_tensors
from d9d_dist.values.seeds import HostRandom, seed_generators, stream_key


@runtime_checkable
class ModuleLateInit(Protocol):
    """Module that can initialize its own parameters and buffers, but not those of its children.

    Examples are `torch.nn.Linear` and `torch.nn.Embedding`.
    """

    def reset_parameters(self) -> None:
        """Set every own parameter and buffer. Any code that works on a single process is supported."""
        ...


def allocate(model: nn.Module, *, device: torch.device) -> None:
    """Replace every parameter and buffer by an uninitialized one on a device, in place. Tied parameters stay tied."""
    replace_tensors(model, partial(empty_on, device))


def materialize(model: nn.Module, *, device: torch.device, seed: int) -> None:
    """Allocate a model that was built on `meta`, parallelized or not, and initialize its values from a seed, in place.

    Calls `reset_parameters` of every submodule that has it, children before parents. The values are bitwise equal to
    those of a single process, for every layout and whichever operations `reset_parameters` uses. Random numbers that
    `normal_` or `uniform_` draw into a parameter, as `torch.nn.init` does, are a function of (seed, parameter name,
    global index). Other random functions use the generators of torch, Python and NumPy, which are seeded for each
    module.

    If `reset_parameters` only fills and scales whole parameters, each rank computes only its own shards. Otherwise
    (slices, views, indices, `copy_`, `orthogonal_`) `reset_parameters` runs again on full tensors, and each rank keeps
    its shards. The affected parameters are full on each rank until the module's `reset_parameters` returns.

    Tied parameters stay tied. No collectives, with one exception: if a module needs the full tensor of a parameter that
    another module has filled, the parameter is all-gathered over its mesh.

    Raises:
        ValueError: If no `reset_parameters` sets a parameter or buffer; lists all unset ones.
        UserError: If a parameter's local shape disagrees with its placements, because two axes split one dim unevenly.
            Also if a sharded parameter is replaced by a tensor of another shape, or written through a reference that is
            not a module attribute.
    """
    allocate(model, device=device)
    initializer = _Initializer(model, seed)
    accelerators = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(accelerators, device_type=device.type), ExitStack() as stack, torch.no_grad():
        stack.callback(HostRandom.now().restore)
        for module_name, module in reversed(list(model.named_modules())):
            if isinstance(module, ModuleLateInit):
                initializer.fill(module, canonical_name(f"{module_name}."))
    if unset := initializer.unset():
        raise ValueError(
            f"not set by any reset_parameters: {', '.join(unset)}. In each module that owns one of them, define "
            "reset_parameters(self) that initializes it in place, for example with torch.nn.init."
        )


@final
class _Initializer:
    """Runner of `reset_parameters`: on shards if that gives the values of a single process, else on full tensors."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._known = {
            storage_key(tensor): Named(canonical_name(name), tensor) for name, tensor in named_tensors(model)
        }
        self._slots: dict[Named, list[Slot]] = {}
        for module in model.modules():
            for slot, named in self._owned(module):
                self._slots.setdefault(named, []).append(slot)
        self._is_distributed = any(named.is_distributed for named in self._slots)
        self._set: set[Named] = set()

    def fill(self, module: nn.Module, scope: str) -> None:
        """Run one module's `reset_parameters`; repeat it with more full tensors until the result is layout-independent.

        Raises `UserError` as `materialize` does.
        """
        whole: list[Named] = []
        while True:
            try:
                self._attempt(module, scope, whole)
            except NeedsFullTensor as error:
                missing = error.tensors
            except UserError:
                raise
            except Exception:
                # Some code works only on plain tensors, such as `.data = x`. An error on full tensors is re-raised.
                missing = [named for _, named in self._owned(module) if named.is_distributed and named not in whole]
                if not missing:
                    raise
            else:
                return
            if unreachable := [named.name for named in missing if named in whole]:
                raise UserError(
                    f"{scope}reset_parameters accesses the sharded {unreachable[0]} through a reference that is not an "
                    "attribute of a module; expected self.<name>, so that a full tensor can replace it."
                )
            whole += missing

    def unset(self) -> list[str]:
        """Return the names of the tensors that no `reset_parameters` has set."""
        held = [(self._known.get(storage_key(tensor)), tensor) for _, tensor in named_tensors(self._model)]
        return [named.name for named, tensor in held if named and named not in self._set and tensor.numel()]

    def _attempt(self, module: nn.Module, scope: str, whole: Sequence[Named]) -> None:
        """Run `reset_parameters` with some tensors replaced by full ones. If it raises, restore all values.

        Raises `NeedsFullTensor` if more tensors have to be full.
        """
        assert isinstance(module, ModuleLateInit)
        placed = {named: self._full(named) for named in whole}
        own = [(slot, named) for slot, named in self._owned(module) if named.is_distributed and named not in placed]
        saved: dict[Named, torch.Tensor] = {}

        def save(named: Named) -> None:
            if self._is_distributed and named in self._set and named not in placed:
                saved[named] = named.local.clone()

        known = ChainMap({storage_key(full): named for named, full in placed.items()}, self._known)
        mode = FillByIndex(self._seed, scope, known, save)
        seed_generators(stream_key(self._seed, scope))
        try:
            self._register(placed)
            with mode:
                module.reset_parameters()
            if replaced := [named for slot, named in own if slot.get() is not named.tensor]:
                raise NeedsFullTensor(replaced)
            values = {named: self._value(named, full) for named, full in placed.items()}
        except BaseException:
            for named, before in saved.items():
                named.local.copy_(before)
            raise
        finally:
            self._register({named: named.tensor for named in [*placed, *(named for _, named in own)]})
        self._set |= mode.written
        for named, value in values.items():
            copy_from_full_(named.tensor, value, named.name)
            if storage_key(value) not in known:
                self._set.add(named)

    def _owned(self, module: nn.Module) -> Iterator[tuple[Slot, Named]]:
        for name in [*module._parameters, *module._buffers]:
            slot = Slot(module, name)
            tensor = slot.get()
            if tensor is not None and (named := self._known.get(storage_key(tensor))):
                yield slot, named

    def _register(self, tensors: Mapping[Named, torch.Tensor]) -> None:
        for named, tensor in tensors.items():
            for slot in self._slots[named]:
                slot.put(tensor)

    def _full(self, named: Named) -> torch.Tensor:
        """Return a full tensor that replaces a DTensor, with values if an earlier `reset_parameters` has set them."""
        tensor = named.tensor
        assert isinstance(tensor, DTensor)
        if named in self._set:
            full = tensor.full_tensor().clone()  # full_tensor() of a replicated DTensor shares its memory
        else:
            full = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full

    def _value(self, named: Named, placed: torch.Tensor) -> torch.Tensor:
        """Return the full tensor after `reset_parameters`, which may have replaced it."""
        held = [slot.get() for slot in self._slots[named]]
        value = next((tensor for tensor in held if tensor is not placed), placed)
        if value is None or value.shape != named.tensor.shape:
            raise UserError(
                f"reset_parameters replaced the sharded {named.name} of shape {tuple(named.tensor.shape)} by "
                f"{'None' if value is None else f'a tensor of shape {tuple(value.shape)}'}; expected the same shape. "
                "Build the parameter with its final shape in __init__."
            )
        return value
