"""What happens to gradients between backward and the optimizer: summed over ranks, divided once, measured, clipped."""

from collections.abc import Iterable, Iterator
from functools import reduce

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from d9d_dist.context import DistributedContext
from d9d_dist.gradient_norm import global_grad_norm


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Choose whether the next backward passes of FSDP reduce gradients over ranks, or only add them up locally.

    Reduce on the last microbatch of a step: the result is the same sum, for one reduction's traffic. It concerns what
    FSDP manages; what `GradientSync` reduces is always added up locally first.

    Args:
        module: A model or one stage of it; a module without data parallelism is left alone.
        enabled: Whether to reduce.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_requires_gradient_sync(enabled, recurse=False)


def defer_gradient_sync(module: nn.Module) -> None:
    """From the next forward on, backward passes of FSDP only add gradients up; `finish_gradient_sync` reduces them.

    For weight gradients that are computed outside of backward, as `SplitBackward` leaves them. Parameters stay
    gathered from the first backward of a step to the end of it.

    Args:
        module: A model or one stage of it; a module without FSDP is left alone.
    """
    for root in _fsdp_roots(module):
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)
        # Newer torch has a way that is meant for this.
        if hasattr(root, "set_manual_backward_finalization"):
            root.set_manual_backward_finalization(True)


def finish_gradient_sync(module: nn.Module) -> None:
    """Reduce over ranks what backward passes have added up since `defer_gradient_sync`, which stays in force.

    Collectives: those of FSDP, a reduce-scatter, and for replicas an all-reduce, of each group of parameters.

    Args:
        module: The same as before.
    """
    for root in _fsdp_roots(module):
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)
        if hasattr(root, "finalize_backward"):
            root.finalize_backward()
        else:
            _finalize_backward(root)
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)


def _fsdp_roots(module: nn.Module) -> Iterator[FSDPModule]:
    """The outermost modules that FSDP manages."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _fsdp_roots(child)


def _finalize_backward(root: FSDPModule) -> None:
    """What `FSDPModule.finalize_backward` does, for versions of torch that do not have it."""
    assert isinstance(root, nn.Module)
    states = [child._get_fsdp_state() for child in root.modules() if isinstance(child, FSDPModule)]
    for state in reversed(states):
        if state._fsdp_param_group is not None:
            state._fsdp_param_group.post_backward()
    states[0]._root_post_backward_final_callback()


@torch.no_grad()
def scale_gradients_(parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by a factor, in place. No collectives.

    Args:
        parameters: Parameters; those without a gradient are passed over.
        factor: E.g. one over the global weight of the batch; a 0-dim tensor causes no host synchronisation.
    """
    gradients = [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    ]
    if not gradients:
        return
    # A factor of the gradients' own dtype keeps the fused kernel; one of less than float32 would be inexact.
    dtype = reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    if isinstance(factor, torch.Tensor):
        factor = factor.to(dtype)
    else:  # of a Python number the CPU's kernel takes what it rounds to in the dtype of 16-bit gradients
        factor = torch.full((), factor, dtype=dtype, device=gradients[0].device)
    torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    ctx: DistributedContext,
    norm_type: float = 2.0,
    factor: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Scale all gradients down, in place, so that their global norm is at most `max_norm`; right in every layout.

    As `torch.nn.utils.clip_grad_norm_`, they are multiplied by `max_norm / (norm + 1e-6)`, at most 1.

    Args:
        parameters: The parameters of this rank.
        max_norm: The largest norm to let pass; infinity only measures.
        ctx: The job's context.
        norm_type: The p of the p-norm.
        factor: What gradients are multiplied by first, as by `scale_gradients_`, but in one pass over them: one over
            the global weight of a batch, say. Not negative; a 0-dim tensor causes no host synchronisation.

    Returns:
        The global norm of the gradients times the factor, before clipping; see `global_grad_norm`, whose collectives
        this issues.

    Raises:
        UserError: As for `global_grad_norm`.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters, ctx=ctx, norm_type=norm_type) * factor
    clips = max_norm != float("inf")
    if clips or isinstance(factor, torch.Tensor) or factor != 1.0:
        scale_gradients_(parameters, (max_norm / (norm + 1e-6)).clamp_(max=1.0) * factor if clips else factor)
    return norm
