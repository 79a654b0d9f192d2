"""Dispatch by DeepEP, whose kernels send each token once to each rank with at least one of the token's experts.

DeepEP uses NVLink within a node and RDMA between nodes. The weighted sum of the experts' outputs is computed on the
experts' rank. DeepEP then sums the rows of all ranks, asynchronously.

Shape legend: T tokens, D hidden size, E experts, A experts per token (top-k), M tokens received by this rank, N rows:
one per received token and expert of this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist.errors import UserError
from d9d_dist.gradients.first_derivative import first_derivative_only
from d9d_moe.dispatch import CombineHandle, Dispatched, dispatch_local
from d9d_moe.router import Routing

DEEP_EP_INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP"

_BFLOAT16_BYTES = 2
"""Element size of bfloat16, the only dtype that the dispatcher uses."""


class DeepEpBuffer(Protocol):
    """Methods of `deep_ep.Buffer` that `DeepEpDispatcher` uses."""

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        """Return the numbers of tokens per rank, per node and per expert, a mask of tokens and ranks, and an event."""
        ...

    def dispatch(self, x: Tensor, **options: Any) -> tuple[Any, ...]:
        """Return the received tokens, their expert indices and weights, the rows per expert, a handle, and an event."""
        ...

    def combine(
        self, x: Tensor, handle: Any, *, topk_weights: Tensor | None = None, async_finish: bool = False
    ) -> tuple[Any, ...]:
        """Return the sums over ranks of the rows and of the weights of this rank's tokens, and an event."""
        ...


@final
@dataclass(frozen=True, slots=True)
class DeepEpDispatcher:
    """Dispatcher that sends tokens by DeepEP, in bfloat16. All layers of a model share one dispatcher and its buffer.

    Collective over the ranks of the buffer, in forward and backward. One host-device synchronization per forward pass,
    to read the number of rows. `deep_ep_buffer` allocates the buffer.
    """

    buffer: DeepEpBuffer

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> Dispatched:
        """See `Dispatcher.dispatch`.

        Raises:
            UserError: If tokens on an accelerator are not in bfloat16.
        """
        if tokens_TD.device.type != "cpu" and tokens_TD.dtype != torch.bfloat16:
            raise UserError(
                f"dispatch = 'deep_ep' got tokens in {tokens_TD.dtype}; expected torch.bfloat16. Use "
                "Precision(compute=torch.bfloat16), or dispatch = 'all_to_all'."
            )
        rows_MD, weights_MA, choices_MA, counts, handle = cast(
            tuple[Tensor, Tensor, Tensor, Sequence[int], Any],
            _DeepEpDispatch.apply(tokens_TD, routing.probabilities, routing.indices, self.buffer, num_experts),
        )
        num_local_experts = len(counts)
        local = Routing(torch.where(choices_MA < 0, num_local_experts, choices_MA), weights_MA)
        arrived = dispatch_local(rows_MD, local, num_experts=num_local_experts, num_rows=sum(counts))

        def combine(outputs_ND: Tensor) -> CombineHandle:
            sums_MD = arrived.combine(outputs_ND).wait()
            out_TD, event = cast(tuple[Tensor, Any], _DeepEpCombine.apply(sums_MD, self.buffer, handle))

            def wait() -> Tensor:
                event.current_stream_wait()
                return out_TD

            return CombineHandle(wait)

        return Dispatched(arrived.rows, arrived.counts, combine)


def deep_ep_buffer(group: dist.ProcessGroup, *, hidden_size: int, device: torch.device) -> DeepEpBuffer:
    """Allocate the communication buffer of DeepEP, for layers of at most this hidden size. Collective over the group.

    Raises:
        UserError: If the device is a CPU, the package `deep_ep` is not installed, or it does not support the group
            size.
    """
    make, configs = check_deep_ep(device, num_ranks=group.size())
    row_bytes = hidden_size * _BFLOAT16_BYTES
    return make(
        group,
        num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, group.size()) for config in configs),
        # The hint is 0 if all ranks are in one node.
        num_rdma_bytes=max(config.get_rdma_buffer_size_hint(row_bytes, group.size()) for config in configs),
    )


def check_deep_ep(device: torch.device, *, num_ranks: int) -> tuple[Callable[..., DeepEpBuffer], Sequence[Any]]:
    """Return the class `deep_ep.Buffer`, and the configurations that it recommends for dispatch and for combine.

    Raises:
        UserError: If the device is a CPU, the package `deep_ep` is not installed, or it does not support `num_ranks`.
    """
    if device.type == "cpu":
        raise UserError(
            "dispatch = 'deep_ep' on a CPU; expected an accelerator with NVLink or RDMA. Use dispatch = 'all_to_all'."
        )
    if find_spec("deep_ep") is None:
        raise UserError(
            f"dispatch = 'deep_ep', but the package deep_ep is not installed. Install it: {DEEP_EP_INSTALL}. Or use "
            "dispatch = 'all_to_all'."
        )
    from deep_ep import Buffer  # noqa: PLC0415  (optional)  # ty: ignore[import-not-found]

    try:
        return Buffer, (Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks))
    except AssertionError as error:
        raise UserError(
            f"dispatch = 'deep_ep' with mesh.expert_parallel = {num_ranks}: {error}. Use another degree, such as 8 or "
            "16, or dispatch = 'all_to_all'."
        ) from error


class _DeepEpDispatch(torch.autograd.Function):
    """Transfer of tokens and weights to the ranks of their experts; backward sums the gradients over these ranks."""

    @staticmethod
    def forward(  # noqa: PLR0917  (autograd passes by position)
        ctx: Any, tokens_TD: Tensor, weights_TA: Tensor, indices_TA: Tensor, buffer: DeepEpBuffer, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[int], Any]:
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(indices_TA, num_experts)
        rows_MD, choices_MA, weights_MA, counts, handle, _ = buffer.dispatch(
            tokens_TD.contiguous(),
            topk_idx=indices_TA,
            topk_weights=weights_TA,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_in_rank,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(choices_MA)
        return rows_MD, weights_MA, choices_MA, counts, handle

    @staticmethod
    @first_derivative_only("the dispatch of DeepEP")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_rows, grad_weights, *_ = (gradient.contiguous() for gradient in gradients[:2])
        grad_tokens, grad_weights_TA, _ = ctx.buffer.combine(grad_rows, ctx.handle, topk_weights=grad_weights)
        return grad_tokens, grad_weights_TA, None, None, None


class _DeepEpCombine(torch.autograd.Function):
    """Sum of rows over ranks, and an event that marks its end; backward dispatches the gradients."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, buffer: DeepEpBuffer, handle: Any) -> tuple[Tensor, Any]:
        ctx.buffer, ctx.handle = buffer, handle
        tokens_TD, _, event = buffer.combine(rows_MD, handle, async_finish=True)
        return tokens_TD, event

    @staticmethod
    @first_derivative_only("the dispatch of DeepEP")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.dispatch(gradients[0].contiguous(), handle=ctx.handle)[0], None, None
