"""Attention with the optional FlashAttention packages, and with torch's variable-length attention.

Shape legend: B batch, L query length, S key length, H query heads, G key/value heads, K head dim, N documents.
"""

import inspect
import itertools
from abc import ABC, abstractmethod
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, NamedTuple, Unpack, final

import torch
from torch import Tensor

from d9d_dist.errors import UserError
from d9d_modules.attention_backends.backend import AttentionFeatures, AttentionOptions, AttentionRequest
from d9d_modules.attention_backends.visibility import document_runs
from d9d_modules.kernel_choice import compute_capability


class KernelBackend(ABC):
    """Base class of the backends below, whose kernels support packed documents on CUDA devices.

    Reading the document lengths synchronizes with the device, once per batch: all layers share the lengths. `is_fast`
    is therefore False for packed documents. Each document must be contiguous.
    """

    name: ClassVar[str]
    package: ClassVar[str | None] = None
    """Python package that provides the kernels; None for kernels of torch."""

    install: ClassVar[str] = ""
    has_sinks: ClassVar[bool] = False
    has_softcap: ClassVar[bool] = True
    oldest_capability: ClassVar[int] = 8
    largest_head_dim: ClassVar[int] = 256

    def __init__(self) -> None:
        self._is_installed = self.package is None or _is_installed(self.package)

    def rejection(self, request: AttentionRequest) -> str | None:
        """See `AttentionBackend`."""
        reasons = {
            f"is not installed: {self.install}": not self._is_installed,
            "has no softcap": request.options.softcap is not None and not self.has_softcap,
            "does not support sinks, because its log-sum-exp has no gradient": request.has_sinks and not self.has_sinks,
            "takes no mask": request.has_mask,
        }
        unsupported = (reason for reason, applies in reasons.items() if applies)
        return next(unsupported, None) or self._device_rejection(request)

    def _device_rejection(self, request: AttentionRequest) -> str | None:
        capability, size = compute_capability(request.device), self.largest_head_dim
        if capability is None:
            return f"does not support {request.device.type}"
        if request.dtype not in {torch.bfloat16, torch.float16}:
            return f"supports bfloat16 and float16, not {request.dtype}"
        if request.head_dim % 8 or request.head_dim > size:
            return f"needs a head dim that is a multiple of 8 and at most {size}, not {request.head_dim}"
        if capability[0] < self.oldest_capability:
            return f"needs a device of compute capability {self.oldest_capability}.0 or later, not {capability[0]}"
        return None

    def is_fast(self, request: AttentionRequest) -> bool:
        """See `AttentionBackend`."""
        return not request.has_documents

    @abstractmethod
    def attend(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **features: Unpack[AttentionFeatures]) -> Tensor:
        """See `AttentionBackend`."""


class FlashBackend(KernelBackend):
    """Base class of the backends with kernels of a FlashAttention package."""

    module: ClassVar[str]
    unlimited: ClassVar[int | None]
    """Window size of the kernels for no window."""

    def attend(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **features: Unpack[AttentionFeatures]) -> Tensor:
        """See `AttentionBackend`."""
        kernels: Any = import_module(self.module)
        options, documents_BS = features["options"], features["documents_BS"]
        settings = {
            "softmax_scale": options.scale,
            "causal": options.is_causal,
            "window_size": (self.unlimited, self.unlimited) if options.window is None else _window(options),
            "softcap": options.softcap or 0.0,
            # Not every release supports the option.
            **({"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}),
            **({"learnable_sink": features["sinks_H"]} if self.has_sinks else {}),
        }
        if documents_BS is None:
            out = kernels.flash_attn_func(q_BLHK, k_BSGK, v_BSGK, **settings)
        else:
            lengths = _lengths(documents_BS, q_BLHK.shape[1])
            out = kernels.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (q_BLHK, k_BSGK, v_BSGK)),
                cu_seqlens_q=lengths.query_ends,
                cu_seqlens_k=lengths.key_ends,
                max_seqlen_q=lengths.longest_query,
                max_seqlen_k=lengths.longest_key,
                **settings,
            )
        out_BLHK = out[0] if isinstance(out, tuple) else out
        return out_BLHK.view(q_BLHK.shape)


@final
class Flash2Backend(FlashBackend):
    """FlashAttention 2 (arXiv:2307.08691), package `flash-attn` 2.6 or later."""

    name, package, install = "flash2", "flash-attn", "pip install flash-attn --no-build-isolation"
    module, unlimited = "flash_attn", -1


