import math

import pytest
import torch
from torch import nn

from d9d_dist import UserError
from d9d_peft import LoRA, LoraLinear, inject


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.SiLU()


def layer(**kwargs: float) -> LoraLinear:
    return LoraLinear(nn.Linear(6, 5, dtype=torch.float64), rank=2, alpha=3.0, **kwargs)


def test_starts_as_the_layer_it_wraps() -> None:
    lora = layer()
    x = torch.randn(3, 6, dtype=torch.float64)
    assert torch.equal(lora(x), lora.base(x))


def test_adds_the_scaled_low_rank_update() -> None:
    lora = layer()
    nn.init.normal_(lora.lora_b)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    weight = lora.base.weight + 3.0 / 2 * lora.lora_b @ lora.lora_a
    torch.testing.assert_close(lora(x), x @ weight.T + lora.base.bias, rtol=1e-12, atol=1e-12)


def test_shapes_and_start() -> None:
    lora = LoraLinear(nn.Linear(100, 50), rank=40, alpha=1.0)
    assert lora.lora_a.shape == (40, 100)
    assert lora.lora_b.shape == (50, 40)
    assert not lora.lora_b.any()
    assert lora.lora_a.abs().max().item() == pytest.approx(1 / math.sqrt(100), rel=1e-2)


def test_reset_leaves_the_base_alone() -> None:
    lora = layer()
    base = lora.base.weight.detach().clone()
    nn.init.ones_(lora.lora_b)
    lora.reset_parameters()
    assert not lora.lora_b.any()
    assert torch.equal(lora.base.weight, base)


def test_dropout_acts_on_the_update_only_and_only_while_training() -> None:
    lora = layer(dropout=0.999999)
    nn.init.normal_(lora.lora_b)
    x = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(lora(x), lora.base(x)), "with nearly every input dropped, nothing is left of the update"
    lora.eval()
    assert not torch.equal(lora(x), lora.base(x))


def test_says_what_it_is() -> None:
    assert "rank=2, alpha=3.0, dropout=0.5" in repr(layer(dropout=0.5))


def test_takes_linear_layers_and_passes_others_over() -> None:
    model = nn.ModuleDict({"attention": Attention()})
    inject(LoRA("attention", rank=3, alpha=5, dropout=0.25), model)
    for name in ("attention.q", "attention.k"):
        module = model.get_submodule(name)
        assert isinstance(module, LoraLinear)
        assert (module.rank, module.alpha, module.dropout) == (3, 5, 0.25)
    assert isinstance(model.get_submodule("attention.act"), nn.SiLU)


def test_refuses_a_pattern_that_matches_nothing() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    message = (
        r"LoRA got the pattern 'q_proj', which matches no module; expected nn\.Linear layers\. "
        r"This model has 0, 1, 2, 3, 4, 5, 6, 7 and 2 more\."
    )
    with pytest.raises(UserError, match=message):
        inject(LoRA("q_proj"), model)


def test_refuses_a_pattern_that_matches_other_modules_only() -> None:
    with pytest.raises(
        UserError, match=r"matches only act \(SiLU\); expected nn\.Linear layers\. This model has q, k\."
    ):
        inject(LoRA("act"), Attention())


def test_refuses_to_be_injected_twice() -> None:
    model = Attention()
    inject(LoRA("q"), model)
    with pytest.raises(UserError, match="q is a LoRA layer already; inject one Stack"):
        inject(LoRA("k"), model)


def test_refuses_a_rank_below_one() -> None:
    with pytest.raises(UserError, match="LoRA got rank = 0; expected at least 1"):
        LoRA("q", rank=0)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_refuses_a_dropout_that_is_no_probability(dropout: float) -> None:
    with pytest.raises(UserError, match=r"LoRA got dropout = .*; expected 0 <= dropout < 1"):
        LoRA("q", dropout=dropout)


def test_refuses_what_is_no_regular_expression() -> None:
    with pytest.raises(
        UserError, match=r"LoRA got the pattern '\*', which is no regular expression: nothing to repeat"
    ):
        LoRA("*")
