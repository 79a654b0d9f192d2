"""Cross entropy straight from hidden states, without ever holding the logits of all tokens.

At a vocabulary of 150k the logits of a batch are the largest tensor of a training step. Here they exist one tile at a
time. Forward goes over tiles of tokens and, for each, over blocks of the vocabulary. It keeps a running log-sum-exp
and, beside it, the running mean of the weight's rows under the softmax, which is the gradient of the hidden states but
for the label's own row: attention with the rows of the weight as keys and values, computed as "FlashAttention",
arXiv:2205.14135, algorithm 1, computes it. Backward goes over blocks of the vocabulary, makes their logits once more,
and has with them the whole gradient of those rows.

So each gradient is summed up in one place, in float32 (float64 for float64); nothing as large as the weight is kept;
and the two can be had apart: that of the hidden states is finished in forward, for a gradient of 1 of each loss, and
backward only scales it. "Cut Your Losses", arXiv:2411.09009, does the same in one kernel. All in all it takes 8 T D V
operations, as any method that makes the logits twice, beside 6 where they are held.

Shape legend: T tokens (t of a tile), D hidden size, V vocabulary (v of a block); lse: log-sum-exp of the logits.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_dist.split_backward import GradientSlot, take_weight
from d9d_modules.cross_entropy import IGNORED_LABEL, PLAIN_CROSS_ENTROPY, CrossEntropy

_TILE_LOGITS = 2**22
"""Logits alive at once, 16 MiB in float32: enough to keep a device busy."""

_TILE_TOKENS = 2**10
"""Tokens of a tile in forward."""


def linear_cross_entropy(
    hidden_TD: Tensor,
    weights_VD: Sequence[Tensor],
    labels_T: Tensor,
    *,
    loss: CrossEntropy = PLAIN_CROSS_ENTROPY,
    softcap: float | None = None,
) -> Tensor:
    """Losses of the logits `hidden @ concat(weights).T`.

    With a mesh in the loss, the weights are this rank's part of the vocabulary, labels count in all of it, and the
    gradient of the hidden states is this rank's part of a sum. Forward then issues two all-reduces for each 1,024
    tokens, of one and of three numbers a token; backward none.

    Args:
        hidden_TD: Hidden states [T, D].
        weights_VD: Rows of the vocabulary [V_i, D], one tensor after the other, in the dtype of the hidden states.
        labels_T: Token ids [T], int64: `IGNORED_LABEL` or within the vocabulary, which is not checked here.
        loss: What is computed.
        softcap: Takes `softcap * tanh(x / softcap)` for each logit `x`; None leaves them as they are.

    Returns:
        Losses [T] in nats, 0 where ignored: float32, or float64 for float64 input.
    """
    with_gradient = torch.is_grad_enabled() and hidden_TD.requires_grad
    taken = [take_weight(weight_VD, hidden_TD) for weight_VD in weights_VD]
    slots = tuple(slot for _, slot in taken)
    options = _Options(loss, softcap, with_gradient)
    losses_T: Tensor = _LinearCrossEntropy.apply(hidden_TD, labels_T, options, slots, *(weight for weight, _ in taken))
    return losses_T


class _Options(NamedTuple):
    loss: CrossEntropy
    softcap: float | None
    with_gradient: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        labels_T: Tensor,
        options: _Options,
        slots: tuple[GradientSlot, ...],
        *weights_VD: Tensor,
    ) -> Tensor:
        vocabulary = _Vocabulary(weights_VD, options.loss, options.softcap)
        tiles = [
            _forward_tile(hidden_tD, labels_t, vocabulary, with_gradient=options.with_gradient)
            for hidden_tD, labels_t in zip(hidden_TD.split(_TILE_TOKENS), labels_T.split(_TILE_TOKENS), strict=True)
        ]
        losses_T, lse_T, unit_TD = (torch.cat(parts) for parts in zip(*tiles, strict=True))
        ctx.save_for_backward(hidden_TD, labels_T, lse_T, unit_TD, *weights_VD)
        ctx.options, ctx.slots = options, slots
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, labels_T, lse_T, unit_TD, *weights_VD = ctx.saved_tensors
        scale_T = gradients[0].masked_fill(labels_T == IGNORED_LABEL, 0.0)
        grad_hidden_TD = None
        if ctx.options.with_gradient:
            grad_hidden_TD = torch.mul(unit_TD, scale_T.unsqueeze(-1), out=torch.empty_like(unit_TD))
        vocabulary = _Vocabulary(weights_VD, ctx.options.loss, ctx.options.softcap)
        weight_gradient = partial(
            _weight_gradient, vocabulary, hidden_TD=hidden_TD, labels_T=labels_T, lse_T=lse_T, scale_T=scale_T
        )
        grad_weights_VD = (slot.give(partial(weight_gradient, index)) for index, slot in enumerate(ctx.slots))
        return grad_hidden_TD, None, None, None, *grad_weights_VD


class _Tile(NamedTuple):
    """Tokens after forward; `unit` [t, D] is the gradient of their hidden states for a gradient of 1 of each loss."""

    losses_t: Tensor
    lse_t: Tensor
    unit: Tensor


def _forward_tile(hidden_tD: Tensor, labels_t: Tensor, vocabulary: "_Vocabulary", *, with_gradient: bool) -> _Tile:
    loss, smoothing = vocabulary.loss, vocabulary.loss.label_smoothing
    sums = _SoftmaxSums(hidden_tD, with_gradient=with_gradient, with_totals=smoothing > 0.0)
    for index in range(len(vocabulary.weights_VD)):
        for first, rows_vD in vocabulary.blocks(index, num_tokens=len(labels_t)):
            sums.add(vocabulary, rows_vD, labels_t - first)
    if loss.mesh is not None:
        sums.add_over_ranks(loss.mesh)
    lse_t = sums.lse_t
    losses_t = lse_t - (1.0 - smoothing) * sums.label_t + loss.z_loss * lse_t.square()
    losses_t -= smoothing / vocabulary.size * sums.total_t
    losses_t.masked_fill_(labels_t == IGNORED_LABEL, 0.0)
    unit_tD = sums.mean_tD
    if with_gradient:
        unit_tD.mul_((1.0 + 2.0 * loss.z_loss * lse_t).unsqueeze(-1)).sub_(
            sums.total_tD, alpha=smoothing / vocabulary.size
        )
        slope_t = vocabulary.slope(sums.label_t)
        factor_t = torch.full_like(lse_t, 1.0 - smoothing) if slope_t is None else (1.0 - smoothing) * slope_t
        unit_tD.addcmul_(vocabulary.label_rows(labels_t), factor_t.unsqueeze(-1), value=-1.0)
    return _Tile(losses_t, lse_t, unit_tD.to(hidden_tD.dtype))


def _weight_gradient(
    vocabulary: "_Vocabulary", index: int, *, hidden_TD: Tensor, labels_T: Tensor, lse_T: Tensor, scale_T: Tensor
) -> Tensor:
    """The gradient [V_i, D] of one of the weights, for a gradient `scale_T` of the losses."""
    loss, smoothing = vocabulary.loss, vocabulary.loss.label_smoothing
    softmax_scale_T1 = (scale_T * (1.0 + 2.0 * loss.z_loss * lse_T)).unsqueeze(-1)
    gradient_VD = torch.empty_like(vocabulary.weights_VD[index])
    filled = 0
    for first, rows_vD in vocabulary.blocks(index, num_tokens=len(labels_T)):
        x_Tv = vocabulary.logits(hidden_TD, rows_vD)
        slope_Tv = vocabulary.slope(x_Tv)
        grad_Tv = x_Tv.sub_(lse_T.unsqueeze(-1)).exp_().mul_(softmax_scale_T1)
        own_T1, is_own_T1 = _within(labels_T - first, len(rows_vD))
        grad_Tv.scatter_add_(-1, own_T1, (smoothing - 1.0) * scale_T.unsqueeze(-1) * is_own_T1)
        if smoothing:
            grad_Tv -= smoothing / vocabulary.size * scale_T.unsqueeze(-1)
        if slope_Tv is not None:
            grad_Tv *= slope_Tv
        torch.mm(grad_Tv.to(hidden_TD.dtype).T, hidden_TD, out=gradient_VD[filled : filled + len(rows_vD)])
        filled += len(rows_vD)
    return gradient_VD


@final
class _Vocabulary:
    """The rows that this rank has, and the logits that they give.

    Attributes:
        weights_VD: The rows.
        loss: The loss.
        size: The number of rows on all ranks.
    """

    def __init__(self, weights_VD: Sequence[Tensor], loss: CrossEntropy, softcap: float | None) -> None:
        rank, num_ranks = (0, 1) if loss.mesh is None else (loss.mesh.get_local_rank(), loss.mesh.size())
        sizes = [len(weight_VD) for weight_VD in weights_VD]
        self.weights_VD, self.loss, self._softcap = weights_VD, loss, softcap
        self._firsts = list(accumulate(sizes[:-1], initial=rank * sum(sizes)))
        self.size = num_ranks * sum(sizes)

    def blocks(self, index: int, *, num_tokens: int) -> Iterator[tuple[int, Tensor]]:
        """Blocks of rows of one weight, each with the token id of its first; a tile of logits for so many tokens."""
        weight_VD = self.weights_VD[index]
        size = max(1, _TILE_LOGITS // max(1, num_tokens))
        for start in range(0, len(weight_VD), size):
            yield self._firsts[index] + start, weight_VD[start : start + size]

    def logits(self, hidden_TD: Tensor, rows_vD: Tensor) -> Tensor:
        """Logits [T, v] after the soft-cap, in at least float32."""
        x_Tv = F.linear(hidden_TD, rows_vD).to(_wide(hidden_TD))
        return x_Tv if self._softcap is None else x_Tv.div_(self._softcap).tanh_().mul_(self._softcap)

    def slope(self, x: Tensor) -> Tensor | None:
        """The derivative of the soft-cap where it is `x`; None for 1, everywhere."""
        return None if self._softcap is None else 1.0 - (x / self._softcap).square()

    def label_rows(self, labels_T: Tensor) -> Tensor:
        """The row of each label [T, D]; zeros for those that other ranks have."""
        rows_TD = torch.zeros_like(self.weights_VD[0][:1])
        for first, weight_VD in zip(self._firsts, self.weights_VD, strict=True):
            own_T1, is_own_T1 = _within(labels_T - first, len(weight_VD))
            rows_TD = torch.where(is_own_T1, F.embedding(own_T1.squeeze(-1), weight_VD), rows_TD)
        return rows_TD


@final
class _SoftmaxSums:
    """Sums over the vocabulary for each token of a tile, to which one block after the other is added.

    Attributes:
        lse_t: Log-sum-exp of the logits.
        label_t: The logit of the label; 0 as long as it was in no block.
        total_t: Sum of the logits; 0 if not asked for.
        mean_tD: Mean under the softmax of the rows of the weight, each times the slope of the soft-cap at its logit.
        total_tD: Sum of these rows; [1, D] without a soft-cap, 0 if not asked for.
    """

    def __init__(self, hidden_tD: Tensor, *, with_gradient: bool, with_totals: bool) -> None:
        self._hidden_tD, self._with_gradient, self._with_totals = hidden_tD, with_gradient, with_totals
        self.lse_t = hidden_tD.new_full((len(hidden_tD),), -torch.inf, dtype=_wide(hidden_tD))
        self.label_t, self.total_t = torch.zeros_like(self.lse_t), torch.zeros_like(self.lse_t)
        self.mean_tD = torch.zeros_like(hidden_tD if with_gradient else hidden_tD[:0], dtype=self.lse_t.dtype)
        self.total_tD = torch.zeros_like(hidden_tD[:1], dtype=self.lse_t.dtype)

    def add(self, vocabulary: _Vocabulary, rows_vD: Tensor, labels_t: Tensor) -> None:
        """Add a block of rows; labels count from its first one."""
        x_tv = vocabulary.logits(self._hidden_tD, rows_vD)
        own_t1, is_own_t1 = _within(labels_t, len(rows_vD))
        self.label_t += (x_tv.gather(-1, own_t1) * is_own_t1).squeeze(-1)
        if self._with_totals:
            self.total_t += x_tv.sum(dim=-1)
        log_p_tv = x_tv.log_softmax(dim=-1)
        # Of the largest logit, where the difference is exact; of a far smaller one, it would lose its last digits.
        block_lse_t = x_tv.amax(dim=-1) - log_p_tv.amax(dim=-1)
        before_t, self.lse_t = self.lse_t, torch.logaddexp(self.lse_t, block_lse_t)
        if self._with_gradient:
            self.mean_tD *= (before_t - self.lse_t).exp_().unsqueeze(-1)
            self._add_rows(rows_vD, log_p_tv.exp_(), vocabulary.slope(x_tv), (block_lse_t - self.lse_t).exp_())

    def _add_rows(self, rows_vD: Tensor, p_tv: Tensor, slope_tv: Tensor | None, share_t: Tensor) -> None:
        """Of a block's rows, the mean under its own softmax counts by its share of the whole softmax."""
        if slope_tv is not None:
            p_tv *= slope_tv
        self.mean_tD.addcmul_(_wide_product(p_tv, rows_vD), share_t.unsqueeze(-1))
        if self._with_totals:
            sum_D = rows_vD.sum(dim=0, dtype=p_tv.dtype) if slope_tv is None else _wide_product(slope_tv, rows_vD)
            self.total_tD = self.total_tD + sum_D

    def add_over_ranks(self, mesh: DeviceMesh) -> None:
        """Make sums of numbers those over all ranks; of the mean of rows, this rank's part is left."""
        largest_t = self.lse_t.clone()
        dist.all_reduce(largest_t, op=dist.ReduceOp.MAX, group=mesh.get_group())
        sums_3t = torch.stack(((self.lse_t - largest_t).exp_(), self.label_t, self.total_t))
        dist.all_reduce(sums_3t, group=mesh.get_group())
        before_t, self.lse_t = self.lse_t, largest_t + sums_3t[0].log()
        self.label_t, self.total_t = sums_3t[1], sums_3t[2]
        if self._with_gradient:
            self.mean_tD *= (before_t - self.lse_t).exp_().unsqueeze(-1)


def _within(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Ids [T, 1], 0 for those outside of `range(size)`; and which are within."""
    is_within = (ids >= 0) & (ids < size)
    return ids.masked_fill(~is_within, 0).unsqueeze(-1), is_within.unsqueeze(-1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide_product(p_tv: Tensor, rows_vD: Tensor) -> Tensor:
    """Product [t, D], made in the dtype of the rows and given in that of `p`; not rounded in between if possible."""
    narrow_tv = p_tv.to(rows_vD.dtype)
    if p_tv.dtype == rows_vD.dtype or p_tv.device.type in ("cpu", "meta"):
        return (narrow_tv @ rows_vD).to(p_tv.dtype)  # these devices have no product with an output of another dtype
    return torch.mm(narrow_tv, rows_vD, out_dtype=p_tv.dtype)
