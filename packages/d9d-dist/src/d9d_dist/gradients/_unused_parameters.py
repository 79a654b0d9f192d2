"""Support for FSDP ranks that use different parameters: a gradient that is missing on a rank counts as zero.

FSDP2 reduce-scatters only the gradients that a rank has computed. If ranks compute gradients of different parameters,
buffers of different sizes crash the job. With buffers of equal sizes, gradients of different parameters are summed
silently.
"""

from collections.abc import Iterator
from typing import Any, final
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


@final
class UnusedParameters:
    """Provider of zero gradients for the parameters that a rank does not use, so that FSDP can reduce all gradients.

    `finish` removes the zero gradients of parameters that no rank used. Optimizers then skip these parameters, as
    without FSDP: no weight decay and no optimizer state. Construct it after the model is parallelized.
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups = list(_groups(model))
        self._missing_gradients: dict[int, torch.Tensor | None] = {}
        self._installed = [_hook_post_backward(group, WeakMethod(self._record_missing)) for group in self._groups]

    def finish(self) -> None:
        """Remove zero gradients of parameters that no rank used. Collective: one small all-reduce per mesh axis.

        Synchronizes the host only on ranks that lacked a gradient.
        """
        by_mesh: dict[tuple[dist.ProcessGroup, ...], list[Any]] = {}
        for group in self._groups:
            parameters = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
            by_mesh.setdefault(_process_groups(group), []).extend(parameters)
        for process_groups, parameters in by_mesh.items():
            if process_groups and parameters:
                self._restore_unused(parameters, process_groups)
        self._missing_gradients.clear()

    def close(self) -> None:
        """Remove the hooks from FSDP. Safe to call twice."""
        for group, hook in zip(self._groups, self._installed, strict=True):
            if group.__dict__.get("post_backward") is hook:
                del group.post_backward

    def _restore_unused(self, parameters: list[Any], process_groups: tuple[dist.ProcessGroup, ...]) -> None:
        device = parameters[0].sharded_param.device
        counts = torch.ones(len(parameters), dtype=torch.int32, device=device)
        missing = [index for index, parameter in enumerate(parameters) if id(parameter) in self._missing_gradients]
        for index in missing:
            counts[index].zero_()
        for process_group in process_groups:
            dist.all_reduce(counts, group=process_group)
        if missing:
            numbers = counts.tolist()
            for index in missing:
                if numbers[index] == 0:
                    parameters[index].sharded_param.grad = self._missing_gradients[id(parameters[index])]

    def _record_missing(self, group: Any) -> None:
        """Record which parameters of a group have no gradient, just before FSDP reduces the group."""
        if not group.reduce_grads:
            return
        gradients = {id(parameter): _gradient(parameter) for parameter in group.fsdp_params}
        # Before torch 2.15, FSDP has no reduce_scatter_unused_params, and all gradients of a group have one dtype.
        by_hand = not hasattr(group, "reduce_scatter_unused_params")
        dtype = next((gradient.dtype for gradient in gradients.values() if gradient is not None), None)
        for parameter in group.fsdp_params:
            if not parameter.sharded_param.requires_grad or not hasattr(parameter, "_unsharded_param"):
                continue
            if gradients[id(parameter)] is not None:
                self._missing_gradients.pop(id(parameter), None)
                continue
            self._missing_gradients.setdefault(id(parameter), parameter.sharded_param.grad)
            if by_hand:
                unsharded = parameter._unsharded_param
                unsharded.grad = torch.zeros_like(unsharded, dtype=dtype)
        if not by_hand:
            group.reduce_scatter_unused_params = True


def _hook_post_backward(group: Any, callback: WeakMethod[Any]) -> Any:
    """Call `callback` before FSDP reduces a group, unless the callback's object has been deleted."""

    def post_backward(*unused: Any) -> None:
        if (alive := callback()) is not None:
            alive(group)
        type(group).post_backward(group, *unused)

    group.post_backward = post_backward
    return post_backward


def _groups(model: nn.Module) -> Iterator[Any]:
    """Yield the FSDP parameter groups of a module and its descendants, in the order of the model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:
                yield state._fsdp_param_group


def _gradient(parameter: Any) -> torch.Tensor | None:
    """Return a parameter's unsharded gradient on this rank, before FSDP reduces it."""
    accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
    if accumulated is not None or not hasattr(parameter, "_unsharded_param"):
        return accumulated
    return parameter._unsharded_param.grad


def _process_groups(group: Any) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups of more than one rank over which FSDP reduces."""
    info = group.mesh_info
    found = (getattr(info, "shard_process_group", None), getattr(info, "replicate_process_group", None))
    return tuple(each for each in found if each is not None and each.size() > 1)
