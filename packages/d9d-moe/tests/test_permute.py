"""Permutations with weights against plain indexing; the kernels too: on an accelerator, and in Triton's interpreter.

The interpreter is chosen when Triton is imported, so it has a process of its own, which runs the tests of this file.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from d9d_moe import permute
from d9d_moe.permute import combine_rows, inverse_permutation, take_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-6}
SHAPES = [(5, 3, 7), (4, 1, 16), (0, 2, 5), (3, 4, 2100)]


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-o",
        "addopts=--import-mode=importlib",
        __file__,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        if INTERPRETED:
            monkeypatch.setattr(permute, "_has_kernel", lambda x: True)
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


@pytest.mark.parametrize("dtype", [d for d in TOLERANCE if not (INTERPRETED and d == torch.float64)], ids=str)
@pytest.mark.parametrize(("num_tokens", "copies", "size"), SHAPES)
def test_there_and_back(device: torch.device, dtype: torch.dtype, num_tokens: int, copies: int, size: int) -> None:
    num_rows = num_tokens * copies
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn(num_tokens, size, device=device, dtype=dtype, requires_grad=True)
    weights = torch.rand(num_tokens, copies, device=device, dtype=wide, requires_grad=True)
    scales = torch.randn(num_rows, size, device=device, dtype=dtype)
    order = torch.randperm(num_rows, device=device)
    inverse = inverse_permutation(order)
    assert torch.equal(order[inverse], torch.arange(num_rows, device=device))

    rows = take_rows(x, order, inverse, copies=copies)
    assert torch.equal(rows, x[order // copies])
    got = combine_rows(rows * scales, weights, order, inverse)
    expected = _combined(x, weights, scales, order, copies)
    assert got.dtype == dtype
    _assert_close(got, expected, dtype)
    gradient = torch.randn_like(got)
    wanted = torch.autograd.grad(expected, (x, weights), gradient.double())
    for ours, theirs in zip(torch.autograd.grad(got, (x, weights), gradient), wanted, strict=True):
        _assert_close(ours, theirs, dtype)


def _combined(x: Tensor, weights: Tensor, scales: Tensor, order: Tensor, copies: int) -> Tensor:
    """In float64, of the rows as they were rounded."""
    rows = (x.double()[order // copies] * scales.double())[torch.argsort(order)]
    return (rows.view(len(x), copies, x.shape[1]) * weights.double().unsqueeze(-1)).sum(1)


def _assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype] * scale)
