"""Caches of token mixers: tensors of the previous positions, so that a forward pass computes only new positions.

Shape legend: B batch, L new positions, S previous and new positions.
"""

from collections.abc import Sequence
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from d9d_dist import Attention
from d9d_dist.context_parallel.all_gather import AllGatherAttention
from d9d_dist.context_parallel.all_to_all import AllToAllAttention
from d9d_dist.context_parallel.attention import DeclaresCausality, DeclaresWindow
from d9d_dist.context_parallel.ring import RingAttention


class MixerCache(Protocol):
    """Cache of one token mixer.

    Attributes:
        num_new: Number of positions of the next forward pass to keep. Later positions of that pass are padding.
    """

    num_new: int


@runtime_checkable
class SupportsCache(Protocol):
    """Token mixer that can continue rows from a cache."""

    def why_no_cache(self) -> str | None:
        """Return the reason why the mixer, as configured, cannot use a cache; it follows the mixer's name in errors."""
        ...

    def start_cache(self, capacity: int) -> MixerCache:
        """Attach an empty cache for rows of at most `capacity` positions. Forward passes then continue its rows."""
        ...

    def drop_cache(self) -> None:
        """Detach the cache. Forward passes then compute whole rows again."""
        ...


@final
class PositionCache:
    """Tensors of all positions so far, such as keys and values of attention.

    Args:
        capacity: Largest number of positions. Memory for all of them is allocated by the first pass.
        window: Sliding-window size of the layer; older positions are not kept. None keeps all.
    """

    def __init__(self, capacity: int, *, window: int | None = None) -> None:
        self.num_new = 0
        self._capacity, self._window = capacity, window if window is not None and window < capacity else None
        self._length = 0
        self._kept: list[Tensor] = []

    def extend(self, document_ids_BL: Tensor | None, *tensors: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Append tensors [B, L, ...] of new positions; return document ids and tensors of S positions [B, S, ...].

        The S positions are the previous positions in the cache and the new ones. Either all calls pass document ids, or
        none does.
        """
        new = list(tensors) if document_ids_BL is None else [*tensors, document_ids_BL]
        whole = self._append(new) if self._window is None else self._slide(new, self._window)
        return (None, whole) if document_ids_BL is None else (whole[-1], whole[:-1])

    def _append(self, new: Sequence[Tensor]) -> list[Tensor]:
        end = self._length + new[0].shape[1]
        if not self._kept:
            capacity = max(self._capacity, end)
            self._kept = [x.new_empty(x.shape[0], capacity, *x.shape[2:]) for x in new]
        for kept, x in zip(self._kept, new, strict=True):
            kept[:, self._length : end] = x
        self._length += self.num_new
        return [kept[:, :end] for kept in self._kept]

    def _slide(self, new: Sequence[Tensor], window: int) -> list[Tensor]:
        whole = [torch.cat(pair, dim=1) for pair in zip(self._kept, new, strict=True)] if self._kept else list(new)
        end = whole[0].shape[1] - new[0].shape[1] + self.num_new
        # A copy: a view would keep the memory of all positions.
        self._kept = [x[:, max(end - window + 1, 0) : end].clone() for x in whole]
        return whole


@final
class RecurrentCache:
    """State of a recurrent mixer after the positions so far.

    Attributes:
        state: Recurrent state; None before the first pass.
    """

    def __init__(self, width: int) -> None:
        """Create an empty cache that keeps the last `width - 1` inputs of a causal convolution of this width."""
        self.num_new = 0
        self.state: Tensor | None = None
        self._inputs = PositionCache(width + 1, window=width)

    def extend_inputs(self, document_ids_BL: Tensor | None, *tensors: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Prepend the inputs of up to W - 1 previous positions to tensors [B, L, ...] of new inputs."""
        self._inputs.num_new = self.num_new
        return self._inputs.extend(document_ids_BL, *tensors)


class CachedAttention(nn.Module):
    """Base class of attention layers that can continue rows from a cache; see `SupportsCache`."""

    attention_function: Attention

    def __init__(self) -> None:
        super().__init__()
        self._cache: PositionCache | None = None

    def why_no_cache(self) -> str | None:
        """See `SupportsCache`."""
        function = self.attention_function
        if isinstance(function, AllGatherAttention | AllToAllAttention | RingAttention):
            return "is context parallel: no rank has all keys of a row"
        if isinstance(function, DeclaresCausality) and not function.is_causal:
            return "is bidirectional: outputs depend on later positions"
        return None

    def start_cache(self, capacity: int) -> PositionCache:
        """See `SupportsCache`."""
        function = self.attention_function
        window = function.window if isinstance(function, DeclaresWindow) else None
        self._cache = PositionCache(capacity, window=window)
        return self._cache

    def drop_cache(self) -> None:
        """See `SupportsCache`."""
        self._cache = None