@final
class Flash4Backend(FlashBackend):
    """FlashAttention 4 for Hopper and later GPUs, package `flash-attn-4`."""

    name, package, install = "flash4", "flash-attn-4", "pip install --pre flash-attn-4"
    module, unlimited = "flash_attn.cute", None
    has_sinks, oldest_capability, largest_head_dim = True, 9, 128


@final
class VarlenBackend(KernelBackend):
    """`torch.nn.attention.varlen`, part of torch: FlashAttention or cuDNN. Without documents each row is a sequence."""

    name = "varlen"
    has_softcap = False

    def attend(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **features: Unpack[AttentionFeatures]) -> Tensor:
        """See `AttentionBackend`."""
        attend: Any = import_module("torch.nn.attention.varlen").varlen_attn
        # Before torch 2.12, the function has no argument enable_gqa and always groups heads.
        grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(attend).parameters else {}
        options, documents_BS = features["options"], features["documents_BS"]
        unlimited = (-1, 0 if options.is_causal else -1)
        if documents_BS is None:
            lengths = _row_lengths(len(q_BLHK), q_BLHK.shape[1], k_BSGK.shape[1], q_BLHK.device)
        else:
            lengths = _lengths(documents_BS, q_BLHK.shape[1])
        return attend(
            *(x.flatten(0, 1) for x in (q_BLHK, k_BSGK, v_BSGK)),
            *lengths,
            scale=options.scale,
            window_size=unlimited if options.window is None else _window(options),
            **grouped,
        ).unflatten(0, q_BLHK.shape[:2])


def _window(options: AttentionOptions) -> tuple[int, int]:
    """Return the numbers of visible positions before and after a position."""
    assert options.window is not None
    return options.window - 1, 0 if options.is_causal else options.window - 1


def _is_installed(distribution: str) -> bool:
    # Check the metadata: both packages share the folder flash_attn, and importing them may require a GPU.
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


class _Lengths(NamedTuple):
    """Cumulative lengths of sequences [N + 1], int32, on the device, and the longest: the arguments of a kernel."""

    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int


def _lengths_of(query_ends: list[int], key_ends: list[int], device: torch.device) -> _Lengths:
    def copied(ends: list[int]) -> Tensor:
        # A copy from pageable memory would wait for the device.
        on_host = torch.tensor(ends, dtype=torch.int32, pin_memory=device.type != "cpu")
        return on_host.to(device, non_blocking=True)

    keys = copied(key_ends)
    # cuDNN requires the same tensor for queries and keys.
    queries = keys if query_ends == key_ends else copied(query_ends)
    longest = (max(end - start for start, end in itertools.pairwise(ends)) for ends in (query_ends, key_ends))
    return _Lengths(queries, keys, *longest)


@lru_cache(maxsize=8)
def _row_lengths(num_rows: int, length: int, key_length: int, device: torch.device) -> _Lengths:
    """Return the lengths of rows that are one sequence each."""
    return _lengths_of(*([size * row for row in range(num_rows + 1)] for size in (length, key_length)), device)


@lru_cache(maxsize=8)
def _lengths_of_batch(documents_BS: Tensor, length: int, *, version: int) -> _Lengths:
    """Return document lengths, cached so that all layers of a batch share them.

    The cache key is the tensor object and its version counter, which changes with each in-place operation.
    """
    return _lengths_of(*_cumulative_lengths(documents_BS, length), documents_BS.device)


def _lengths(documents_BS: Tensor, length: int) -> _Lengths:
    if documents_BS.is_inference():  # inference tensors have no version
        return _lengths_of(*_cumulative_lengths(documents_BS, length), documents_BS.device)
    return _lengths_of_batch(documents_BS, length, version=documents_BS._version)


def _cumulative_lengths(documents_BS: Tensor, length: int) -> tuple[list[int], list[int]]:
    """Return the cumulative document lengths [N + 1] over all rows, for the queries and for the keys."""
    runs = document_runs(documents_BS)
    if runs is None:
        raise UserError(
            "got a document id that reappears after another document in the same row; FlashAttention expects "
            "contiguous documents. Sort the positions by document, or use the backend flex, sdpa or eager."
        )
    before = documents_BS.shape[1] - length
    query_ends, key_ends = [0], [0]
    for lengths in runs:
        for end, size in zip(itertools.accumulate(lengths), lengths, strict=True):
            key_ends.append(key_ends[-1] + size)
            query_ends.append(query_ends[-1] + min(size, max(end - before, 0)))
    return query_ends, key_ends
