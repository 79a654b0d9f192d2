import re
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig, UserError, parallelize_hsdp
from d9d_dist.testing import assert_trees_close, full_parameters, run_ranks
from d9d_loop import AdamWConfig, TrainerConfig, validate_config
from d9d_loop.engine.optimizer_fit import optimizer_provider
from d9d_loop.optimizers import JoinedOptimizer, Lion, LocalSGD, Muon
from d9d_loop.optimizers.optimizer import (
    AdamConfig,
    GroupConfig,
    LionConfig,
    Member,
    MuonConfig,
    OptimizerSettings,
    ScheduleFreeAdamWConfig,
    SGDConfig,
    StochasticAdamWConfig,
    assign,
)


def test_builds_adamw_that_decays_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    optimizer = AdamWConfig(learning_rate=0.5, betas=(0.1, 0.2), eps=1e-3, weight_decay=0.3).build(model)
    assert isinstance(optimizer, torch.optim.AdamW)
    decayed, plain = optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 2), (4, 3)]
    assert [tuple(p.shape) for p in plain["params"]] == [(3,), (3,), (3,)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 1e-3)


@pytest.mark.parametrize(
    ("config", "compared", "other"),
    [
        (AdamWConfig(), torch.optim.AdamW, {"betas": (0.9, 0.999), "weight_decay": 0.01}),
        (AdamConfig(), torch.optim.Adam, {"betas": (0.9, 0.999)}),
        (SGDConfig(), torch.optim.SGD, {"lr": 1e-3}),
    ],
)
def test_defaults_are_those_of_torch_but_for_those_that_the_documentation_names(
    config: OptimizerSettings, compared: Any, other: dict[str, Any]
) -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    built: Any = config.build(nn.ParameterList([weight]))
    ours, theirs = built.param_groups[0], compared([weight]).defaults
    settings = (theirs.keys() & ours.keys()) - {"foreach", "fused", "capturable", "differentiable"}
    assert {"lr", "weight_decay"} < settings
    assert {name: theirs[name] for name in settings if ours[name] != theirs[name]} == other


def test_defaults_of_schedule_free_are_those_of_its_package_but_for_the_weight_decay() -> None:
    config = ScheduleFreeAdamWConfig()  # schedulefree 1.4.1: lr 0.0025, betas (0.9, 0.999), eps 1e-8, weight_decay 0
    assert (config.learning_rate, config.betas, config.eps, config.weight_decay) == (2.5e-3, (0.9, 0.999), 1e-8, 0.1)


def test_frozen_parameters_and_empty_groups_are_skipped() -> None:
    model = nn.Linear(2, 3)
    model.weight.requires_grad_(False)
    (group,) = AdamWConfig().build(model).param_groups
    assert group["params"] == [model.bias]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Embedding(4, 3))


