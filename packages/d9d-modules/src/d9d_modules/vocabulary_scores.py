"""Log-probability of each label and entropy of each prediction, without materializing all logits.

Both are sums over the vocabulary. They are computed block by block: two parts of a vocabulary with log-sum-exps `a` and
`b` and entropies `g` and `h` have the log-sum-exp `c = log(e^a + e^b)` and the entropy
`e^(a-c) (g + c - a) + e^(b-c) (h + c - b)`, a sum of non-negative terms.

Shape legend: T tokens (t in a tile), D hidden size, V vocabulary (v in a block). lse: log-sum-exp of the logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_modules import chunked_cross_entropy as tiles
from d9d_modules.cross_entropy import IGNORED_LABEL, CrossEntropy


class TokenScores(NamedTuple):
    """Token scores in float32 or float64, with the shape of the labels; 0 for ignored labels.

    Attributes:
        log_probs: Log-probability of the label, in nats.
        entropy: Entropy of the predicted distribution, in nats.
    """

    log_probs: Tensor
    entropy: Tensor


@torch.no_grad()
def token_scores(
    hidden_TD: Tensor,
    weights_VD: Sequence[Tensor],
    labels_T: Tensor,
    *,
    softcap: float | None = None,
    mesh: DeviceMesh | None = None,
) -> TokenScores:
    """Compute log-probabilities and entropies [T] of the logits `hidden @ concat(weights).T`, without gradients.

    Arguments and errors as in `linear_cross_entropy`. With a mesh, the weights are this rank's vocabulary shard, and
    the function issues two all-reduces per 1,024 tokens (2,048 on accelerators), of one and three values per token.
    """
    tiles.check_labels(hidden_TD, weights_VD, labels_T, mesh)
    vocabulary = tiles.VocabularyBlocks(weights_VD, CrossEntropy(mesh=mesh), softcap)
    size = tiles.tile_size(hidden_TD).tokens
    found = [
        _score_tile(hidden_tD, labels_t, vocabulary, mesh)
        for hidden_tD, labels_t in zip(hidden_TD.split(size), labels_T.split(size), strict=True)
    ]
    return TokenScores(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _score_tile(
    hidden_tD: Tensor, labels_t: Tensor, vocabulary: tiles.VocabularyBlocks, mesh: DeviceMesh | None
) -> tuple[Tensor, Tensor]:
    label_t = torch.zeros(len(labels_t), dtype=tiles.wide_dtype(hidden_tD), device=hidden_tD.device)
    lse_t = entropy_t = None
    for index in range(len(vocabulary.weights_VD)):
        for first, rows_vD, _ in vocabulary.blocks(index, num_tokens=len(labels_t)):
            x_tv = vocabulary.logits(hidden_tD, rows_vD)
            own_t1, is_own_t1 = tiles.ids_within(labels_t - first, len(rows_vD))
            label_t += (x_tv.gather(-1, own_t1) * is_own_t1).squeeze(-1)
            log_p_tv = x_tv.log_softmax(dim=-1)
            block_lse_t = x_tv.amax(dim=-1) - log_p_tv.amax(dim=-1)
            # A probability of 0 must contribute 0 to the entropy. Without the clamp, the product would be NaN.
            log_p_tv.clamp_(min=torch.finfo(log_p_tv.dtype).min)
            block_entropy_t = -(log_p_tv.exp() * log_p_tv).sum(dim=-1)
            if lse_t is None or entropy_t is None:
                lse_t, entropy_t = block_lse_t, block_entropy_t
            else:
                both_t = torch.logaddexp(lse_t, block_lse_t)
                entropy_t = _weighted(entropy_t, lse_t - both_t) + _weighted(block_entropy_t, block_lse_t - both_t)
                lse_t = both_t
    assert lse_t is not None, "a vocabulary has at least one block"
    assert entropy_t is not None, "a vocabulary has at least one block"
    if mesh is not None:
        largest_t = lse_t.clone()
        dist.all_reduce(largest_t, op=dist.ReduceOp.MAX, group=mesh.get_group())
        share_t = lse_t - largest_t
        sums_3t = torch.stack((share_t.exp(), _weighted(entropy_t, share_t), label_t))
        dist.all_reduce(sums_3t, group=mesh.get_group())
        log_total_t = sums_3t[0].log()
        lse_t, label_t = largest_t + log_total_t, sums_3t[2]
        entropy_t = sums_3t[1] / sums_3t[0] + log_total_t
    is_ignored_t = labels_t == IGNORED_LABEL
    return (label_t - lse_t).masked_fill(is_ignored_t, 0.0), entropy_t.masked_fill(is_ignored_t, 0.0)


def _weighted(entropy_t: Tensor, log_share_t: Tensor) -> Tensor:
    """Return the contribution of a vocabulary part to the total entropy, given the part's entropy and log share."""
    return log_share_t.exp() * (entropy_t - log_share_t)
