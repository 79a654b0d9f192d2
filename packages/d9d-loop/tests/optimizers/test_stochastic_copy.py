import math

import pytest
import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.optimizers import stochastic_copy_

NUM = 1_000_000


def _copied(values: Tensor, *, step: int = 0, name: str = "w", seed: int = 0) -> Tensor:
    target = torch.empty_like(values, dtype=torch.bfloat16)
    stochastic_copy_(target, values, seed=seed, step=step, name=name)
    return target


@pytest.mark.parametrize("value", [1.001, -1.001, 3.0e-20, 1 / 3, -65504.3, 1e-41])
def test_rounding_is_unbiased_within_4_sigma(value: float) -> None:
    source = torch.full((NUM,), value)
    copied = _copied(source).double()
    exact = source[0].double().item()
    # The two neighbors in bfloat16, by truncation of the bits.
    low = (source[:1].view(torch.int32) & -0x10000).view(torch.float32).double().item()
    high = ((source[:1].view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double().item()
    assert set(copied.unique().tolist()) == {low, high}
    share = (exact - low) / (high - low)
    sigma = abs(high - low) * math.sqrt(share * (1 - share) / NUM)
    assert abs(copied.mean().item() - exact) < 4 * sigma


def test_representable_values_are_kept() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf]).bfloat16()
    for values in (exact, special):
        assert torch.equal(_copied(values.float()).view(torch.int16), values.view(torch.int16))
    # NaNs that rounding could change: all bits set, and only truncated bits set.
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    for step in range(10):
        assert _copied(nans.repeat(100), step=step).isnan().all()


def test_draws_depend_only_on_seed_step_and_name() -> None:
    values = torch.full((1000,), 1.001)
    first = _copied(values)
    assert torch.equal(first, _copied(values))
    for other in ({"seed": 1}, {"step": 1}, {"name": "v"}):
        assert 100 < (first != _copied(values, **other)).sum() < 500  # ty: ignore[invalid-argument-type]


def test_any_memory_layout_is_written() -> None:
    values = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    target = torch.empty(20, 30, dtype=torch.bfloat16).T
    stochastic_copy_(target, values.T.contiguous().T, seed=0, step=0, name="w")
    assert torch.equal(target, _copied(values))


@pytest.mark.parametrize(
    ("target", "source", "message"),
    [
        (torch.empty(2), torch.empty(2), r"got a target of torch.float32 \[2\] and a source of torch.float32 \[2\]"),
        (
            torch.empty(2).bfloat16(),
            torch.empty(2).double(),
            r"expected torch.bfloat16 and torch.float32 of the same shape",
        ),
        (torch.empty(2).bfloat16(), torch.empty(3), r"a source of torch.float32 \[3\]"),
    ],
)
def test_other_tensors_are_refused(target: Tensor, source: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stochastic_copy_(target, source, seed=0, step=0, name="w")
