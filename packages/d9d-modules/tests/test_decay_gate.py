import pytest
import torch
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_modules.decay_gate import DecayGate, LogSigmoidDecayGate


def test_the_gate_equals_its_equation_in_float64() -> None:
    gate = DecayGate(3).double()
    x = 5 * torch.randn(2, 4, 3, dtype=torch.float64)
    expected = -gate.log_rate.exp() * torch.log1p((x + gate.bias).exp())
    torch.testing.assert_close(gate(x), expected, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_computed_in_float32() -> None:
    gate = DecayGate(3).bfloat16()
    wide = DecayGate(3)
    wide.load_state_dict(gate.state_dict())
    x = torch.randn(2, 4, 3).bfloat16()
    assert gate(x).dtype == torch.float32
    assert torch.equal(gate(x), wide(x.float()))


def test_initial_decay_rates_and_step_sizes_are_in_their_ranges() -> None:
    gate = DecayGate(4000)
    for parameter in gate.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    gate.reset_parameters()
    rates, steps = gate.log_rate.exp(), F.softplus(gate.bias)
    assert 0.009 < rates.min() < 0.1
    assert 15.9 < rates.max() < 16.001
    assert 0.00099 < steps.min() < 0.0011
    assert 0.09 < steps.max() < 0.1001
    assert abs(steps.log10().mean() + 2) < 0.05
    assert gate.bias.requires_grad


def test_the_log_sigmoid_gate_equals_its_equation() -> None:
    gate = LogSigmoidDecayGate(3, normalizer=4.0).double()
    assert gate.bias.eq(0).all()
    torch.nn.init.normal_(gate.bias)
    x = 5 * torch.randn(2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(gate(x).exp(), (x + gate.bias).sigmoid() ** 0.25, rtol=1e-12, atol=1e-12)
    assert gate.bfloat16()(x.bfloat16()).dtype == torch.float32
    with pytest.raises(UserError, match=r"normalizer = 0; expected a number above 0"):
        LogSigmoidDecayGate(3, normalizer=0)
