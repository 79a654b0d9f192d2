"""Synchronized batch norm: statistics over the microbatches of all data-parallel ranks, on any device.

`torch.nn.SyncBatchNorm` needs an accelerator. Here each layer keeps its own `forward`, and only the call of
`F.batch_norm` is computed over all ranks, so subclasses that add an activation still work. For a channel with n values,
mean m, variance v and x' = (x - m) / sqrt(v + eps), the gradient on each rank is

    dx = weight / sqrt(v + eps) * (dy - sum(dy) / n - x' * sum(dy * x') / n)

where dy is the gradient of the output, and n, m, v and the sums are over all ranks. Gradients of weight and bias are
sums over this rank's values, as in other layers.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from d9d_dist.collectives.differentiable import sum_over_ranks
from d9d_dist.collectives.tensors import all_gather
from d9d_dist.errors import UserError
from d9d_dist.values._model_tensors import canonical_name


def synchronize_batch_norm(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Make batch norms compute their statistics over the microbatches of all ranks of a group, in place.

    The group has the ranks that split a batch: `ctx.group_for("batch", "dp", "cp")`. Call the function before or after
    parallelization, but before FSDP, which also changes classes. Returns the names of the layers.

    Applies to `nn.BatchNorm1d`, `2d`, `3d`, `nn.SyncBatchNorm` and their subclasses, with any options. Ranks may have
    different numbers of values. Running statistics become equal on all ranks, including those of `nn.InstanceNorm1d`,
    `2d` and `3d`. Each layer's class becomes a subclass; state-dict names, hooks and `isinstance` are not affected.

    Collective in training: for each batch norm an all-gather in forward and an all-reduce in backward; for each
    instance norm with running statistics an all-reduce. In eval mode, batch norms without running statistics issue the
    same collectives while gradients are enabled. Under `no_grad` they raise an error on several ranks: ranks may
    evaluate different numbers of batches.

    Raises:
        UserError: From the forward of a layer, if it computes its statistics in another way than by one call of
            `F.batch_norm`, or if it has no running statistics and evaluates under `no_grad` on several ranks.
    """
    found: list[str] = []
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for name, module in model.named_modules():
        if is_synchronized(module):
            kind = type(module)
            if kind not in classes:
                classes[kind] = _synchronized(kind, group)
            module.__class__ = classes[kind]
            found.append(canonical_name(name))
    return found


def is_synchronized(module: nn.Module) -> bool:
    """Return True for a layer whose statistics `synchronize_batch_norm` computes over all ranks."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats)


def _synchronized(kind: Any, group: dist.ProcessGroup) -> type[nn.Module]:
    """Return a subclass whose `forward` computes over a group. The class holds the group, so layers can be copied."""
    own_forward = _BatchNorm.forward if issubclass(kind, nn.SyncBatchNorm) else kind.forward

    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  (torch's name for it)
        if not (self.training or torch.is_grad_enabled()):
            if isinstance(self, _BatchNorm) and self.running_mean is None and dist.get_world_size(group) > 1:
                raise UserError(
                    f"{kind.__name__} has no running statistics, so in an evaluation each rank would normalize its "
                    "samples by their own statistics; expected running statistics. Set track_running_stats=True, use "
                    "a group norm, or evaluate on one process."
                )
            return own_forward(self, input, *args, **kwargs)
        statistics = _SynchronizedMode(group, input)
        with statistics:
            output = own_forward(self, input, *args, **kwargs)
        if isinstance(self, _BatchNorm) and self.training and not statistics.is_exact:
            raise UserError(
                f"{kind.__name__} does not compute the statistics of its input with one call of F.batch_norm, so they "
                "cannot be computed over all data-parallel ranks; expected a torch batch norm or one that calls "
                "F.batch_norm(input, ...). Replace the module by such a batch norm or a group norm, or call eval()."
            )
        return output

    return type(kind.__name__, (kind,), {"forward": torch.compiler.disable(forward), "__module__": kind.__module__})


class _SynchronizedMode(TorchFunctionMode):
    """Function mode that computes `F.batch_norm` of a layer's input over all ranks of a group.

    Attributes:
        is_exact: True if `F.batch_norm` was called exactly once, on the layer's input.
    """

    def __init__(self, group: dist.ProcessGroup, layer_input: Tensor) -> None:
        super().__init__()
        self._group, self._input = group, layer_input
        self.is_exact = False
        self._num_calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(func, *args, **options)
        output = func(*args, **options)
        if func is F.instance_norm:
            self._average_running_statistics(*args, **options)
        return output

    def _batch_norm(  # noqa: PLR0917  (torch's arguments)
        self,
        func: Any,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        self._num_calls += 1
        self.is_exact = self._num_calls == 1 and x is self._input
        if not training:
            return func(x, running_mean, running_var, weight, bias, training, momentum, eps)
        with torch.no_grad():
            mean, var, count = _moments(x, self._group)
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        return _Normalize.apply(x, weight, bias, mean, var, count, eps, self._group)

    def _average_running_statistics(  # noqa: PLR0917
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        *_: Any,
        **__: Any,
    ) -> None:
        """Average the running statistics over the instances of all ranks, after each rank's own update."""
        if running_mean is None or running_var is None or not use_input_stats:
            return
        with torch.no_grad():
            both = torch.stack((running_mean, running_var)) * len(x)
            total = torch.cat((both.flatten(), both.new_tensor([len(x)])))
            dist.all_reduce(total, group=self._group)
            mean, var = (total[:-1] / total[-1]).view_as(both)
            running_mean.copy_(mean)
            running_var.copy_(var)


