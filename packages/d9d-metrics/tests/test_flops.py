import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from d9d_dist import UserError
from d9d_metrics import ModelFlops, peak_flops, transformer_flops_per_token
from d9d_metrics.flops import PEAK_FLOPS, _peak_by_name


@settings(max_examples=10)
@given(layers=st.integers(1, 3), heads=st.integers(1, 3), head_dim=st.sampled_from([4, 8]), length=st.integers(2, 9))
def test_flops_equal_the_count_of_torch(layers: int, heads: int, head_dim: int, length: int) -> None:
    width = heads * head_dim
    weights = [torch.randn(4, width, width, requires_grad=True) for _ in range(layers)]
    head = torch.randn(width, 11, requires_grad=True)

    def attend(x_BLD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        q, k, v = ((x_BLD @ each).unflatten(-1, (heads, head_dim)).transpose(1, 2) for each in weight[:3])
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2) @ weight[3]

    x_BLD = torch.randn(2, length, width, requires_grad=True)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        y_BLD = x_BLD
        for weight in weights:
            y_BLD = attend(y_BLD, weight)
        (y_BLD @ head).sum().backward()
    expected = (
        2
        * length
        * transformer_flops_per_token(
            num_matmul_parameters=sum(weight.numel() for weight in weights) + head.numel(),
            num_layers=layers,
            num_heads=heads,
            head_dim=head_dim,
            sequence_length=length,
            causal=False,
        )
    )
    assert counter.get_total_flops() == expected


def test_a_causal_mask_counts_the_pairs_that_it_allows() -> None:
    length = 5
    each = transformer_flops_per_token(
        num_matmul_parameters=0, num_layers=1, num_heads=1, head_dim=1, sequence_length=length, training=False
    )
    assert each * length == 4 * torch.ones(length, length).tril().sum().item()


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_the_peak_rate_is_looked_up_by_device_name(name: str, known: str) -> None:
    assert _peak_by_name(name, PEAK_FLOPS) == PEAK_FLOPS[known]


def test_rejects_an_unknown_device_unless_the_table_has_it() -> None:
    with pytest.raises(
        UserError, match=r"got the device 'CPU', whose peak rate is unknown; expected one of GB300, .*Pass the rate"
    ):
        peak_flops(torch.device("cpu"))
    assert peak_flops(torch.device("cpu"), table={**PEAK_FLOPS, "cpu": 2e11}) == 2e11


def test_mfu_is_the_fraction_of_the_peak_rate() -> None:
    metric = ModelFlops(peak=100.0)
    assert {value.item() for value in metric.compute().values()} == {0.0}
    metric.update(torch.tensor(30.0), 1.0)
    metric.update(20.0, 1.0)
    assert metric.compute()["mfu"].item() == 0.25
    assert metric.compute()["flops_per_second"].item() == 25.0
