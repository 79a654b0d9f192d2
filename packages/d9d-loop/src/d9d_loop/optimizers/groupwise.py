"""Base class and helpers of d9d's own optimizers, which update one parameter group at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from d9d_dist import local_tensor


class GroupwiseOptimizer(Optimizer, ABC):
    """Optimizer whose step calls `update` for each parameter group.

    Attributes:
        counts_steps: True if the host counts the steps, so that a step that the gate skipped must be uncounted.
        takes_wide_gradients: True if gradients may have a wider dtype than their parameters.
        gate: 0-dim tensor on the device: 1 skips the steps, without host-device synchronization; `None` for no gate.
    """

    counts_steps: ClassVar[bool] = False
    takes_wide_gradients: ClassVar[bool] = False
    gate: Tensor | None = None
    _restore_counts: Sequence[Callable[[], object]] = ()

    @final
    @torch.no_grad()
    def step(  # ty: ignore[incompatible-method-override]  (torch declares an overload for each kind of closure)
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient, and return the loss of `closure`, if there is one.

        `closure` recomputes the loss; it is called once, with gradients enabled.
        """
        loss = loss_of(closure)
        self._restore_counts = []
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self.update(group, trained)
        return loss

    @final
    def uncount_step(self) -> None:
        """Restore the counts of the host before the last step, which the gate skipped. Call it before the next step."""
        for restore in self._restore_counts:
            restore()
        self._restore_counts = ()

    @final
    def count(self, counts: dict[str, Any], **new: float) -> None:
        """Set counts of steps; `uncount_step` restores them if the step has a gate."""
        if self.gate is not None:
            before = {name: counts[name] for name in new}
            self._restore_counts = [*self._restore_counts, partial(counts.update, before)]
        counts.update(new)

    @abstractmethod
    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Update one or more parameters of a group; all of them have gradients, and their state is in `self.state`.

        Parameters are plain tensors or DTensors. If `gate` is 1, they and their tensors in the state keep their values.
        """


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Call an optimizer's closure with gradients enabled; return None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def local_parts(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the non-empty local shards of tensors, which suffice for an elementwise update; drop `None`.

    On DTensors, each operation would first propagate the placements of all tensors, which takes seconds in the first
    step. An empty parameter shard has empty gradients and state, so parallel lists still match. Complex numbers are
    pairs of real ones, as in torch's AdamW.
    """
    parts = [local_tensor(tensor) for tensor in tensors if tensor is not None]
    return [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in parts if part.numel()]


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors by a number in place, with the number in at least float32.

    On CPUs, `torch._foreach_mul_` rounds a Python number to the dtype of the tensors: 0.99 is 0.98828125 in bfloat16.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    torch._foreach_mul_(list(tensors), torch.full((), factor, dtype=wide, device=tensors[0].device))


def update_unless(
    gate: Tensor | None, update: Callable[..., None], changed: Sequence[list[Tensor]], read: Sequence[list[Tensor]]
) -> None:
    """Apply an elementwise in-place update to parallel lists of tensors, unless the gate is 1.

    With a gate, the update changes copies of one tensor of each list at a time.

    Args:
        gate: 0-dim tensor on the device of the lists, or `None` for no gate.
        update: Called with the lists in `changed`, then the lists in `read`.
        changed: Lists of tensors that the update changes.
        read: Lists of tensors that the update only reads.
    """
    if gate is None:
        update(*changed, *read)
        return
    for each in zip(*changed, *read, strict=True):
        new = [tensor.clone() for tensor in each[: len(changed)]]
        update(*([tensor] for tensor in (*new, *each[len(changed) :])))
        for tensor, value in zip(each, new, strict=False):
            replace_(tensor, value, gate=gate)


def replace_(tensor: Tensor, value: Tensor, *, gate: Tensor | None) -> None:
    """Copy a value into a tensor unless the gate is 1. With gate 1 the value is ignored, and may be non-finite."""
    tensor.copy_(value if gate is None else torch.where(gate > 0, tensor, value))
