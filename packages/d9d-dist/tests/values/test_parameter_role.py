from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from torch import nn

from d9d_dist import parameter_roles
from d9d_dist.values.parameter_role import DeclaresParameterRoles, ParameterRole


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 6, 8))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(4, 8))
        self.bias = nn.Parameter(torch.empty(4, 8))
        self.A_log = nn.Parameter(torch.empty(8, 2))
        self.A_log.__dict__["_no_weight_decay"] = True


class _HeadRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 8))


class _Causal(nn.Module):
    parameter_roles: ClassVar[Mapping[str, ParameterRole]] = {"weight": "filter"}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4))


class _Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.empty(1, 5, 8))
        self.mask_token = nn.Parameter(torch.empty(1, 1, 8))
        self.scale = nn.Parameter(torch.empty(8, 1, 1))
        self.experts, self.norm, self.causal = _Experts(), _HeadRMSNorm(), _Causal()
        self.depthwise = nn.Conv1d(8, 8, 4, groups=8)
        self.patches = nn.Conv2d(3, 8, 2)
        self.layer_norm, self.batch_norm = nn.LayerNorm([2, 8]), nn.BatchNorm1d(8)
        self.table, self.recurrent = nn.Embedding(9, 8), nn.LSTM(8, 8)
        self.head = nn.Linear(8, 1)

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "pos_embed"}


EXPECTED: dict[str, ParameterRole] = {
    "cls_token": "vector",
    "pos_embed": "vector",
    "mask_token": "filter",
    "scale": "filter",
    "experts.gate_up_proj": "matrix",
    "experts.gate_up_proj_bias": "vector",
    "experts.bias": "vector",
    "experts.A_log": "vector",
    "norm.weight": "vector",
    "causal.weight": "filter",
    "depthwise.weight": "filter",
    "depthwise.bias": "vector",
    "patches.weight": "filter",
    "layer_norm.weight": "vector",
    "layer_norm.bias": "vector",
    "batch_norm.weight": "vector",
    "table.weight": "matrix",
    "recurrent.weight_ih_l0": "matrix",
    "recurrent.bias_hh_l0": "vector",
    "head.weight": "matrix",
    "head.bias": "vector",
}


@pytest.mark.parametrize("prefix", ["", "stages.0."])
def test_the_module_and_the_name_decide_and_not_the_number_of_dims(prefix: str) -> None:
    model: nn.Module = _Vision() if not prefix else nn.ModuleDict({"stages": nn.ModuleList([_Vision()])})
    found = parameter_roles(model)
    assert {name: found[prefix + name] for name in EXPECTED} == EXPECTED
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert isinstance(_Causal(), DeclaresParameterRoles)
