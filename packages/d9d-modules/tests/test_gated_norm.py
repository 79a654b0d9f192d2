import torch
from torch.nn import functional as F

from d9d_modules.gated_norm import GatedRMSNorm


def test_outputs_and_gradients_equal_torch_rms_norm_times_silu() -> None:
    norm = GatedRMSNorm(6, eps=0.1).double()
    assert norm.weight.eq(1).all()
    torch.nn.init.normal_(norm.weight)
    x, gate = (torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, expected = norm(x, gate), F.rms_norm(x, (6,), norm.weight, 0.1) * gate * gate.sigmoid()
    torch.testing.assert_close(found, expected)
    leaves, direction = (x, gate, norm.weight), torch.randn_like(found)
    wanted = torch.autograd.grad(expected, leaves, direction)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, direction), wanted)


def test_reset_parameters_sets_ones() -> None:
    norm = GatedRMSNorm(6)
    torch.nn.init.normal_(norm.weight)
    norm.reset_parameters()
    assert norm.weight.eq(1).all()
