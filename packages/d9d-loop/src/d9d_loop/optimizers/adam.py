"""Adam and AdamW of torch, applied to the local shards of DTensors."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor

from d9d_dist import local_tensor


class _OnLocalShards(torch.optim.Adam):
    """Adam that computes on the local shard of each DTensor as a plain tensor; its state consists of DTensors.

    The update is elementwise, so the result is the same. On DTensors, each operation would propagate the placements of
    all tensors, which takes seconds in the first step.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; see `torch.optim.Adam.step`."""
        update = _without_hooks(torch.optim.Adam.step)
        if closure is not None:
            return update(self, closure)
        groups = self.param_groups
        self.param_groups = self._joined_groups()
        try:
            return update(self)
        finally:
            self.param_groups = groups

    def _init_group(  # ty: ignore[incompatible-method-override]  (accepts the parent's arguments)
        self, group: dict[str, Any], *lists: list[torch.Tensor]
    ) -> bool:
        """Fill the lists of tensors for a step as torch does, then replace DTensors by their local shards."""
        has_complex = super()._init_group(group, *lists)
        if any(isinstance(parameter, DTensor) for parameter in group["params"]):
            for tensors in lists:
                tensors[:] = map(local_tensor, tensors)
        return has_complex

    def _joined_groups(self) -> list[dict[str, Any]]:
        """Join the groups that differ only in decoupled weight decay, and decay their parameters; return all groups.

        Only foreach groups are joined. The decay is the first operation of a step, so the result is bitwise equal. For
        a small model, one kernel call for matrices and vectors together takes about half the time of two calls.
        """
        groups = self.param_groups
        joined: dict[object, dict[str, Any]] = {}
        for group in groups:
            key = tuple([value for name, value in group.items() if name not in _OWN])
            if not (group["foreach"] and group["decoupled_weight_decay"]):
                joined[id(group)] = group
            elif key in joined:
                joined[key]["params"] = [*joined[key]["params"], *group["params"]]
            else:
                joined[key] = {**group, "weight_decay": 0.0}
        if len(joined) == len(groups):
            return groups
        for group in groups:
            if group["foreach"] and group["decoupled_weight_decay"] and group["weight_decay"]:
                _decay(group)
        return list(joined.values())


_OWN = ("params", "param_names", "weight_decay")


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's `step` without torch's call of the step hooks: the subclass's own `step` calls them.

    `Optimizer.__init__` wraps the `step` of each class of which the process constructs an optimizer.
    """
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # ty: ignore[missing-attribute]


@torch.no_grad()
def _decay(group: dict[str, Any]) -> None:
    decayed = [local_tensor(parameter) for parameter in group["params"] if parameter.grad is not None]
    if decayed:
        torch._foreach_mul_(decayed, 1 - group["lr"] * group["weight_decay"])


@final
class LocalAdam(_OnLocalShards):
    """`torch.optim.Adam` that computes on local shards."""


@final
class LocalAdamW(_OnLocalShards, torch.optim.AdamW):
    """`torch.optim.AdamW` that computes on local shards."""