def _members(optimizer: torch.optim.Optimizer) -> list[tuple[list[str], float, float]]:
    """Return names, learning rate and weight decay of each group."""
    return [(group.get("param_names", []), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


def test_groups_have_their_own_settings() -> None:
    config = AdamWConfig(
        learning_rate=0.1,
        weight_decay=0.2,
        groups=(
            GroupConfig(pattern=r"^0\.", learning_rate=0.3),
            GroupConfig(pattern="bias", weight_decay=0.4),
            GroupConfig(pattern=r"2\.weight", of="matrices", weight_decay=0.0),
        ),
    )
    assert _members(config.build(_model())) == [
        (["1.weight"], 0.1, 0.0),
        (["0.weight"], 0.3, 0.2),
        (["0.bias"], 0.3, 0.0),
        (["1.bias"], 0.1, 0.4),
        (["2.weight"], 0.1, 0.0),
    ]


class _Decoder(nn.Module):
    def __init__(self, layers: range = range(2), *, is_whole: bool = True) -> None:
        super().__init__()
        if is_whole:
            self.embed = nn.Embedding(4, 3)
        self.blocks = nn.ModuleDict({str(each): nn.Linear(3, 3) for each in layers})
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 4, bias=False)


def test_layers_below_the_head_have_lower_rates() -> None:
    config = AdamWConfig(learning_rate=1.0, weight_decay=0.2, layer_decay=0.5)
    assert _members(config.build(_Decoder())) == [
        (["head.weight"], 1.0, 0.2),
        (["norm.weight", "norm.bias"], 1.0, 0.0),
        (["blocks.1.weight"], 0.5, 0.2),
        (["blocks.1.bias"], 0.5, 0.0),
        (["blocks.0.weight"], 0.25, 0.2),
        (["blocks.0.bias"], 0.25, 0.0),
        (["embed.weight"], 0.125, 0.2),
    ]


def test_a_stage_has_the_rates_of_the_whole_model() -> None:
    build = optimizer_provider(None, AdamWConfig(learning_rate=1.0, layer_decay=0.5), _Decoder())
    stage = _Decoder(range(1), is_whole=False)
    del stage.norm, stage.head
    assert {group["lr"] for group in build(stage).param_groups} == {0.25}


def test_the_rate_of_a_group_decays_too() -> None:
    groups = (GroupConfig(pattern=r"blocks\.1|embed", learning_rate=4.0, weight_decay=0.1),)
    config = AdamWConfig(learning_rate=1.0, layer_decay=0.5, groups=groups)
    rates = {name: rate for names, rate, _ in _members(config.build(_Decoder())) for name in names}
    assert (rates["blocks.1.bias"], rates["embed.weight"], rates["blocks.0.bias"]) == (2.0, 0.5, 0.25)


def test_vectors_decay_if_configured() -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert _members(AdamWConfig(decays="all").build(_model())) == [(names, 1e-3, 0.1)]


def test_groups_have_their_own_optimizers() -> None:
    config = MuonConfig(
        learning_rate=0.1,
        groups=(
            GroupConfig(of="vectors", optimizer=SGDConfig(groups=(GroupConfig(pattern="bias", learning_rate=0.5),))),
            GroupConfig(pattern=r"^2", optimizer=LionConfig()),
        ),
    )
    optimizer = config.build(_model())
    assert isinstance(optimizer, JoinedOptimizer)
    assert _members(optimizer) == [
        (["0.weight"], 0.1, 0.1),
        (["1.weight"], 0.01, 0.0),
        (["0.bias", "1.bias"], 0.5, 0.0),
        (["2.weight"], 1e-4, 1.0),
    ]
    for (names, _, _), kind in zip(_members(optimizer), (Muon, LocalSGD, LocalSGD, Lion), strict=True):
        (owner,) = [each for each in optimizer.optimizers if any(g["param_names"] == names for g in each.param_groups)]
        assert isinstance(owner, kind)


class _Experts(nn.Module):
    """Expert weights and biases as transformers' gpt-oss names them, and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(2, 3, 4))
        self.gate_up_proj_bias = nn.Parameter(torch.ones(2, 4))
        self.conv = nn.Conv1d(4, 4, 3, groups=4, bias=False)


def test_biases_of_experts_do_not_decay_and_are_not_updated_by_muon() -> None:
    model = _Experts()
    assert _members(AdamWConfig().build(model)) == [
        (["gate_up_proj", "conv.weight"], 1e-3, 0.1),
        (["gate_up_proj_bias"], 1e-3, 0.0),
    ]
    with pytest.raises(
        UserError, match=r"Muon updates matrices, but got gate_up_proj_bias \[2, 4\], conv.weight \[4, 1, 3\]"
    ):
        MuonConfig().build(model)
    muon = MuonConfig(groups=(GroupConfig(of="vectors", optimizer=AdamWConfig()),)).build(model)
    assert _members(muon) == [
        (["gate_up_proj"], 1e-3, 0.1),
        (["conv.weight"], 1e-3, 0.1),
        (["gate_up_proj_bias"], 1e-3, 0.0),
    ]


class _SoapConfig(OptimizerSettings):
    only_matrices: ClassVar[bool] = True
    learning_rate: float = 0.1
    weight_decay: float = 0.0

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        raise NotImplementedError


def test_the_error_of_vectors_names_the_optimizer_of_matrices() -> None:
    with pytest.raises(UserError, match=r"^_Soap updates matrices, but got bias \[3\], which"):
        _SoapConfig().build(nn.Linear(2, 3))


def test_roles_of_the_whole_model_apply_to_its_sharded_parameters() -> None:
    model = nn.Linear(2, 3)  # sharding drops attributes of parameters, such as _no_weight_decay
    groups = _members(AdamWConfig().build(model, roles={"weight": "vector"}))
    assert groups == [(["weight", "bias"], 1e-3, 0.0)]


def test_a_pattern_must_match_only_in_a_whole_model() -> None:
    config = AdamWConfig(groups=(GroupConfig(pattern="nrom"),))
    with pytest.raises(
        UserError, match=r"pattern = 'nrom' matches no trainable parameter; expected at least one of 0\.w"
    ):
        config.build(_model())
    assert len(config.build(_model(), whole=False).param_groups) == 2
    model = _model()
    model.get_parameter("2.weight").requires_grad_(False)
    with pytest.raises(UserError, match="matches no trainable parameter"):
        AdamWConfig(groups=(GroupConfig(pattern="^2"),)).build(model)


def test_a_stage_may_have_no_parameters_for_an_optimizer() -> None:
    stage = nn.LayerNorm(3)
    config = MuonConfig(groups=(GroupConfig(of="vectors", optimizer=SGDConfig()), GroupConfig(pattern="head")))
    assert _members(config.build(stage, whole=False)) == [(["weight", "bias"], 0.01, 0.0)]
    assert _members(config.build(nn.Identity(), whole=False)) == [([], 1e-3, 0.1)]
    assert StochasticAdamWConfig().build(nn.Identity(), whole=False).param_groups[0]["params"] == []
    MuonConfig().build(nn.Linear(2, 3, bias=False, device="meta"))


def test_every_optimizer_can_be_configured_by_its_kind() -> None:
    base: dict[str, Any] = {"steps": 1, "batch": {"global_size": 1}}
    section = {"kind": "muon", "groups": [{"of": "vectors", "optimizer": {"learning_rate": 3e-4}}]}
    config = validate_config(TrainerConfig, {**base, "optimizer": section})
    group = GroupConfig(of="vectors", optimizer=AdamWConfig(learning_rate=3e-4))
    assert config.optimizer == MuonConfig(groups=(group,))
    assert TrainerConfig.model_validate_json(config.model_dump_json()) == config
    stochastic = validate_config(TrainerConfig, {**base, "optimizer": {"kind": "stochastic_adamw"}})
    assert stochastic.optimizer == StochasticAdamWConfig()
    assert validate_config(TrainerConfig, {**base, "optimizer": {"eps": 1}}).optimizer == AdamWConfig(eps=1)
    TrainerConfig.model_json_schema()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "adamm"}, "optimizer.kind = 'adamm'; expected one of 'adamw', 'adam', 'sgd', 'muon', 'lion', "),
        ({"groups": [{"pattern": "("}]}, "optimizer.groups.0: pattern = '(' is not a regular expression: missing ), "),
        (
            {"groups": [{"learning_rate": 1, "optimizer": {}}]},
            "optimizer.groups.0: the group has an optimizer; set learning_rate and weight_decay",
        ),
        ({"kind": "sgd", "nesterov": True}, "optimizer: nesterov = true, but momentum = 0; expected momentum above 0."),
    ],
)
def test_errors_in_optimizer_sections_state_the_remedy(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        validate_config(TrainerConfig, {"steps": 1, "batch": {"global_size": 1}, "optimizer": section})


def test_python_callers_get_pydantic_errors() -> None:
    with pytest.raises(ValidationError, match="betas"):
        AdamWConfig(betas=(2.0, 0.5))


def _train(*, local: bool) -> tuple[dict[str, torch.Tensor], bool]:
    """Run three steps on parameters with a smaller or an empty shard on the last rank."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
        parallelize_hsdp(model, ctx.mesh_for("dense")["dp_cp_shard",], shard_axis="dp_cp_shard")
        ours = AdamWConfig(learning_rate=0.1, weight_decay=0.3).build(model)
        optimizer = ours if local else torch.optim.AdamW(ours.param_groups, foreach=False)
        for _ in range(3):
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        return full_parameters(model), all(isinstance(value, DTensor) for value in states)


def _train_both() -> tuple[tuple[dict[str, torch.Tensor], bool], ...]:
    torch.manual_seed(1)
    first = _train(local=True)
    torch.manual_seed(1)
    return first, _train(local=False)


def test_sharded_updates_equal_torch_and_states_stay_distributed() -> None:
    for (ours, has_distributed_states), (theirs, _) in run_ranks(_train_both, world_size=2):
        # Each of three steps rounds about five times in a different order, by half an eps.
        assert_trees_close(ours, theirs, rtol=8 * torch.finfo(torch.float32).eps)
        assert has_distributed_states


NAMED = [
    Member(f"layers.{index}.{name}", torch.empty(shape, device="meta"), "matrix" if len(shape) == 2 else "vector")
    for index in range(3)
    for name, shape in (("norm", (2,)), ("up", (2, 3)), ("down", (3, 2)))
]


@given(
    st.lists(
        st.builds(
            GroupConfig,
            pattern=st.sampled_from(["norm", r"\.1\.", "up|down", "", "layers", "absent"]),
            of=st.sampled_from(["any", "matrices", "vectors"]),
        ),
        max_size=4,
    )
)
def test_every_parameter_is_in_one_group(selectors: list[GroupConfig]) -> None:
    groups = assign(NAMED, selectors, whole=False)
    assert len(groups) == len(selectors) + 1
    assert sorted(each.name for group in groups for each in group) == sorted(each.name for each in NAMED)
    for number, group in enumerate(groups):
        for member in group:
            first = [each.chooses(member) for each in selectors]
            assert (first.index(True) + 1 if True in first else 0) == number


def test_message_for_a_pattern_without_matches() -> None:
    message = (
        "the optimizer's group with pattern = 'nrom' of vectors matches no trainable parameter; expected at least one "
        "of layers.0.norm, layers.0.up, layers.0.down, layers.1.norm, layers.1.up, layers.1.down, layers.2.norm, "
        "layers.2.up and 1 more. Correct the pattern"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        assign(NAMED, [GroupConfig(pattern="nrom", of="vectors")])


def test_message_for_a_group_after_others_took_its_parameters() -> None:
    with pytest.raises(
        UserError, match=r"group with pattern = 'norm' gets no parameter, because earlier groups match all"
    ):
        assign(NAMED, [GroupConfig(of="vectors"), GroupConfig(pattern="norm")])
