import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_dist.testing import assert_rounds_like
from d9d_moe import GroupedLinear, grouped_matmul
from d9d_moe.grouped_linear import (
    GROUPED_MATMUL_VARIABLE,
    GroupedMatmulBackend,
    choose_grouped_matmul,
)

COUNTS = [[4, 0, 3, 5], [0, 0, 0, 12], [12, 0, 0, 0], [3, 3, 3, 3]]


def _loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute the product of one row at a time."""
    groups = [group for group, count in enumerate(counts.tolist()) for _ in range(count)]
    return torch.stack([weight[group] @ row for row, group in zip(x, groups, strict=True)])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", [(16, 8), (5, 7)], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("eager", torch.float64),
        ("eager", torch.float32),
        ("grouped_mm", torch.float32),
        ("grouped_mm", torch.bfloat16),
    ],
)
def test_outputs_and_gradients_equal_a_loop_over_rows(
    backend: GroupedMatmulBackend, dtype: torch.dtype, sizes: tuple[int, int], counts: list[int]
) -> None:
    num_inputs, num_outputs = sizes
    x = torch.randn(12, num_inputs, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, num_outputs, num_inputs, dtype=dtype, requires_grad=True)
    counts_G = torch.tensor(counts)
    gradient = torch.randn(12, num_outputs, dtype=dtype)
    got = grouped_matmul(x, weight, counts_G, backend=backend)
    expected = _loop(x, weight, counts_G)
    assert got.dtype == dtype
    got_gradients = torch.autograd.grad(got, (x, weight), gradient)
    wanted = torch.autograd.grad(expected, (x, weight), gradient)
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    exact = _loop(*wide, counts_G)
    exact_gradients = torch.autograd.grad(exact, wide, gradient.double())
    assert_rounds_like([got, *got_gradients], [exact, *exact_gradients], peer=[expected, *wanted])
    assert got_gradients[1][counts_G == 0].eq(0).all()
    assert got_gradients[1].is_contiguous()


@pytest.mark.parametrize(
    ("rows_dtype", "weight_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_autocast_matches_a_linear_layer(rows_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    counts = [4, 0, 3, 5]
    x = torch.randn(12, 16, dtype=rows_dtype, requires_grad=True)
    weight = torch.randn(4, 8, 16, dtype=weight_dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = grouped_matmul(x, weight, torch.tensor(counts))
        expected = torch.cat([F.linear(rows, matrix) for rows, matrix in zip(x.split(counts), weight, strict=True)])
    assert got.dtype == expected.dtype
    gradient = torch.randn_like(got)
    ours, theirs = (torch.autograd.grad(each, (x, weight), gradient) for each in (got, expected))
    # Exact products of operands that autocast rounds.
    wide = [each.detach().bfloat16().double().requires_grad_() for each in (x, weight)]
    exact = _loop(*wide, torch.tensor(counts))
    exact_gradients = torch.autograd.grad(exact, wide, gradient.double())
    assert_rounds_like([got, *ours], [exact, *exact_gradients], peer=[expected, *theirs])


@pytest.mark.parametrize(
    ("dtype", "num_inputs", "num_outputs", "num_rows", "expected"),
    [
        (torch.float32, 4, 8, 3, "grouped_mm"),
        (torch.bfloat16, 8, 16, 3, "grouped_mm"),
        (torch.float16, 8, 16, 3, "grouped_mm"),
        (torch.float64, 4, 8, 3, "eager"),
        (torch.float32, 5, 8, 3, "grouped_mm"),
        (torch.float32, 4, 6, 3, "grouped_mm"),
        (torch.bfloat16, 4, 8, 3, "grouped_mm"),
        (torch.float32, 4, 8, 0, "eager"),
    ],
)
def test_kernel_is_chosen_for_supported_inputs(
    dtype: torch.dtype, num_inputs: int, num_outputs: int, num_rows: int, expected: GroupedMatmulBackend
) -> None:
    x = torch.randn(num_rows, num_inputs, dtype=dtype, requires_grad=True)
    weight = torch.randn(2, num_outputs, num_inputs, dtype=dtype, requires_grad=True)
    assert choose_grouped_matmul(x) == expected
    y = grouped_matmul(x, weight, torch.tensor([0, num_rows]))
    assert y.shape == (num_rows, num_outputs)
    y.sum().backward()  # an expanded gradient, which the kernel refuses as it is
    assert x.grad is not None
    assert weight.grad is not None
    assert weight.grad[0].eq(0).all()


def test_operands_of_the_kernel_have_strides_that_are_multiples_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        for each in (x, weight):
            inner = each if each.stride(-1) == 1 else each.transpose(-1, -2)
            assert all(stride * each.element_size() % 16 == 0 for stride in inner.stride()[:-1])
        return kernel(x, weight, offs=offs)

    kernel = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", checked)
    x = torch.randn(5, 3, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(2, 7, 3, dtype=torch.bfloat16, requires_grad=True)
    grouped_matmul(x, weight, torch.tensor([1, 4])).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("backend", ["grouped_mm", "eager"])
@pytest.mark.parametrize("counts", [[2, 1, 2], [2, 1, 4], [-1, 4, 3]])
def test_counts_that_do_not_cover_the_rows_raise(counts: list[int], backend: GroupedMatmulBackend) -> None:
    """A kernel would leave rows uninitialized, or read beyond them."""
    with pytest.raises(UserError, match=r"got counts_G = \[.*\]; expected integers of shape \(3,\) with the sum 6"):
        grouped_matmul(torch.randn(6, 4), torch.randn(3, 5, 4), torch.tensor(counts), backend=backend)


@pytest.mark.parametrize("counts", [torch.tensor([2, 4]), torch.tensor([[2, 1, 3]]), torch.tensor([2.0, 1.0, 3.0])])
def test_counts_of_another_shape_or_dtype_raise(counts: torch.Tensor) -> None:
    with pytest.raises(UserError, match=r"got counts_G of shape .* and dtype .*; expected integers of shape \(3,\)"):
        grouped_matmul(torch.randn(6, 4), torch.randn(3, 5, 4), counts)


def test_noncontiguous_rows_are_supported() -> None:
    x = torch.randn(8, 6).T
    weight = torch.randn(2, 4, 8)
    counts = torch.tensor([2, 4])
    torch.testing.assert_close(grouped_matmul(x, weight, counts), _loop(x, weight, counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_are_inferred_on_meta(dtype: torch.dtype) -> None:
    x = torch.empty(6, 8, dtype=dtype, device="meta")
    weight = torch.empty(2, 4, 8, dtype=dtype, device="meta", requires_grad=True)
    y = grouped_matmul(x, weight, torch.empty(2, dtype=torch.int64, device="meta"))
    assert (y.shape, y.dtype, y.is_meta) == ((6, 4), dtype, True)
    y.sum().backward()
    assert weight.grad is not None


def test_module_uses_its_weight() -> None:
    layer = GroupedLinear(3, 4, 8, init_std=1.0)
    assert layer.weight.shape == (3, 8, 4)
    x, counts = torch.randn(5, 4), torch.tensor([1, 0, 4])
    torch.testing.assert_close(layer(x, counts), _loop(x, layer.weight, counts))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bias_is_added_to_the_rows_of_its_group(dtype: torch.dtype, counts: list[int]) -> None:
    layer = GroupedLinear(4, 16, 8, bias=True).to(dtype)
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    x, sizes, gradient = torch.randn(12, 16, dtype=dtype), torch.tensor(counts), torch.randn(12, 8, dtype=dtype)
    got = layer(x, sizes)
    expected = grouped_matmul(x, layer.weight, sizes) + layer.bias.repeat_interleave(sizes, dim=0)
    assert torch.equal(got, expected)
    got.backward(gradient)
    wanted = torch.stack([part.double().sum(dim=0) for part in gradient.split(counts)])
    assert layer.bias.grad is not None
    # One rounding of each sum of at most 12 numbers.
    torch.testing.assert_close(layer.bias.grad.double(), wanted, rtol=0, atol=30 * torch.finfo(dtype).eps)
    layer.reset_parameters()
    assert layer.bias.eq(0).all()


def test_reset_parameters_draws_from_the_given_normal_distribution() -> None:
    layer = GroupedLinear(4, 100, 150, init_std=0.3)
    for _ in range(2):
        assert abs(layer.weight.std().item() - 0.3) < 0.01
        torch.nn.init.zeros_(layer.weight)
        layer.reset_parameters()


def test_environment_selects_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, counts = torch.randn(3, 4), torch.randn(2, 8, 4), torch.tensor([1, 2])
    monkeypatch.delenv(GROUPED_MATMUL_VARIABLE, raising=False)
    assert choose_grouped_matmul(x) == "grouped_mm"
    monkeypatch.setenv(GROUPED_MATMUL_VARIABLE, "eager")
    assert choose_grouped_matmul(x) == "eager"
    monkeypatch.setenv(GROUPED_MATMUL_VARIABLE, "cublas")
    with pytest.raises(UserError, match=r"D9D_GROUPED_MATMUL = 'cublas'; expected one of grouped_mm, eager"):
        grouped_matmul(x, weight, counts)


def test_an_unknown_backend_is_an_error() -> None:
    x, weight, counts = torch.randn(3, 4), torch.randn(2, 8, 4), torch.tensor([1, 2])
    with pytest.raises(UserError, match=r"backend = 'triton'; expected one of grouped_mm, eager"):
        grouped_matmul(x, weight, counts, backend="triton")  # ty: ignore[invalid-argument-type]


def test_frozen_weight_has_no_gradient() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 8, 4)
    grouped_matmul(x, weight, torch.tensor([1, 2])).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
