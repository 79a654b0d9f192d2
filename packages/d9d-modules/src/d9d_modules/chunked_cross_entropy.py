"""Fused linear cross entropy: computes losses from hidden states without materializing all logits.

Only one tile of logits is in memory at a time; all logits would be the largest tensor of a training step.

Forward iterates over tiles of tokens and, for each tile, over blocks of the vocabulary. Forward keeps a running
log-sum-exp and the running mean of the weight rows under the softmax. That mean, minus the row of the label, is the
gradient of the hidden states. The algorithm is attention with the weight rows as keys and values: "FlashAttention",
arXiv:2205.14135, algorithm 1.

Backward iterates over blocks of the vocabulary, recomputes their logits, and computes the gradient of the block's rows
over all tokens. The gradient of the hidden states comes from forward, for an upstream gradient of 1 per loss; backward
only scales it. Therefore the two gradients can be computed at different times (split backward).

Gradients are accumulated in float32 (float64 for float64 input). No buffer of the size of the weight is saved between
forward and backward. The cost is 8 T D V floating-point operations: 2 T D V more than with materialized logits, because
the logits are recomputed. "Cut Your Losses", arXiv:2411.09009, avoids materialized logits with kernels of its own.

Shape legend: T tokens (t in a tile), D hidden size, V vocabulary (v in a block). lse: log-sum-exp of the logits.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_dist.errors import UserError
from d9d_dist.gradients.first_derivative import first_derivative_only
from d9d_dist.planned_device import each_block, is_on_host
from d9d_dist.split_backward import WeightGradHandle, defer_weight_grad
from d9d_dist.token_ids import check_token_ids
from d9d_modules.cross_entropy import IGNORED_LABEL, PLAIN_CROSS_ENTROPY, CrossEntropy


class TileSize(NamedTuple):
    """Size of a tile: number of logits, and number of tokens in the forward pass."""

    logits: int
    tokens: int


HOST_TILE = TileSize(logits=2**22, tokens=2**10)
"""A tile of 16 MiB in float32, near the size of a processor's caches."""

DEVICE_TILE = TileSize(logits=2**26, tokens=2**11)
"""A tile of 256 MiB in float32. Smaller tiles cost an accelerator more kernel launches and passes over the means."""


def linear_cross_entropy(
    hidden_TD: Tensor,
    weights_VD: Sequence[Tensor],
    labels_T: Tensor,
    *,
    loss: CrossEntropy = PLAIN_CROSS_ENTROPY,
    softcap: float | None = None,
) -> Tensor:
    """Compute the losses [T] of the logits `hidden @ concat(weights).T`, in nats; 0 for ignored labels.

    The weight rows [V_i, D] have the dtype of the hidden states [T, D]; the losses are float32, or float64 for float64
    input. Labels [T] are int64: within the vocabulary or `IGNORED_LABEL`. `softcap` as in `language_model_head`.

    If `loss.mesh` is set, the weights are this rank's vocabulary shard and the labels are global token ids. The
    gradient of the hidden states is then this rank's partial sum. Forward issues two all-reduces per 1,024 tokens
    (2,048 on accelerators), of one and three values per token; backward issues none.

    Raises:
        UserError: If the number of labels is not T, or a label on the CPU is out of range. On an accelerator a later
            operation raises for a label out of range, without a host-device synchronization.
    """
    check_labels(hidden_TD, weights_VD, labels_T, loss.mesh)
    if hidden_TD.is_meta:  # where FLOPs are counted: recomputed logits do not count
        logits_TV = torch.cat([F.linear(hidden_TD, weight_VD) for weight_VD in weights_VD], dim=-1)
        return logits_TV.to(wide_dtype(hidden_TD)).logsumexp(dim=-1)
    with_gradient = torch.is_grad_enabled() and hidden_TD.requires_grad
    taken = [defer_weight_grad(weight_VD, hidden_TD) for weight_VD in weights_VD]
    slots = tuple(slot for _, slot in taken)
    options = _Options(loss, softcap, with_gradient)
    losses_T: Tensor = _LinearCrossEntropy.apply(hidden_TD, labels_T, options, slots, *(weight for weight, _ in taken))
    return losses_T


