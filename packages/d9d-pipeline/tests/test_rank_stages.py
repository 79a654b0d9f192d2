import pytest
import torch
from torch import nn

from d9d_pipeline import RankStages


def _stage(*indices: int, tied: bool = False) -> nn.Module:
    stage = nn.Module()
    stage.layers = nn.ModuleDict({str(index): nn.BatchNorm1d(2) for index in indices})
    if tied:
        head, embedding = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        head.weight = embedding.weight
        stage.head, stage.embedding = head, embedding
    return stage


def test_parameters_buffers_and_state_have_the_names_of_the_whole_model() -> None:
    model, stages = _stage(0, 1, 2, 3), {0: _stage(0, 1), 3: _stage(2, 3)}
    own = RankStages(stages)
    assert own.stages == stages
    assert list(dict(own.named_parameters())) == list(dict(model.named_parameters()))
    assert list(dict(own.named_buffers())) == list(dict(model.named_buffers()))
    assert list(own.state_dict()) == list(model.state_dict())
    assert list(dict(own.named_parameters("a"))) == list(dict(model.named_parameters("a")))
    assert [id(x) for x in own.parameters()] == [id(x) for stage in stages.values() for x in stage.parameters()]


def test_copies_of_shared_parameters_are_excluded_under_all_names() -> None:
    own = RankStages({2: _stage(2, tied=True)}, copies={2: ["embedding.weight"]})
    assert not [name for name, _ in own.named_parameters() if "layers" not in name]
    assert not [name for name, _ in own.named_parameters(remove_duplicate=False) if "layers" not in name]
    assert not [name for name in own.state_dict() if "layers" not in name]
    assert {"head.weight", "embedding.weight"} <= RankStages({2: _stage(2, tied=True)}).state_dict().keys()


def test_train_mode_and_zero_grad_apply_to_every_stage() -> None:
    own = RankStages({0: _stage(0), 1: _stage(1)})
    own.eval()
    assert not any(module.training for module in own.modules())
    for parameter in own.parameters():
        parameter.grad = torch.ones_like(parameter)
    own.zero_grad()
    assert all(parameter.grad is None for parameter in own.parameters())


def test_calling_the_stages_of_one_rank_as_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match="the stages of one rank are not a whole model; run them with an Executor or a"):
        RankStages({0: _stage(0)})(torch.ones(1))