def _moments(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and number of values per channel over all ranks, bitwise equal on every rank.

    Moments are merged in at least float32 by Chan's formula, which has no cancellation between large sums. Collective:
    one all-gather.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = _all_but_channels(x)
    num = x.numel() // x.shape[1]
    mean = wide.sum(dims) / max(num, 1)
    squares = (wide - _over_channels(mean, x)).square_().sum(dims)
    parts = all_gather(torch.cat((mean, squares, mean.new_tensor([num]))), group, stack=True)
    means, all_squares = parts[:, :-1].view(len(parts), 2, -1).unbind(1)
    counts = parts[:, -1:]
    count = counts.sum()
    merged = (counts * means).sum(0) / count
    var = (all_squares + counts * (means - merged).square()).sum(0) / count
    return merged, var, count


class _Normalize(torch.autograd.Function):
    """Batch norm with given statistics of all ranks' inputs; differentiable twice."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.group = eps, group
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        dims = _all_but_channels(x)
        wide, dy = x.to(mean.dtype), gradients[0].to(mean.dtype)
        if torch.is_grad_enabled():  # second derivatives need statistics that are functions of the input
            mean = sum_over_ranks(wide.sum(dims), ctx.group) / count
            var = sum_over_ranks((wide - _over_channels(mean, x)).square().sum(dims), ctx.group) / count
        scale = (var + ctx.eps).rsqrt()
        normal = (wide - _over_channels(mean, x)) * _over_channels(scale, x)
        own = torch.cat((dy.sum(dims), (dy * normal).sum(dims)))
        dx = None
        if ctx.needs_input_grad[0]:
            # Means of dy and of dy * x'. They do not include the weight, which `factor` contains.
            mean_dy, mean_dy_normal = (sum_over_ranks(own, ctx.group) / count).chunk(2)
            factor = scale if weight is None else scale * weight
            dx = _over_channels(factor, x) * (
                dy - _over_channels(mean_dy, x) - normal * _over_channels(mean_dy_normal, x)
            )
            dx = dx.to(x.dtype)
        dbias, dweight = own.chunk(2)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        # The bias has the dtype of the weight; without a weight, the dtype of the accumulation, as in torch's layers.
        dtype = mean.dtype if weight is None else weight.dtype
        return (dx, dweight.to(dtype) if needs_weight else None, dbias.to(dtype) if needs_bias else None, *(None,) * 5)


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _over_channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (x.ndim - 2))
