"""Weighted permutations against plain indexing. Kernels run on an accelerator, or in Triton's interpreter.

Triton selects the interpreter at import, so a separate process runs the tests of this file.
"""

import math
import os

import pytest
import torch
from torch import Tensor

from d9d_dist.testing import run_tests_interpreted
from d9d_moe import permute
from d9d_moe.permute import combine_rows, inverse_permutation, sum_rows, take_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHAPES = [(4, 1, 16, 4), (0, 2, 5, 0), (3, 4, 2100, 12), (5, 3, 7, 9), (4, 2, 5, 0)]
"""Cases: number of tokens, slots per token, row size, number of slots that are not empty."""


@pytest.mark.full
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    run_tests_interpreted(__file__, num_passed=10)


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        if INTERPRETED:
            monkeypatch.setattr(permute, "has_kernel", lambda x: True)
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if not (INTERPRETED and d == torch.float64)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_take_and_combine_match_indexing(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    num_tokens, copies, size, num_rows = shape
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn(num_tokens, size, device=device, dtype=dtype, requires_grad=True)
    weights = torch.rand(num_tokens, copies, device=device, dtype=wide, requires_grad=True)
    scales = torch.randn(num_rows, size, device=device, dtype=dtype)
    places = torch.randperm(num_tokens * copies, device=device)
    order, inverse = places[:num_rows], inverse_permutation(places)
    assert torch.equal(places[inverse], torch.arange(len(places), device=device))

    rows = take_rows(x, order, inverse, copies=copies)
    assert torch.equal(rows, x[order // copies])
    weighed = combine_rows(rows * scales, weights, order, inverse)
    added = sum_rows(rows * scales, order, inverse, copies=copies)
    for got, each in ((weighed, weights), (added, torch.ones_like(weights))):
        expected = _combined(x, each, scales, order, copies)
        assert got.dtype == dtype
        _assert_close(got, expected, dtype)
        gradient = torch.randn_like(got)
        inputs = (x, weights) if got is weighed else (x,)
        wanted = torch.autograd.grad(expected, inputs, gradient.double(), retain_graph=True)
        for ours, theirs in zip(torch.autograd.grad(got, inputs, gradient, retain_graph=True), wanted, strict=True):
            _assert_close(ours, theirs, dtype)


def _combined(x: Tensor, weights: Tensor, scales: Tensor, order: Tensor, copies: int) -> Tensor:
    """Compute the expected weighted sums in float64, from the rounded rows."""
    rows = x.double()[order // copies] * scales.double() * weights.double().flatten()[order].unsqueeze(1)
    return torch.zeros_like(x, dtype=torch.float64).index_add(0, order // copies, rows)


def _assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
    # A sum of at most 4 products, each of two factors that round, is rounded once more. A weight's gradient is a sum
    # over a row, in float32 or wider; its errors add up like a random walk.
    wide = torch.promote_types(dtype, torch.float32)
    longest = max(size for *_, size, _ in SHAPES)
    roundings = 2 * (4 + 2) * torch.finfo(dtype).eps + math.sqrt(longest) * torch.finfo(wide).eps
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=roundings * scale)