def check_labels(hidden_TD: Tensor, weights_VD: Sequence[Tensor], labels_T: Tensor, mesh: DeviceMesh | None) -> None:
    """Raise a `UserError` if there is not one label [T] for each token, or a label is outside of the vocabulary.

    Also if the weights are a single tensor, whose rows would count as weights.
    """
    if isinstance(weights_VD, Tensor):
        raise UserError(
            f"got weights_VD as a tensor of shape {tuple(weights_VD.shape)}; expected a sequence of tensors [V_i, D]. "
            "Pass [weight]."
        )
    if labels_T.shape != hidden_TD.shape[:1]:
        raise UserError(
            f"got labels of shape {tuple(labels_T.shape)} for hidden states of shape {tuple(hidden_TD.shape)}; "
            f"expected {tuple(hidden_TD.shape[:1])}, one label for each token. Flatten both in the same way."
        )
    num_rows = sum(map(len, weights_VD))
    check_token_ids(labels_T, num_rows * (1 if mesh is None else mesh.size()), what="labels", ignored=IGNORED_LABEL)


def check_softcap(softcap: float | None) -> None:
    """Raise a `UserError` if a soft-cap is not above 0."""
    if softcap is not None and softcap <= 0.0:
        raise UserError(f"softcap = {softcap}; expected a number above 0, or None for no soft-cap.")


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
        slots: tuple[WeightGradHandle, ...],
        *weights_VD: Tensor,
    ) -> Tensor:
        vocabulary = VocabularyBlocks(weights_VD, options.loss, options.softcap)
        num_tokens = tile_size(hidden_TD).tokens
        losses_T, lse_T = (labels_T.new_empty(labels_T.shape, dtype=wide_dtype(hidden_TD)) for _ in range(2))
        unit_TD = torch.empty_like(hidden_TD if options.with_gradient else hidden_TD[:0])
        for tile in each_block(len(labels_T), num_tokens):
            results = _forward_tile(hidden_TD[tile], labels_T[tile], vocabulary, with_gradient=options.with_gradient)
            losses_T[tile], lse_T[tile], unit_TD[tile] = results
            del results
        ctx.save_for_backward(hidden_TD, labels_T, lse_T, unit_TD, *weights_VD)
        ctx.options, ctx.slots = options, slots
        return losses_T

    @staticmethod
    @first_derivative_only("the losses of a language-model head")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, labels_T, lse_T, unit_TD, *weights_VD = ctx.saved_tensors
        scale_T = gradients[0].masked_fill(labels_T == IGNORED_LABEL, 0.0)
        grad_hidden_TD = None
        if ctx.options.with_gradient:
            grad_hidden_TD = torch.mul(unit_TD, scale_T.unsqueeze(-1), out=torch.empty_like(unit_TD))
        vocabulary = VocabularyBlocks(weights_VD, ctx.options.loss, ctx.options.softcap)
        weight_gradient = partial(
            _weight_gradient, vocabulary, hidden_TD=hidden_TD, labels_T=labels_T, lse_T=lse_T, scale_T=scale_T
        )
        grad_weights_VD = (slot.give(partial(weight_gradient, index)) for index, slot in enumerate(ctx.slots))
        return grad_hidden_TD, None, None, None, *grad_weights_VD


