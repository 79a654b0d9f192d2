"""Optimizer steps that a flag on the device skips, without host-device synchronization."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d_dist import UserError
from d9d_loop.optimizers.groupwise import GroupwiseOptimizer
from d9d_loop.optimizers.joined import parts_of


def takes_gate(optimizer: Optimizer) -> bool:
    """Return True if a flag on the device can skip the steps of an optimizer.

    The flag works for d9d's own optimizers, and for torch's fused optimizers, whose kernels obey `found_inf` (the
    protocol of `torch.amp.GradScaler`).
    """
    return all(
        isinstance(part, GroupwiseOptimizer)
        or (
            getattr(part, "_step_supports_amp_scaling", False)
            and all(group.get("fused", True) for group in part.param_groups)
        )
        for part in parts_of(optimizer)
    )


@contextmanager
def gated(optimizer: Optimizer, gate: Tensor) -> Generator[None]:
    """Skip the steps of an optimizer in the body if `gate`, a 0-dim float32 tensor on the device, is 1.

    The optimizer must satisfy `takes_gate`. Parameters and state keep their values, even if gradients are non-finite.
    """
    with ExitStack() as stack:
        for part in parts_of(optimizer):
            if isinstance(part, GroupwiseOptimizer):
                part.gate = gate
                stack.callback(setattr, part, "gate", None)
            else:
                flags: Any = part  # attributes, as `GradScaler` sets them
                flags.found_inf, flags.grad_scale = gate, None
                stack.callback(delattr, flags, "found_inf")
                stack.callback(delattr, flags, "grad_scale")
        yield


def run_step(optimizer: Optimizer) -> None:
    """Run a step. Raise `UserError` if an operator of the optimizer does not support `DTensor` parameters."""
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        is_on_mesh = any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"])
        if not is_on_mesh or not any(word in str(error) for word in ("DTensor", "placement", "Sharding propagation")):
            raise
        raise UserError(
            f"the optimizer {type(optimizer).__qualname__} cannot update DTensors, which the parameters of several "
            f"ranks are: {str(error).splitlines()[0]} Expected operators that DTensor supports in place. Use an "
            "optimizer of the configuration (docs/optimizers.md), or train on one rank."
        ) from error


def uncount_step(optimizer: Optimizer) -> None:
    """Undo the host's step count of the last step, which the gate skipped."""
    for part in parts_of(optimizer):
        if isinstance(part, GroupwiseOptimizer):
            part.uncount_step()


def counts_steps(optimizer: Optimizer) -> bool:
    """Return True if `uncount_step` must be called after a skipped step, before the next one."""
    return any(isinstance(part, GroupwiseOptimizer) and part.counts_steps for part in parts_of(optimizer))
