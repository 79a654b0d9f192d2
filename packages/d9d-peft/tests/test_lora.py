import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from d9d_dist import SplitBackward, UserError
from d9d_moe import GroupedLinear, grouped_matmul
from d9d_peft import DoRA, LoRA, inject
from d9d_peft.lora import LoraAdapter
from d9d_peft.low_rank import LowRank


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.SiLU()


def layer(method: LoRA | None = None) -> tuple[nn.Linear, LoraAdapter]:
    linear = nn.Linear(6, 5, dtype=torch.float64)
    inject(method or LoRA(nn.Linear, rank=2, alpha=3.0), linear)
    adapter = linear.get_submodule("adapter")
    assert isinstance(adapter, LoraAdapter)
    return linear, adapter


def without_adapter(linear: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, linear.weight, linear.bias)


def test_initial_adapter_has_no_effect() -> None:
    linear, _ = layer()
    x = torch.randn(3, 6, dtype=torch.float64)
    assert torch.equal(linear(x), without_adapter(linear, x))


@pytest.mark.parametrize(("stabilized", "scaling"), [(False, 3.0 / 2), (True, 3.0 / math.sqrt(2))])
def test_adds_the_scaled_low_rank_update(stabilized: bool, scaling: float) -> None:
    linear, adapter = layer(LoRA(nn.Linear, rank=2, alpha=3.0, rank_stabilized=stabilized))
    nn.init.normal_(adapter.lora_b)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    weight = linear.weight + scaling * adapter.lora_b @ adapter.lora_a
    torch.testing.assert_close(linear(x), x @ weight.T + linear.bias, rtol=1e-12, atol=1e-12)


def test_shapes_and_initial_values() -> None:
    linear = nn.Linear(100, 50)
    adapter = LoraAdapter(linear, LowRank(rank=40, alpha=1.0))
    assert adapter.lora_a.shape == (40, 100)
    assert adapter.lora_b.shape == (50, 40)
    assert not adapter.lora_b.any()
    assert adapter.lora_a.abs().max().item() == pytest.approx(1 / math.sqrt(100), rel=1e-2)


def test_reset_does_not_change_the_layer() -> None:
    linear, adapter = layer()
    weight = linear.weight.detach().clone()
    nn.init.ones_(adapter.lora_b)
    adapter.reset_parameters()
    assert not adapter.lora_b.any()
    assert torch.equal(linear.weight, weight)


def test_dropout_affects_only_the_update_in_training() -> None:
    linear, adapter = layer(LoRA(nn.Linear, dropout=0.999999))
    nn.init.normal_(adapter.lora_b)
    x = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(linear(x), without_adapter(linear, x)), "with nearly every input dropped, no update is left"
    linear.eval()
    assert not torch.equal(linear(x), without_adapter(linear, x))


def test_split_backward_gives_the_same_gradients() -> None:
    linear, adapter = layer()
    nn.init.normal_(adapter.lora_b)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(4, 5, dtype=torch.float64)
    expected = torch.autograd.grad(linear(x), [x, adapter.lora_a, adapter.lora_b], gradient)
    split = SplitBackward()
    with split.forward():
        y = linear(x)
    later = split.backward([y], [gradient])
    assert adapter.lora_a.grad is adapter.lora_b.grad is None
    assert len(later) == 2
    later.compute()
    torch.testing.assert_close([x.grad, adapter.lora_a.grad, adapter.lora_b.grad], list(expected), rtol=0, atol=1e-12)
    assert linear.weight.grad is None


@pytest.mark.parametrize("method", [LoRA, DoRA])
@pytest.mark.parametrize(
    ("base", "asked", "expected"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_adapters_are_at_least_float32_by_default(
    method: Any, base: torch.dtype, asked: torch.dtype | None, expected: torch.dtype
) -> None:
    linear = nn.Linear(6, 5, dtype=base)
    inject(method(nn.Linear, rank=2, dtype=asked), linear)
    assert {name: parameter.dtype for name, parameter in linear.named_parameters()} == {
        name: expected if "adapter" in name else base for name, _ in linear.named_parameters()
    }
    assert linear(torch.randn(3, 6, dtype=base)).dtype == base


@pytest.mark.parametrize("method", [LoRA, DoRA])
def test_small_updates_train_the_adapter_of_a_bfloat16_layer(method: Any) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, dtype=torch.bfloat16)
    inject(method(nn.Linear, rank=8), linear)
    a = linear.get_parameter("adapter.lora_a")
    before = a.detach().clone()
    optimizer = torch.optim.AdamW([p for p in linear.parameters() if p.requires_grad], lr=2e-5, weight_decay=0)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    for _ in range(5):
        linear(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (a != before).all()


def test_update_of_a_bfloat16_layer_is_computed_in_float32_and_rounded_once() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, dtype=torch.bfloat16)
    inject(LoRA(nn.Linear, rank=8), linear)
    a, b = linear.get_parameter("adapter.lora_a"), linear.get_parameter("adapter.lora_b")
    nn.init.normal_(b)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    exact = without_adapter(linear, x).double() + 2 * x.double() @ a.double().T @ b.double().T
    # Half of the eps of bfloat16 for one rounding, and a margin for the float32 sums.
    torch.testing.assert_close(linear(x).double(), exact, rtol=2**-8 * 1.01, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int8, "float32"])
