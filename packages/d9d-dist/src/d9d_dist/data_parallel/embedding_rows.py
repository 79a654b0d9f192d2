"""Embeddings with `max_norm` or `scale_grad_by_freq`, computed over the ids of all data-parallel ranks.

`max_norm` writes to the rows that are looked up; `scale_grad_by_freq` divides gradients by the number of lookups. Each
rank has only a part of the batch, so the lookups of all ranks are counted. Layers keep their own `forward`; only its
call of `F.embedding` or `F.embedding_bag` is replaced.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from d9d_dist.values._model_tensors import canonical_name


def writes_to_rows(module: nn.Module) -> bool:
    """Return True for embeddings with `max_norm`: forward writes to the weight, which must therefore not be sharded."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None


def synchronize_embeddings(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Make embeddings with `max_norm` or `scale_grad_by_freq` count the lookups of all ranks of a group, in place.

    Call it before parallelization, with the ranks that split a batch: `ctx.group_for("batch", "dp", "cp")`. Weights
    with `max_norm` must be replicated, as by `parallelize_hsdp` and `parallelize_replicate`: forward makes equal writes
    on all ranks. Each layer's class becomes a subclass. Returns the names of the layers.

    Collective in training mode, and in eval mode while gradients are enabled: for each layer an all-reduce of one
    integer per row. Synchronizes host and accelerator.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if writes_to_rows(module) or (is_embedding and module.scale_grad_by_freq):
            module.__class__ = _synchronized(type(module), group)
            found.append(canonical_name(name))
    return found


def _synchronized(kind: Any, group: dist.ProcessGroup) -> type[nn.Module]:
    """Return a subclass that counts a group's lookups. The class holds the group, so layers can be copied."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and not self.training:
            return kind.forward(self, *args, **kwargs)
        with _SynchronizedMode(group):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": torch.compiler.disable(forward), "__module__": kind.__module__})


class _SynchronizedMode(TorchFunctionMode):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.embedding:
            return self._embedding(*args, **(kwargs or {}))
        if func is F.embedding_bag:
            return self._embedding_bag(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _embedding(  # noqa: PLR0917  (torch's arguments)
        self,
        ids: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        counts = self._counts(ids, weight)
        if max_norm is not None:
            _clip_rows(weight, counts, max_norm, norm_type)
        rows = F.embedding(ids, weight, padding_idx, sparse=sparse)
        if scale_grad_by_freq and rows.requires_grad:
            rows.register_hook(lambda gradient: gradient / counts[ids].unsqueeze(-1))
        return rows

    def _embedding_bag(  # noqa: PLR0917  (torch's arguments)
        self,
        ids: Tensor,
        weight: Tensor,
        offsets: Tensor | None = None,
        max_norm: float | None = None,
        norm_type: float = 2,
        scale_grad_by_freq: bool = False,
        *others: Any,
        **options: Any,
    ) -> Tensor:
        counts = self._counts(ids, weight)
        if max_norm is not None:
            _clip_rows(weight, counts, max_norm, norm_type)
        if scale_grad_by_freq and weight.requires_grad:
            weight = weight.view_as(weight)
            # Rows without lookups have zero gradients.
            weight.register_hook(lambda gradient: gradient / counts.clamp(min=1).unsqueeze(-1))
        return F.embedding_bag(ids, weight, offsets, None, norm_type, False, *others, **options)

    def _counts(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the number of lookups of each row by all ranks."""
        counts = torch.bincount(ids.flatten(), minlength=len(weight))
        dist.all_reduce(counts, group=self._group)
        return counts


def _clip_rows(weight: Tensor, counts: Tensor, max_norm: float, norm_type: float) -> None:
    # `.data`: autograd rejects in-place writes to views from custom functions, such as replicated parameters.
    torch.embedding_renorm_(weight.data, counts.nonzero().flatten(), max_norm, norm_type)
