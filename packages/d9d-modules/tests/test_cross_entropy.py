import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d9d_dist import UserError
from d9d_modules.cross_entropy import CrossEntropy


@given(st.floats(0.0, 0.1), st.floats(0.0, 0.9), st.integers(0, 2**16))
def test_cross_entropy_equals_its_equation(z_loss: float, label_smoothing: float, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 7, dtype=torch.float64, generator=draws)
    labels = torch.tensor([0, 6, -100, 3, 3])
    lse = logits.exp().sum(-1).log()
    own = torch.stack([row[label] for row, label in zip(logits, labels.clamp(min=0), strict=True)])
    expected = lse - (1 - label_smoothing) * own - label_smoothing * logits.mean(-1) + z_loss * lse**2
    expected[2] = 0.0
    loss = CrossEntropy(z_loss=z_loss, label_smoothing=label_smoothing)
    torch.testing.assert_close(loss(logits, labels), expected, rtol=1e-12, atol=1e-12)


def test_numbers_out_of_range_raise() -> None:
    with pytest.raises(UserError, match=r"z_loss = -0.1; expected 0 \(for none\) or more, such as 1e-4"):
        CrossEntropy(z_loss=-0.1)
    with pytest.raises(UserError, match=r"label_smoothing = 1.0; expected 0 \(for none\) or more, below 1"):
        CrossEntropy(label_smoothing=1.0)