def test_refuses_a_dtype_that_is_not_floating_point(dtype: Any) -> None:
    with pytest.raises(
        UserError, match=r"LoRA got dtype = .*; expected a floating-point dtype, such as torch\.float32"
    ):
        LoRA("q", dtype=dtype)


COUNTS = torch.tensor([3, 0, 4])


def test_each_group_has_its_own_update() -> None:
    grouped = GroupedLinear(3, 6, 5, init_std=0.5).double()
    inject(LoRA(GroupedLinear, rank=2, alpha=3.0), grouped)
    a, b = grouped.get_parameter("adapter.lora_a"), grouped.get_parameter("adapter.lora_b")
    assert (a.shape, b.shape) == ((3, 2, 6), (3, 5, 2))
    x = torch.randn(7, 6, dtype=torch.float64)
    assert torch.equal(grouped(x, COUNTS), grouped_matmul(x, grouped.weight, COUNTS))
    nn.init.normal_(b)
    weight = grouped.weight + 1.5 * b @ a
    expected = torch.cat([rows @ each.T for rows, each in zip(x.split([3, 0, 4]), weight, strict=True)])
    torch.testing.assert_close(grouped(x, COUNTS), expected, rtol=1e-12, atol=1e-12)
    grouped(x, COUNTS).sum().backward()
    assert a.grad is not None
    assert [bool(each.any()) for each in a.grad] == [True, False, True]


def test_adapters_of_bfloat16_groups_are_float32_and_computed_in_bfloat16() -> None:
    torch.manual_seed(0)
    grouped = GroupedLinear(3, 8, 16, init_std=0.5).bfloat16()
    inject(LoRA(GroupedLinear, rank=8), grouped)
    a, b = grouped.get_parameter("adapter.lora_a"), grouped.get_parameter("adapter.lora_b")
    assert a.dtype == b.dtype == torch.float32
    nn.init.normal_(b)
    x = torch.randn(7, 8, dtype=torch.bfloat16)
    update = grouped_matmul(grouped_matmul(x, a.bfloat16(), COUNTS), b.bfloat16(), COUNTS)
    y = grouped(x, COUNTS)
    assert torch.equal(y, grouped_matmul(x, grouped.weight, COUNTS) + 2 * update)
    gradient = torch.randn_like(y)
    expected = torch.autograd.grad(y, [a, b], gradient)
    split = SplitBackward()
    with split.forward():
        y = grouped(x, COUNTS)
    split.backward([y], [gradient]).compute()
    assert a.grad is not None
    assert a.grad.dtype == torch.float32
    torch.testing.assert_close([a.grad, b.grad], list(expected), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (Shard(0), {"lora_b": Shard(0)}),
        (Shard(1), {"lora_a": Shard(1)}),
        (Replicate(), {}),
    ],
)
def test_factors_are_split_with_the_weight(weight: Placement, expected: dict[str, Placement]) -> None:
    _, adapter = layer()
    assert adapter.tensor_placements(weight) == expected


def test_factors_of_groups_are_split_with_the_groups() -> None:
    adapter = LoraAdapter(GroupedLinear(3, 6, 5), LowRank(rank=2, alpha=1.0))
    assert adapter.tensor_placements(Shard(0)) == {"lora_a": Shard(0), "lora_b": Shard(0)}
    assert adapter.tensor_placements(Shard(1)) == {"lora_b": Shard(1)}
    assert adapter.tensor_placements(Shard(2)) == {"lora_a": Shard(2)}


def test_extra_repr_has_the_options() -> None:
    method = LoRA(nn.Linear, rank=2, alpha=3.0, dropout=0.5, rank_stabilized=True)
    assert "(adapter): LoraAdapter(rank=2, alpha=3.0, dropout=0.5, rank_stabilized=True)" in repr(layer(method)[0])


