"""Takes tensors off the device and brings them back, without any object that refers to them noticing.

What is freed is the memory under a tensor's storage, not the tensor: parameters, views, optimizer keys, DTensors and
what FSDP keeps for itself stay the same objects, and are valid again as soon as the memory is back. While it is gone
they may be moved around, but not read: that is an error, or garbage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from d9d_dist.errors import UserError


@runtime_checkable
class Offloadable(Protocol):
    """Something whose state can leave the device for a while."""

    def offload(self) -> None:
        """Free the device memory of the state.

        Raises:
            UserError: If it is off-loaded already.
        """
        ...

    def onload(self) -> None:
        """Bring the state back, as it was.

        Raises:
            UserError: If it is not off-loaded.
        """
        ...


@final
@dataclass(slots=True)
class Offloaded:
    """What `offload_tensor` took off the device; for `onload_tensor`, once.

    Attributes:
        num_bytes: How many bytes of host memory it holds.
    """

    num_bytes: int
    _copies: list[tuple[torch.UntypedStorage, Tensor]] = field(repr=False)


@torch.no_grad()
def offload_tensor(*tensors: Tensor) -> Offloaded:
    """Copy the storages of tensors to the host, and free their device memory, for torch's allocator to use again.

    No collectives; the host waits for the copies.

    Args:
        tensors: Of any dtypes and devices; of DTensors, this rank's part. A storage that several tensors share is taken
            once; all tensors that share it, also those that are not given, are gone until `onload_tensor`. Tensors of
            accelerators are copied to pinned memory; those of the CPU to other memory of the CPU, for no gain.

    Raises:
        UserError: If one of them is off-loaded already, or has memory that torch cannot free, such as NumPy's. Then
            nothing has been off-loaded.
    """
    storages = {storage.data_ptr(): storage for storage in map(_storage, tensors) if storage.nbytes()}
    copies = [(storage, _host_copy(storage)) for storage in storages.values()]
    for device in {storage.device for storage, _ in copies if storage.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
    for storage, _ in copies:
        storage.resize_(0)
    return Offloaded(sum(copy.nbytes for _, copy in copies), copies)


@torch.no_grad()
def onload_tensor(offloaded: Offloaded) -> None:
    """Bring tensors back to their device: the same objects, on the same storages, with the same bits.

    No collectives; on an accelerator, what follows on the current stream can use them at once.

    Raises:
        UserError: If they are back already.
    """
    if not offloaded._copies and offloaded.num_bytes:
        raise UserError("these tensors have been brought back already; expected onload_tensor once for each offload.")
    for storage, copy in offloaded._copies:
        storage.resize_(copy.nbytes)
        _bytes_of(storage).copy_(copy, non_blocking=True)
    offloaded._copies.clear()


@final
class ModuleOffloader:
    """Off-loads all that training a module keeps: parameters, buffers, gradients and the optimizer's state.

    Call it between steps. FSDP modules that are still gathered are resharded first; gradients that FSDP accumulates
    unreduced, in the midst of a step, stay on the device.

    Args:
        module: A model or one stage of it.
        optimizer: The optimizer of its parameters.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._module, self._optimizer = module, optimizer
        self._offloaded: Offloaded | None = None

    def offload(self) -> None:
        """Free the device memory of the state; no collectives.

        Raises:
            UserError: If it is off-loaded already.
        """
        if self._offloaded is not None:
            raise UserError("got offload() of a module that is off-loaded already; call onload() in between.")
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._offloaded = offload_tensor(*self._tensors())

    def onload(self) -> None:
        """Bring the state back, as it was; no collectives.

        Raises:
            UserError: If it is not off-loaded.
        """
        if self._offloaded is None:
            raise UserError("got onload() of a module that is not off-loaded; call offload() before.")
        onload_tensor(self._offloaded)
        self._offloaded = None

    def _tensors(self) -> Iterator[Tensor]:
        for parameter in self._module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._module.buffers()
        if self._optimizer is not None:
            states = tree_leaves(list(self._optimizer.state.values()))
            yield from (state for state in states if isinstance(state, Tensor))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()
    if local.numel() and not storage.nbytes():
        raise UserError(f"got a tensor of shape {tuple(tensor.shape)} that is off-loaded already; bring it back first.")
    if not storage.resizable():
        raise UserError(
            f"got a tensor of shape {tuple(tensor.shape)} whose memory torch does not own, such as a NumPy array's; "
            "expected one whose memory can be freed. Clone it first."
        )
    return storage


def _host_copy(storage: torch.UntypedStorage) -> Tensor:
    is_pinned = storage.device.type != "cpu"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    return copy.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
