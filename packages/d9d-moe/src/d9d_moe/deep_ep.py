"""Dispatch by DeepEP, whose kernels send each token once to every rank that has one of its experts.

Over NVLink within a node, over RDMA between nodes: the sizes of its buffers say which. Experts' answers are weighed and
added up where the experts are, and DeepEP adds up those of the ranks, asynchronously.

Shape legend: T tokens, D hidden size, E experts, A experts active for each token, M tokens that arrive at this rank, N
choices of those that are experts of this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from d9d_dist.errors import UserError
from d9d_moe.dispatch import Combining, LocalDispatched, dispatch_some
from d9d_moe.router import Routing

DEEP_EP_INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP"

_BYTES = 2
"""Of a number in bfloat16, all that the kernels take."""


class DeepEpBuffer(Protocol):
    """What is needed of `deep_ep.Buffer`."""

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        """Tokens for each rank, node and expert, which rank each token goes to, and an event."""
        ...

    def dispatch(self, x: Tensor, **options: Any) -> tuple[Any, ...]:
        """Tokens that arrive, their choices, weights, counts of experts, a handle, and an event."""
        ...

    def combine(
        self, x: Tensor, handle: Any, *, topk_weights: Tensor | None = None, async_finish: bool = False
    ) -> tuple[Any, ...]:
        """Sums over ranks of what they have for this one's tokens, the same of weights, and an event."""
        ...


@final
@dataclass(frozen=True, slots=True)
class DeepEpDispatcher:
    """Sends tokens by DeepEP, in bfloat16; one for all layers of a model, whose buffer they share.

    Collective over the ranks of the buffer, in forward and backward. The host waits for the number of rows once in a
    forward pass.

    Attributes:
        buffer: Its communication buffers: what `deep_ep_buffer` makes.
    """

    buffer: DeepEpBuffer

    def dispatch(self, tokens_TD: Tensor, routing: Routing, *, num_experts: int) -> "DeepEpDispatched":
        """See `Dispatcher.dispatch`.

        Raises:
            UserError: If tokens on an accelerator are not in bfloat16.
        """
        if tokens_TD.device.type != "cpu" and tokens_TD.dtype != torch.bfloat16:
            raise UserError(
                f"dispatch = 'deep_ep' got tokens in {tokens_TD.dtype}; expected torch.bfloat16. Compute in it, with "
                "Precision(compute=torch.bfloat16), or use dispatch = 'all_to_all'."
            )
        rows_MD, weights_MA, choices_MA, counts, handle = cast(
            tuple[Tensor, Tensor, Tensor, Sequence[int], Any],
            _Send.apply(tokens_TD, routing.probabilities, routing.indices, self.buffer, num_experts),
        )
        num_here = len(counts)
        here = Routing(torch.where(choices_MA < 0, num_here, choices_MA), weights_MA)
        arrived = dispatch_some(rows_MD, here, num_experts=num_here, num_rows=sum(counts))
        return DeepEpDispatched(arrived=arrived, buffer=self.buffer, handle=handle)


@final
@dataclass(frozen=True, slots=True)
class DeepEpDispatched:
    """What `DeepEpDispatcher` brought to this rank's experts.

    Attributes:
        arrived: The tokens that arrived, sorted by expert.
        buffer: The way they came.
        handle: What it knows of them.
    """

    arrived: LocalDispatched
    buffer: DeepEpBuffer
    handle: Any

    @property
    def rows(self) -> Tensor:
        """See `Dispatched.rows`."""
        return self.arrived.rows

    @property
    def counts(self) -> Tensor:
        """See `Dispatched.counts`."""
        return self.arrived.counts

    def combine(self, outputs_ND: Tensor) -> Combining:
        """See `Dispatched.combine`."""
        sums_MD = self.arrived.combine(outputs_ND).wait()
        tokens_TD, event = cast(tuple[Tensor, Any], _Return.apply(sums_MD, self.buffer, self.handle))

        def wait() -> Tensor:
            event.current_stream_wait()
            return tokens_TD

        return Combining(wait)


def deep_ep_buffer(group: dist.ProcessGroup, *, hidden_size: int, device: torch.device) -> DeepEpBuffer:
    """Make the buffers that DeepEP needs between the ranks of a group. Collective over it.

    Args:
        group: The ranks that share the experts out, in their order.
        hidden_size: D, of the widest layer.
        device: Where tokens are.

    Raises:
        UserError: If the device is a CPU, the package is not installed, or it has no kernels for so many ranks.
    """
    make, configs = check_deep_ep(device, num_ranks=group.size())
    row_bytes = hidden_size * _BYTES
    return make(
        group,
        num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, group.size()) for config in configs),
        # None within a node.
        num_rdma_bytes=max(config.get_rdma_buffer_size_hint(row_bytes, group.size()) for config in configs),
    )


def check_deep_ep(device: torch.device, *, num_ranks: int) -> tuple[Callable[..., DeepEpBuffer], Sequence[Any]]:
    """Refuse to dispatch by DeepEP where it cannot be.

    Args:
        device: Where tokens are.
        num_ranks: How many ranks share the experts out.

    Returns:
        What makes a buffer, and what it recommends for the way there and the way back.

    Raises:
        UserError: If the device is a CPU, the package is not installed, or it has no kernels for so many ranks.
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


class _Send(torch.autograd.Function):
    """Tokens and weights to the ranks of their experts; gradients come back as sums over those ranks."""

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
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_rows, grad_weights, *_ = (gradient.contiguous() for gradient in gradients[:2])
        grad_tokens, grad_weights_TA, _ = ctx.buffer.combine(grad_rows, ctx.handle, topk_weights=grad_weights)
        return grad_tokens, grad_weights_TA, None, None, None


class _Return(torch.autograd.Function):
    """Sums over ranks, under way, with what to wait for; gradients go where tokens went."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, buffer: DeepEpBuffer, handle: Any) -> tuple[Tensor, Any]:
        ctx.buffer, ctx.handle = buffer, handle
        tokens_TD, _, event = buffer.combine(rows_MD, handle, async_finish=True)
        return tokens_TD, event

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.dispatch(gradients[0].contiguous(), handle=ctx.handle)[0], None, None