def _forward_tile(
    hidden_tD: Tensor, labels_t: Tensor, vocabulary: "VocabularyBlocks", *, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, log-sum-exps, and the gradient [t, D] of the hidden states for an upstream gradient of 1."""
    loss, smoothing = vocabulary.loss, vocabulary.loss.label_smoothing
    sums = _SoftmaxSums(hidden_tD, with_gradient=with_gradient, with_totals=smoothing > 0.0)
    for index in range(len(vocabulary.weights_VD)):
        for first, rows_vD, _ in vocabulary.blocks(index, num_tokens=len(labels_t)):
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
    return losses_t, lse_t, unit_tD


def _weight_gradient(
    vocabulary: "VocabularyBlocks", index: int, *, hidden_TD: Tensor, labels_T: Tensor, lse_T: Tensor, scale_T: Tensor
) -> Tensor:
    """Compute the gradient [V_i, D] of the weight at `index`, given the gradient `scale_T` of the losses."""
    loss, smoothing = vocabulary.loss, vocabulary.loss.label_smoothing
    softmax_scale_T1 = (scale_T * (1.0 + 2.0 * loss.z_loss * lse_T)).unsqueeze(-1)
    gradient_VD = torch.empty_like(vocabulary.weights_VD[index])
    for first, rows_vD, rows in vocabulary.blocks(index, num_tokens=len(labels_T)):
        x_Tv = vocabulary.logits(hidden_TD, rows_vD)
        slope_Tv = vocabulary.slope(x_Tv)
        grad_Tv = x_Tv.sub_(lse_T.unsqueeze(-1)).exp_().mul_(softmax_scale_T1)
        own_T1, is_own_T1 = ids_within(labels_T - first, len(rows_vD))
        grad_Tv.scatter_add_(-1, own_T1, (smoothing - 1.0) * scale_T.unsqueeze(-1) * is_own_T1)
        if smoothing:
            grad_Tv -= smoothing / vocabulary.size * scale_T.unsqueeze(-1)
        if slope_Tv is not None:
            grad_Tv *= slope_Tv
        torch.mm(grad_Tv.to(hidden_TD.dtype).T, hidden_TD, out=gradient_VD[rows])
    return gradient_VD


@final
class VocabularyBlocks:
    """Vocabulary rows of this rank and the computation of their logits; `size` is the number of rows of all ranks."""

    def __init__(self, weights_VD: Sequence[Tensor], loss: CrossEntropy, softcap: float | None) -> None:
        rank, num_ranks = (0, 1) if loss.mesh is None else (loss.mesh.get_local_rank(), loss.mesh.size())
        check_softcap(softcap)
        sizes = [len(weight_VD) for weight_VD in weights_VD]
        self.weights_VD, self.loss, self._softcap = weights_VD, loss, softcap
        self._firsts = list(accumulate(sizes[:-1], initial=rank * sum(sizes)))
        self.size = num_ranks * sum(sizes)

    def blocks(self, index: int, *, num_tokens: int) -> Iterator[tuple[int, Tensor, slice]]:
        """Yield blocks of one weight: the first token id, the rows, and their slice; each gives one tile of logits."""
        weight_VD = self.weights_VD[index]
        size = max(1, tile_size(weight_VD).logits // max(1, num_tokens))
        for rows in each_block(len(weight_VD), size):
            yield self._firsts[index] + rows.start, weight_VD[rows], rows

    def logits(self, hidden_TD: Tensor, rows_vD: Tensor) -> Tensor:
        """Compute logits [T, v] after the soft-cap, in at least float32."""
        x_Tv = F.linear(hidden_TD, rows_vD).to(wide_dtype(hidden_TD))
        return x_Tv if self._softcap is None else x_Tv.div_(self._softcap).tanh_().mul_(self._softcap)

    def slope(self, x: Tensor) -> Tensor | None:
        """Return the derivative of the soft-cap for capped logits `x`; None without a soft-cap (derivative 1)."""
        return None if self._softcap is None else 1.0 - (x / self._softcap).square()

    def label_rows(self, labels_T: Tensor) -> Tensor:
        """Return the weight row of each label [T, D]; zeros for labels in another rank's shard."""
        rows_TD = torch.zeros_like(self.weights_VD[0][:1])
        for first, weight_VD in zip(self._firsts, self.weights_VD, strict=True):
            own_T1, is_own_T1 = ids_within(labels_T - first, len(weight_VD))
            rows_TD = torch.where(is_own_T1, F.embedding(own_T1.squeeze(-1), weight_VD), rows_TD)
        return rows_TD


@final
class _SoftmaxSums:
    """Running sums over the vocabulary blocks for each token of a tile.

    Attributes:
        lse_t: Log-sum-exp of the logits.
        label_t: Logit of the label; 0 until the label's block is added.
        total_t: Sum of the logits; 0 unless `with_totals`.
        mean_tD: Mean of the weight rows under the softmax, each row multiplied by the soft-cap's derivative.
        total_tD: Sum of the weight rows, each multiplied by the soft-cap's derivative; [1, D] without a soft-cap, 0
            unless `with_totals`.
    """

    def __init__(self, hidden_tD: Tensor, *, with_gradient: bool, with_totals: bool) -> None:
        self._hidden_tD, self._with_gradient, self._with_totals = hidden_tD, with_gradient, with_totals
        self.lse_t = hidden_tD.new_full((len(hidden_tD),), -torch.inf, dtype=wide_dtype(hidden_tD))
        self.label_t, self.total_t = torch.zeros_like(self.lse_t), torch.zeros_like(self.lse_t)
        self.mean_tD = torch.zeros_like(hidden_tD if with_gradient else hidden_tD[:0], dtype=self.lse_t.dtype)
        self.total_tD = torch.zeros_like(hidden_tD[:1], dtype=self.lse_t.dtype)

    def add(self, vocabulary: VocabularyBlocks, rows_vD: Tensor, labels_t: Tensor) -> None:
        """Add a block of rows; `labels_t` are relative to the block's first token id."""
        x_tv = vocabulary.logits(self._hidden_tD, rows_vD)
        own_t1, is_own_t1 = ids_within(labels_t, len(rows_vD))
        self.label_t += (x_tv.gather(-1, own_t1) * is_own_t1).squeeze(-1)
        if self._with_totals:
            self.total_t += x_tv.sum(dim=-1)
        p_tv = x_tv.softmax(dim=-1)
        # lse = x - log p holds for every logit. The largest p is at least 1 / v, so its logarithm is exact to rounding.
        block_lse_t = x_tv.amax(dim=-1) - p_tv.amax(dim=-1).log_()
        before_t, self.lse_t = self.lse_t, torch.logaddexp(self.lse_t, block_lse_t)
        if self._with_gradient:
            self.mean_tD *= (before_t - self.lse_t).exp_().unsqueeze(-1)
            self._add_rows(rows_vD, p_tv, vocabulary.slope(x_tv), (block_lse_t - self.lse_t).exp_())

    def _add_rows(self, rows_vD: Tensor, p_tv: Tensor, slope_tv: Tensor | None, share_t: Tensor) -> None:
        """Add the block's mean row, weighted by `share_t`, the block's share of the softmax mass so far."""
        if slope_tv is not None:
            p_tv *= slope_tv
        self.mean_tD.addcmul_(_wide_product(p_tv, rows_vD), share_t.unsqueeze(-1))
        if self._with_totals:
            sum_D = rows_vD.sum(dim=0, dtype=p_tv.dtype) if slope_tv is None else _wide_product(slope_tv, rows_vD)
            self.total_tD = self.total_tD + sum_D

    def add_over_ranks(self, mesh: DeviceMesh) -> None:
        """All-reduce the scalar sums over the ranks; rescale `mean_tD`, which stays this rank's partial sum."""
        largest_t = self.lse_t.clone()
        dist.all_reduce(largest_t, op=dist.ReduceOp.MAX, group=mesh.get_group())
        sums_3t = torch.stack(((self.lse_t - largest_t).exp_(), self.label_t, self.total_t))
        dist.all_reduce(sums_3t, group=mesh.get_group())
        before_t, self.lse_t = self.lse_t, largest_t + sums_3t[0].log()
        self.label_t, self.total_t = sums_3t[1], sums_3t[2]
        if self._with_gradient:
            self.mean_tD *= (before_t - self.lse_t).exp_().unsqueeze(-1)


def tile_size(x: Tensor) -> TileSize:
    """Return the tile size for the device of a tensor."""
    return HOST_TILE if is_on_host(x) else DEVICE_TILE


def ids_within(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return `ids` as [T, 1], with 0 for ids outside `range(size)`, and a mask [T, 1] of the ids inside."""
    is_within = (ids >= 0) & (ids < size)
    return ids.masked_fill(~is_within, 0).unsqueeze(-1), is_within.unsqueeze(-1)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over the vocabulary: float32, or float64 for float64 input."""
    return torch.promote_types(x.dtype, torch.float32)


def _wide_product(p_tv: Tensor, rows_vD: Tensor) -> Tensor:
    """Multiply in the dtype of the rows; return [t, D] in the dtype of `p_tv`. Accelerators do not round in between."""
    narrow_tv = p_tv.to(rows_vD.dtype)
    if p_tv.dtype == rows_vD.dtype or p_tv.device.type in ("cpu", "meta"):
        return (narrow_tv @ rows_vD).to(p_tv.dtype)  # torch.mm has no out_dtype on these devices
    return torch.mm(narrow_tv, rows_vD, out_dtype=p_tv.dtype)