@pytest.mark.parametrize("target", ["attention", nn.Linear, (nn.Linear, nn.SiLU)])
def test_adapts_linear_layers_and_skips_others(
    target: str | type[nn.Module] | tuple[type[nn.Module], ...],
) -> None:
    model = nn.ModuleDict({"attention": Attention()})
    inject(LoRA(target, rank=3, alpha=5, dropout=0.25), model)
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, LoraAdapter)}
    assert adapters.keys() == {"attention.q.adapter", "attention.k.adapter"}
    assert {adapter.low_rank for adapter in adapters.values()} == {LowRank(rank=3, alpha=5, dropout=0.25)}


def test_refuses_a_pattern_that_matches_nothing() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    message = (
        r"LoRA got the pattern 'q_proj', which matches no module; expected nn\.Linear, nn\.Embedding, "
        r"d9d_moe\.GroupedLinear or a language-model head\. "
        r"This model has 0, 1, 2, 3, 4, 5, 6, 7 and 2 more\."
    )
    with pytest.raises(UserError, match=message):
        inject(LoRA("q_proj"), model)


@pytest.mark.parametrize(
    ("target", "what"),
    [("act", "the pattern 'act'"), (nn.SiLU, "the type SiLU"), ((nn.SiLU, nn.GELU), "the types SiLU, GELU")],
)
def test_refuses_a_target_that_matches_other_modules_only(
    target: str | type[nn.Module] | tuple[type[nn.Module], ...], what: str
) -> None:
    message = rf"LoRA got {what}, which matches only act \(SiLU\); expected nn\.Linear, .* This model has q, k\."
    with pytest.raises(UserError, match=message):
        inject(LoRA(target), Attention())


@pytest.mark.parametrize("rank", [0, 4.0, "4"])
def test_refuses_an_invalid_rank(rank: Any) -> None:
    with pytest.raises(UserError, match=f"LoRA got rank = {rank!r}; expected an integer of at least 1"):
        LoRA("q", rank=rank)


@pytest.mark.parametrize("target", ["out_proj", "linear2", nn.Linear])
@pytest.mark.parametrize("method", [LoRA, DoRA])
def test_refuses_layers_that_torch_does_not_call(method: Any, target: Any) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8))
    message = r"(LoRA|DoRA) got a target that matches 0\.\S+, whose weight nn\.\w+ uses without calling the layer"
    with pytest.raises(UserError, match=message):
        inject(method(target), model)


def test_called_layer_next_to_torch_attention_is_adapted() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "q_proj": nn.Linear(4, 4)})
    inject(LoRA("q_proj"), model)
    assert "adapter" in dict(model["q_proj"].named_children())


@pytest.mark.parametrize("alpha", [math.inf, math.nan])
def test_refuses_a_nonfinite_alpha(alpha: float) -> None:
    with pytest.raises(UserError, match=f"LoRA got alpha = {alpha}; expected a finite number"):
        LoRA("q", alpha=alpha)


@pytest.mark.parametrize("training", [True, False])
def test_an_adapter_takes_the_mode_of_its_layer(training: bool) -> None:
    """A loaded model is often in evaluation mode, where dropout must do nothing."""
    model = nn.Sequential(nn.Linear(4, 4)).train(training)
    inject(LoRA("0", dropout=0.5), model)
    nn.init.ones_(model.get_parameter("0.adapter.lora_b"))
    assert torch.equal(model(torch.ones(1, 4)), model(torch.ones(1, 4))) is not training


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_refuses_an_invalid_dropout(dropout: float) -> None:
    with pytest.raises(UserError, match=r"LoRA got dropout = .*; expected 0 <= dropout < 1"):
        LoRA("q", dropout=dropout)


def test_refuses_an_invalid_regular_expression() -> None:
    with pytest.raises(
        UserError, match=r"LoRA got the pattern '\*', which is not a valid regular expression: nothing to repeat"
    ):
        LoRA("*")


@pytest.mark.parametrize("target", [(), 3, (nn.Linear, int)])
def test_refuses_an_invalid_target(target: object) -> None:
    with pytest.raises(UserError, match=r"LoRA got the target .*; expected a regular expression or module types"):
        LoRA(target)  # ty: ignore[invalid-argument-type]  (on purpose)


@pytest.mark.parametrize("method", [LoRA(nn.Linear), DoRA(nn.Linear)])
def test_a_layer_that_computes_its_weight_is_an_error(method: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    message = r"got a target that matches 1 \(ParametrizedLinear\), which computes its weight from other parameters"
    with pytest.raises(UserError, match=message):
        inject(method, model)
