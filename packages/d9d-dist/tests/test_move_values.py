import pytest
import torch
from torch import nn

from d9d_dist import UserError
from d9d_dist.values.model_values import built_values, move_to_meta, move_values


def _partly_built() -> nn.Sequential:
    """Return a model whose first two layers share a weight without values."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    shared = nn.Parameter(torch.empty(3, 3, device="meta"), requires_grad=False)
    for layer in (model[0], model[1]):
        layer.weight = shared
    return model


def test_values_are_kept_and_other_tensors_are_allocated() -> None:
    model = _partly_built()
    before = built_values(model, ignore_meta=True)
    assert set(before) == {name for name in model.state_dict() if not name.endswith("weight")} | {"2.weight"}
    move_values(model, torch.device("cpu"))
    assert model[0].weight is model[1].weight
    assert not model[0].weight.is_meta
    assert not model[0].weight.requires_grad
    after = built_values(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_error_names_parameters_without_values() -> None:
    with pytest.raises(UserError, match=r"built without values for 0\.weight; expected real tensors"):
        built_values(_partly_built())


def test_tensors_without_values_do_not_overlap() -> None:
    model = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3))
    move_to_meta(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_expanded_buffers_and_those_of_the_inference_mode_can_be_written() -> None:
    model = nn.Module()
    model.register_buffer("expanded", torch.arange(3.0).expand(2, 3))
    model.register_buffer("channels_last", torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    with torch.inference_mode():
        model.register_buffer("inference", torch.ones(2))
    kept = model.get_buffer("channels_last")
    move_values(model, torch.device("cpu"))
    assert model.get_buffer("expanded").add_(1).tolist() == [[1, 2, 3], [1, 2, 3]]
    assert model.get_buffer("inference").add_(1).tolist() == [2, 2]
    assert model.get_buffer("channels_last") is kept
