"""Offloading of tensors to the host and back, without changes to the objects that refer to them.

The memory of a tensor's storage is freed, not the tensor. Parameters, views, optimizer keys, DTensors and FSDP's
internal references stay the same objects, and are valid again after onloading. Reading an offloaded tensor raises an
error or returns garbage.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from d9d_dist.errors import UserError
from d9d_dist.shards import local_tensor


@final
@dataclass(slots=True)
class Offloaded:
    """Host copies of offloaded tensors; pass it to `onload_tensor` once.

    Attributes:
        num_bytes: Size of the copies in host memory.
    """

    num_bytes: int
    _copies: list[tuple[torch.UntypedStorage, Tensor]] = field(repr=False)


@torch.no_grad()
def offload_tensor(*tensors: Tensor) -> Offloaded:
    """Copy the storages of tensors to the host, and free their device memory for torch's allocator.

    No collectives. The host waits for the copies.

    Args:
        tensors: Tensors of any dtype and device; of a DTensor, this rank's shard. A shared storage is copied once. All
            tensors that share a storage, even those not passed, are invalid until `onload_tensor`. Accelerator tensors
            are copied to pinned memory. CPU tensors are copied to other CPU memory, which saves no memory.

    Raises:
        UserError: If a tensor is already offloaded, or torch does not own its memory, as for NumPy arrays. Nothing is
            offloaded then.
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
    """Restore offloaded tensors on their device: the same objects and storages, with bitwise equal values.

    No collectives. On an accelerator the copies are asynchronous on the current stream. A second call raises
    `UserError`.
    """
    if not offloaded._copies and offloaded.num_bytes:
        raise UserError("these tensors were already onloaded; expected one onload_tensor for each offload_tensor.")
    for storage, copy in offloaded._copies:
        storage.resize_(copy.nbytes)
        _bytes_of(storage).copy_(copy, non_blocking=True)
    offloaded._copies.clear()


@final
class ModuleOffloader:
    """Offloader of a module's training state: parameters, buffers, gradients and optimizer state.

    Use it between steps. FSDP modules with gathered parameters are resharded first. Unreduced gradients that FSDP
    accumulates within a step stay on the device. `others` returns further tensors of the state, such as copies.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        others: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._module, self._optimizer, self._others = module, optimizer, others
        self._offloaded: Offloaded | None = None

    def offload(self) -> None:
        """Free the device memory of the state. No collectives. Raises `UserError` if the state is already offloaded."""
        if self._offloaded is not None:
            raise UserError("got offload() of a module that is already offloaded; call onload() first.")
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._offloaded = offload_tensor(*self._tensors())

    def onload(self) -> None:
        """Restore the state on the device. No collectives. Raises `UserError` if the state is not offloaded."""
        if self._offloaded is None:
            raise UserError("got onload() of a module that is not offloaded; call offload() first.")
        onload_tensor(self._offloaded)
        self._offloaded = None

    def _tensors(self) -> Iterator[Tensor]:
        for parameter in self._module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._module.buffers()
        yield from self._others()
        if self._optimizer is not None:
            states = tree_leaves(list(self._optimizer.state.values()))
            yield from (state for state in states if isinstance(state, Tensor))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = local_tensor(tensor)
    storage = local.untyped_storage()
    if local.numel() and not storage.nbytes():
        raise UserError(f"got a tensor of shape {tuple(tensor.shape)} that is already offloaded; onload it first.")
    if not storage.resizable():
        raise UserError(
            f"got a tensor of shape {tuple(tensor.shape)} whose memory belongs to another library, such as NumPy; "
            "expected a tensor whose memory torch can free. Clone the tensor first."
        )
    return storage


def _host_copy(storage: torch.UntypedStorage) -> Tensor:
    is_pinned = storage.device.type != "cpu"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    return copy.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
