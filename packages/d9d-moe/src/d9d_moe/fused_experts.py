"""Expert parallelism of the fused experts of `transformers`: modules whose parameters hold all experts of a layer.

Shape legend: T tokens, D hidden size, E experts, A experts per token (top-k), N dispatched rows.
"""

from typing import Any, final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_dist import gather_from_axis, scatter_to_axis
from d9d_moe.dispatch import Dispatcher
from d9d_moe.grouped_linear import bias_of_rows, grouped_matmul
from d9d_moe.router import Routing


def find_fused_experts(model: nn.Module) -> dict[str, Any]:
    """Return the fused experts of a `transformers` model by name.

    These are modules of classes with the decorator `use_experts_implementation`: parameters `gate_up_proj` (or
    `up_proj`) and `down_proj` [E, ...], optionally with biases, and a forward of tokens [T, D], the indices of their
    experts [T, A] and their weights [T, A].
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "is_transposed", None), bool)
        and _has_expert_dim(module)
        and not getattr(module, "has_post_expert_norm", False)
    }


def _has_expert_dim(module: Any) -> bool:
    parameters = list(module.parameters())
    return "down_proj" in module._parameters and all(len(each) == module.num_experts for each in parameters)


@final
class DispatchedForward:
    """Forward of fused experts of which each rank holds a part. Replaces the module's own forward.

    Args:
        experts: Fused experts; `num_experts` is the number of experts on all ranks.
        dispatcher: Dispatcher of tokens.
        tensor: Mesh of the tensor-parallel axis, whose ranks have equal tokens. Each rank dispatches a part of them.
    """

    def __init__(self, experts: Any, dispatcher: Dispatcher, tensor: DeviceMesh) -> None:
        self._experts, self._dispatcher, self._tensor = experts, dispatcher, tensor

    def __call__(self, tokens_TD: Tensor, indices_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """Return the weighted sums of the experts' outputs [T, D]. An index of E or more drops a choice."""
        num_experts: int = self._experts.num_experts
        is_dropped_TA = indices_TA >= num_experts
        indices_TA, weights_TA = indices_TA.masked_fill(is_dropped_TA, 0), weights_TA.masked_fill(is_dropped_TA, 0.0)
        parts = [self._part(each) for each in (tokens_TD, indices_TA, weights_TA)]
        sent = self._dispatcher.dispatch(parts[0], Routing(*parts[1:]), num_experts=num_experts)
        outputs_TD = sent.combine(apply_fused_experts(self._experts, sent.rows, sent.counts)).wait()
        if self._tensor.size() > 1:
            outputs_TD = gather_from_axis(outputs_TD, self._tensor, dim=0, gradient="equal")[: len(tokens_TD)]
        return outputs_TD

    def _part(self, x: Tensor) -> Tensor:
        """Return this rank's share of the rows, which all tensor-parallel ranks have, padded with zeros."""
        num_ranks = self._tensor.size()
        if num_ranks == 1:
            return x
        return scatter_to_axis(F.pad(x, (0, 0, 0, -len(x) % num_ranks)), self._tensor, dim=0)


def apply_fused_experts(experts: Any, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
    """Apply fused experts to rows [N, D] that are sorted by expert; `counts_E` are the numbers of rows of this rank."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    inner_NF = _product(experts, up, rows_ND, counts_E)
    inner_NF = experts._apply_gate(inner_NF) if experts.has_gate else experts.act_fn(inner_NF)
    return _product(experts, "down_proj", inner_NF, counts_E)


def _product(experts: Any, name: str, rows: Tensor, counts: Tensor) -> Tensor:
    weight: Tensor = getattr(experts, name)
    y = grouped_matmul(rows, weight.transpose(1, 2) if experts.is_transposed else weight, counts)
    bias: Tensor | None = getattr(experts, "_".join((name, "bias"))) if experts.has_bias else None
    return y if bias is None else y + bias_of_rows(bias, rows, counts)
