"""Protocol of attention functions, and an implementation by torch's fused kernels.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from d9d_dist.context_parallel.blocks import has_flash_kernel
from d9d_dist.context_parallel.prefix_attention import prefix_attention


class Attention(Protocol):
    """Causal softmax attention with the scale 1/sqrt(K).

    A function, not a module, so that it can be replaced in a model after construction.
    """

    def __call__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
        """Compute attention of each query to its own and all earlier positions.

        Args:
            q_BLHK: Queries [B, L, H, K] of the *last* L of the S positions.
            k_BSGK: Keys [B, S, G, K]; each serves H / G query heads (grouped-query attention, arXiv:2305.13245).
            v_BSGK: Values [B, S, G, K].
            documents_BS: Document ids [B, S], integers, of packed sequences: a position attends only within its
                document. `None`: each row is one document.

        Returns:
            The attention output [B, L, H, K], in the dtype of the queries.
        """
        ...


@runtime_checkable
class DeclaresStandardSdpa(Protocol):
    """`Attention` with a flag `is_standard_sdpa`, which is True if it computes the same as `sdpa_attention`.

    Other kernels may replace such a function.
    """

    @property
    def is_standard_sdpa(self) -> bool: ...  # noqa: D102  (see the class)


@runtime_checkable
class DeclaresCausality(Protocol):
    """`Attention` with a flag `is_causal`, which is False if queries may attend to later positions.

    Functions without the flag are causal.
    """

    @property
    def is_causal(self) -> bool: ...  # noqa: D102  (see the class)


@runtime_checkable
class DeclaresWindow(Protocol):
    """`Attention` with the size of its sliding window, including the query's own position; `None` for no limit."""

    @property
    def window(self) -> int | None: ...  # noqa: D102  (see the class)


@runtime_checkable
class AttentionOfHeads(Protocol):
    """`Attention` with parameters per query head, such as sinks."""

    def of_heads(self, heads: slice) -> Attention:
        """Return the attention function for some query heads. `AllToAllAttention` calls it for this rank's heads."""
        ...


def is_standard_sdpa(attention: Attention) -> bool:
    """Return True for `sdpa_attention` and for functions that declare to compute the same (`DeclaresStandardSdpa`)."""
    return attention is sdpa_attention or (isinstance(attention, DeclaresStandardSdpa) and attention.is_standard_sdpa)


def sdpa_attention(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
    """Compute `Attention` by `torch.nn.functional.scaled_dot_product_attention`. No collectives.

    For L = S without documents, this is one causal call without a mask tensor. For L < S, two blocks of torch's flash
    kernel are merged. A mask tensor is built only for packed documents, and for L < S if the flash kernel does not
    support the dtype or head dim.
    """
    length, key_length = q_BLHK.shape[1], k_BSGK.shape[1]
    q_BHLK, k_BGSK, v_BGSK = q_BLHK.transpose(1, 2), k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2)
    if q_BLHK.numel() == 0:
        # torch's flash kernel for CPUs divides by the length, so an empty row would crash the process.
        with sdpa_kernel(SDPBackend.MATH):
            out_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BGSK, v_BGSK, enable_gqa=True)
    elif documents_BS is None and length == key_length:
        out_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=True)
    elif documents_BS is None and has_flash_kernel(q_BLHK):
        # torch's own causal_lower_right fails under dispatch modes, which selective checkpointing uses.
        out_BHLK = prefix_attention(q_BHLK, k_BGSK, v_BGSK)
    else:
        mask = _mask(length, key_length, documents_BS, device=q_BLHK.device)
        out_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BGSK, v_BGSK, attn_mask=mask, enable_gqa=True)
    return out_BHLK.transpose(1, 2)


def _mask(length: int, key_length: int, documents_BS: Tensor | None, *, device: torch.device) -> Tensor:
    """Return the attention mask [L, S], or [B, 1, L, S] with documents: causal, within the same document."""
    before = key_length - length
    causal_LS = torch.ones(length, key_length, dtype=torch.bool, device=device).tril(before)
    if documents_BS is None:
        return causal_LS
    same_BLS = documents_BS[:, before:, None] == documents_BS[:, None, :]
    return (same_BLS & causal_LS).unsqueeze(1)
