"""Gradient operations between backward and the optimizer step: synchronization, scaling and clipping."""

from collections.abc import Iterable, Iterator
from functools import reduce
from math import inf

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from d9d_dist.gradients.gradient_norm import global_grad_norm
from d9d_dist.groups.context import DistributedContext
from d9d_dist.shards import local_tensor


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Enable or disable the reduction of gradients over ranks in the next FSDP backward passes.

    If disabled, gradients are only accumulated locally. Enable the reduction for the last microbatch of a step: the sum
    is the same, with the traffic of one reduction. Gradients that `GradientSync` reduces are always accumulated locally
    first. Submodules without FSDP are not changed.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_requires_gradient_sync(enabled, recurse=False)


def defer_gradient_sync(module: nn.Module) -> None:
    """Make FSDP backward passes only accumulate gradients, from the next forward on; see `finish_gradient_sync`.

    For weight gradients that are computed outside of backward, such as those that `SplitBackward` defers. Parameters
    stay gathered from the first backward of a step to its end. A module without FSDP is not changed.
    """
    for root in _fsdp_roots(module):
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)
        # Only newer versions of torch have this function.
        if hasattr(root, "set_manual_backward_finalization"):
            root.set_manual_backward_finalization(True)


def finish_gradient_sync(module: nn.Module) -> None:
    """Reduce the gradients accumulated since `defer_gradient_sync` or the last call. The deferral stays in effect.

    Collectives are those of FSDP: for each parameter group a reduce-scatter, with replicas also an all-reduce.
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
    """Yield the outermost modules that FSDP manages."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _fsdp_roots(child)


def _finalize_backward(root: FSDPModule) -> None:
    """Do the work of `FSDPModule.finalize_backward`, for versions of torch without it."""
    assert isinstance(root, nn.Module)
    states = [child._get_fsdp_state() for child in root.modules() if isinstance(child, FSDPModule)]
    for state in reversed(states):
        if state._fsdp_param_group is not None:
            state._fsdp_param_group.post_backward()
    states[0]._root_post_backward_final_callback()


@torch.no_grad()
def scale_gradients_(parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by a factor, in place. No collectives. Parameters without a gradient are skipped.

    The factor is, for example, 1 / global weight of the batch. A 0-dim tensor causes no host-device synchronization.
    """
    parameters = list(parameters)
    gradients = [local_tensor(gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
    if not gradients:
        return
    dtypes = {gradient.dtype for gradient in gradients}
    if any(dtype.is_complex for dtype in dtypes):
        gradients = _without_conjugate_views(parameters)
    # A factor in the gradients' dtype uses the fused kernel; a 16-bit factor would be inexact.
    dtype = reduce(torch.promote_types, {dtype.to_real() for dtype in dtypes}, torch.float32)
    if isinstance(factor, torch.Tensor):
        factor = factor.to(dtype)
    else:  # the CPU kernel would round a Python number to the dtype of 16-bit gradients
        factor = torch.full((), factor, dtype=dtype, device=gradients[0].device)
    torch._foreach_mul_(gradients, factor)


def _without_conjugate_views(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Replace gradients that are lazily conjugated views, which fused kernels refuse; return the local gradients."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.resolve_conj()
            gradients.append(local_tensor(parameter.grad))
    return gradients


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    ctx: DistributedContext,
    norm_type: float = 2.0,
    factor: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`, for any layout.

    As in `torch.nn.utils.clip_grad_norm_`, gradients are multiplied by `max_norm / (norm + 1e-6)`, at most 1. Issues
    the collectives of `global_grad_norm`.

    Args:
        parameters: All parameters of this rank.
        max_norm: Maximum norm; infinity only computes the norm.
        ctx: Distributed context.
        norm_type: The p of the p-norm.
        factor: Non-negative factor applied before clipping, in the same pass, e.g. 1 / global weight of the batch. A
            0-dim tensor causes no host-device synchronization.

    Returns:
        The global norm of the gradients times the factor, before clipping.

    Raises:
        UserError: As for `global_grad_norm`.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters, ctx=ctx, norm_type=norm_type) * factor
    if max_norm != inf:
        if norm.device.type == "cpu":  # Python numbers are cheaper than tensors
            clip, factor = min(max_norm / (norm.item() + 1e-6), 1.0), float(factor)
        else:
            clip = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        scale_gradients_(parameters, clip * factor)
    elif isinstance(factor, torch.Tensor) or factor != 1.0:
        scale_gradients_(parameters, factor)
    return norm
