"""Optimizer steps that a flag on the device skips, without host-device synchronization."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from d9d_loop.optimizers.groupwise import GroupwiseOptimizer
from d9d_loop.optimizers.joined import JoinedOptimizer


def takes_gate(optimizer: Optimizer) -> bool:
    """Return True if a flag on the device can skip the steps of an optimizer.

    These are Lion, Muon, and optimizers whose kernels obey `found_inf`, the protocol of `torch.amp.GradScaler`: torch's
    fused ones. Schedule-Free and stochastic AdamW count their steps on the host.
    """
    match optimizer:
        case JoinedOptimizer():
            return all(map(takes_gate, optimizer.optimizers))
        case GroupwiseOptimizer():
            return optimizer.takes_gate
        case _:
            has_protocol = getattr(optimizer, "_step_supports_amp_scaling", False)
            return has_protocol and all(group.get("fused", True) for group in optimizer.param_groups)


@contextmanager
def gated(optimizer: Optimizer, gate: Tensor) -> Generator[None]:
    """Skip the steps of an optimizer in the body if `gate`, a 0-dim float32 tensor on the device, is 1.

    The optimizer must satisfy `takes_gate`. Parameters and state keep their values, even if gradients are non-finite.
    """
    with ExitStack() as stack:
        match optimizer:
            case JoinedOptimizer():
                for each in optimizer.optimizers:
                    stack.enter_context(gated(each, gate))
            case GroupwiseOptimizer():
                optimizer.gate = gate
                stack.callback(setattr, optimizer, "gate", None)
            case _:
                flags: Any = optimizer  # attributes, as `GradScaler` sets them
                flags.found_inf, flags.grad_scale = gate, None
                stack.callback(delattr, flags, "found_inf")
                stack.callback(delattr, flags, "grad_scale")
        yield
