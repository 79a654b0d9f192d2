"""Kernels compared with torch operators: on an accelerator, and on the CPU through Triton's interpreter.

Triton selects the interpreter at import, so a separate process runs the tests of this file.
"""

import os

import pytest
import torch
from torch import Tensor

from d9d_dist.testing import run_tests_interpreted
from d9d_dist.values.counter_random import random_bits_at
from d9d_loop.optimizers._adamw_numbers import AdamWNumbers
from d9d_loop.optimizers.index_rule import IndexRule, global_indices
from d9d_loop.optimizers.stochastic_adamw import draw, round_stochastically

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("accelerator", marks=pytest.mark.gpu)]
SIZE, KEY = 1500, 2**62 + 99
RULES = [IndexRule(0, SIZE, SIZE), IndexRule(2**40, SIZE, 2**41), IndexRule(12, 7, 30)]
NUMBERS = AdamWNumbers(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, step=3)


@pytest.mark.full
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    run_tests_interpreted(__file__, num_passed=8)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def _noise(rule: IndexRule, number: int, device: torch.device) -> Tensor:
    return draw(random_bits_at(global_indices(rule, 0, SIZE, device), KEY), number)


def test_adamw_keeps_infinity_and_nan(device: torch.device) -> None:
    from d9d_loop.optimizers import _triton_stochastic  # noqa: PLC0415  (after the interpreter was chosen)

    nan, inf = torch.nan, torch.inf
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, -0x800000], dtype=torch.int32, device=device)
    special = bits.view(torch.float32)  # noise added to the first NaNs would carry into the sign
    g, w = torch.cat([special, torch.zeros_like(special)]), torch.cat([torch.ones_like(special), special]).bfloat16()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    _triton_stochastic.adamw(w, g, m, v, numbers=NUMBERS, key=KEY, rule=IndexRule(0, 10, 10))
    expected = [[nan] * 8 + [inf, -inf], [nan, nan, nan, inf, -inf, *[0.0] * 5], [nan, nan, nan, inf, inf, *[0.0] * 5]]
    for found, values in zip((w, m, v), expected, strict=True):
        torch.testing.assert_close(found.tolist(), values, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("average_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_on_bfloat16_equals_torch_operators(
    rule: IndexRule, average_dtype: torch.dtype, device: torch.device
) -> None:
    _check_adamw(rule, torch.bfloat16, average_dtype, device)


def test_adamw_on_float32_equals_torch_operators(device: torch.device) -> None:
    _check_adamw(RULES[0], torch.float32, torch.float32, device)


def _check_adamw(rule: IndexRule, dtype: torch.dtype, average_dtype: torch.dtype, device: torch.device) -> None:
    """A few values may differ by one unit in the last place, where the last bit of a float32 decides."""
    from d9d_loop.optimizers import _triton_stochastic  # noqa: PLC0415

    draws = torch.Generator().manual_seed(0)
    w, g, m, v = (torch.randn(SIZE, generator=draws).to(device) for _ in range(4))
    w, g, m, v = w.to(dtype), g.to(dtype), m.to(average_dtype), v.square().to(average_dtype)
    w64, g64, m64, v64 = w.double(), g.double(), m.double(), v.double()
    m64 = 0.8 * m64 + 0.2 * g64
    v64 = 0.9 * v64 + 0.1 * g64**2
    w64 = w64 * (1 - 0.1 * 0.2) - 0.1 * (m64 / (1 - 0.8**3)) / ((v64 / (1 - 0.9**3)).sqrt() + 1e-3)
    gated, nan = [each.clone() for each in (w, m, v)], torch.full_like(g, torch.nan)
    for gate, gradient in ((1.0, nan), (0.0, g), (1.0, nan)):
        flag = torch.tensor(gate, device=device)
        _triton_stochastic.adamw(gated[0], gradient, *gated[1:], numbers=NUMBERS, key=KEY, rule=rule, gate=flag)
    _triton_stochastic.adamw(w, g, m, v, numbers=NUMBERS, key=KEY, rule=rule)
    assert all(map(torch.equal, gated, (w, m, v)))
    for number, (found, expected) in enumerate(((w, w64), (m, m64), (v, v64))):
        if found.dtype == torch.float32:
            torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
        else:
            rounded = round_stochastically(expected.float(), _noise(rule, number, device))
            assert (found != rounded).sum() <= 2
            torch.testing.assert_close(found, rounded, rtol=2**-7, atol=0.0)
