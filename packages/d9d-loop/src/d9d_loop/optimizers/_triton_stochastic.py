"""Triton kernel of an AdamW step with stochastic rounding, which reads and writes each value once.

Arithmetic is in float32. bfloat16 values are loaded and stored as the upper 16 bits of a float32. The random bits equal
those of `random_bits_at`.
"""

# Kernel arguments are pointers and numbers without Python types, passed by position.
# ruff: noqa: ANN001, ANN202, PLR0917

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from d9d_loop.optimizers._adamw_numbers import AdamWNumbers
from d9d_loop.optimizers.index_rule import IndexRule

_BLOCK = 1024
"""Number of elements per Triton program."""


class _Kernel(Protocol):
    """Function decorated with `triton.jit`, whose own type does not describe how a kernel is launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return a function that launches one program per point of the grid."""
        ...


def _jit(*, varying: tuple[str, ...]) -> Callable[[Callable[..., Any]], _Kernel]:
    """Return a `triton.jit` decorator that does not specialize the kernel on the arguments in `varying`.

    Otherwise, arguments that change from step to step cause recompilation for special values such as 1.
    """

    def decorate(kernel: Callable[..., Any]) -> _Kernel:
        launchable: _Kernel = triton.jit(do_not_specialize=varying)(kernel)
        return launchable

    return decorate


def _inlined(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a device function that kernels can call."""
    callable_by_kernels: Callable[..., Any] = triton.jit(kernel)
    return callable_by_kernels


def adamw(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    numbers: AdamWNumbers,
    key: int,
    rule: IndexRule,
    gate: Tensor | None = None,
) -> None:
    """Run one AdamW step in place, unless `gate`, 0-dim, is 1. All other tensors are contiguous and of shape [N].

    The weights `w` and the average `m` of the gradients `g` are float32 or bfloat16. The average `v` of the squared
    gradients has the dtype of `m`.
    """
    size = w.numel()
    _adamw_kernel[-(-size // _BLOCK),](
        _storage(w),
        g,
        _storage(m),
        _storage(v),
        g if gate is None else gate,
        1.0 - numbers.lr * numbers.weight_decay,
        numbers.step_size,
        1.0 - numbers.beta1,
        numbers.beta2,
        1.0 - numbers.beta2,
        1.0 / numbers.square_correction,
        numbers.eps,
        key,
        *rule,
        size,
        RUNS=_runs(rule, size),
        GATED=gate is not None,
        ROUND_W=w.dtype == torch.bfloat16,
        ROUND_AVERAGES=m.dtype == torch.bfloat16,
        BLOCK=_BLOCK,
    )


def _runs(rule: IndexRule, size: int) -> int:
    """Return the number of runs (see `IndexRule`) that the elements of a program can touch; 3 stands for 3 or more."""
    if rule.run >= size:
        return 1
    return 2 if rule.run >= _BLOCK else 3


def _storage(x: Tensor) -> Tensor:
    """Return a bfloat16 tensor viewed as int16; other dtypes unchanged."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


@_inlined
def _random_bits(start, key, offset, run, stride, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    """Return 64 random bits for each element from `start` on: a function of the key and the element's global index."""
    i = tl.arange(0, BLOCK)
    index = offset + start + i
    if RUNS > 1:
        # One 64-bit division per program; a vector of them would take longer than the rest of the kernel.
        column = start % run + i
        carry = (column >= run).to(tl.int64)
        if RUNS > 2:
            carry = (column.to(tl.int32) // run.to(tl.int32)).to(tl.int64)  # a run is shorter than BLOCK here
        index = offset + (start // run + carry) * stride + column - carry * run
    bits = index.to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@_inlined
def _rounded(values, bits, NUMBER: tl.constexpr):
    """Add noise to the lower 16 bits of float32 values, and return the upper 16 bits. NaN and infinity are kept."""
    noise = ((bits >> (16 * NUMBER)) & 0xFFFF).to(tl.int32)
    exact = values.to(tl.int32, bitcast=True)
    is_finite = (exact & 0x7F800000) != 0x7F800000
    is_nan = (exact & 0x7FFFFFFF) > 0x7F800000
    kept = tl.where(is_nan, exact | 0x400000, exact)  # sets a mantissa bit that truncation keeps
    return (tl.where(is_finite, exact + noise, kept) >> 16).to(tl.int16)


@_inlined
def _load(ptr, i, mask, IS_BITS: tl.constexpr):
    """Load values as float32, from floating-point numbers or, with `IS_BITS`, from bfloat16 bits stored as int16."""
    values = tl.load(ptr + i, mask=mask, other=0)
    if IS_BITS:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@_inlined
def _store(ptr, i, values, bits, mask, NUMBER: tl.constexpr, ROUND: tl.constexpr):
    if ROUND:
        tl.store(ptr + i, _rounded(values, bits, NUMBER), mask=mask)
    else:
        tl.store(ptr + i, values, mask=mask)


@_jit(varying=("decay", "step_size", "key", "offset", "run", "stride"))
def _adamw_kernel(
    w_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    gate_ptr,
    decay,
    step_size,
    share1,
    beta2,
    share2,
    square_correction,
    eps,
    key,
    offset,
    run,
    stride,
    size,
    RUNS: tl.constexpr,
    GATED: tl.constexpr,
    ROUND_W: tl.constexpr,
    ROUND_AVERAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A 32-bit offset would overflow beyond 2^31 elements.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    mask = i < size
    if GATED:
        mask = tl.where(tl.load(gate_ptr) > 0, i < 0, mask)
    w, g = _load(w_ptr, i, mask, ROUND_W), tl.load(g_ptr + i, mask=mask, other=0.0).to(tl.float32)
    m, v = _load(m_ptr, i, mask, ROUND_AVERAGES), _load(v_ptr, i, mask, ROUND_AVERAGES)
    m += share1 * (g - m)
    v = beta2 * v + share2 * g * g
    w = decay * w - step_size * m / (tl.sqrt(v) * square_correction + eps)
    bits = _random_bits(start, key, offset, run, stride, RUNS, BLOCK)
    _store(w_ptr, i, w, bits, mask, 0, ROUND_W)
    _store(m_ptr, i, m, bits, mask, 1, ROUND_AVERAGES)
    _store(v_ptr, i, v, bits, mask, 2, ROUND_AVERAGES)
