from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import UserError
from d9d_peft import DoRA, FullTune, LoRA, Stack


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].register_parameter("weight", model["embedding"].get_parameter("weight"))
    return model


def test_plan_is_the_union_of_the_plans() -> None:
    plan = Stack(LoRA("up"), Stack(FullTune("norm"), DoRA("down"))).plan(Layer())
    assert plan.adapters.keys() == {"up", "down"}
    assert plan.trainable == {"norm.weight", "norm.bias"}
    assert plan.claimed == {f"{name}.{part}" for name in ("up", "down", "norm") for part in ("weight", "bias")}


def test_refuses_two_methods_on_one_layer() -> None:
    message = (
        r"LoRA\(target='up\|down', .*\) and FullTune\(target='down'\) both claim down\.bias, down\.weight; "
        r"expected at most one method per parameter\. Narrow one of the targets"
    )
    with pytest.raises(UserError, match=message):
        Stack(LoRA("up|down"), FullTune("norm"), FullTune("down")).plan(Layer())


def test_refuses_two_methods_on_one_tied_weight() -> None:
    with torch.device("meta"), pytest.raises(UserError, match=r"both claim embedding\.weight"):
        Stack(LoRA("head"), FullTune("embedding")).plan(tied())


def test_refuses_a_list_of_methods() -> None:
    methods: Any = [LoRA("q"), FullTune("embedding")]
    with pytest.raises(UserError, match=r"Stack got a list of methods; expected .* Stack\(\*methods\)"):
        Stack(methods)


def test_refuses_an_empty_stack() -> None:
    with pytest.raises(UserError, match="Stack got no methods; expected at least one"):
        Stack()
