import copy

import pytest
import torch
from torch import nn

from d9d_loop.optimizers import JoinedOptimizer, LocalSGD, ScheduleFreeAdamW, evaluation_weights


def _joined(model: nn.Linear) -> JoinedOptimizer:
    return JoinedOptimizer([ScheduleFreeAdamW([model.weight], lr=0.1), LocalSGD([model.bias], lr=0.2, momentum=0.9)])


def _step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_each_optimizer_updates_its_parameters() -> None:
    model = nn.Linear(2, 3)
    twin = copy.deepcopy(model)
    optimizer = _joined(model)
    others = ScheduleFreeAdamW([twin.weight], lr=0.1), LocalSGD([twin.bias], lr=0.1, momentum=0.9)
    optimizer.param_groups[1]["lr"] = 0.1  # as a schedule sets it
    for _ in range(3):
        _step(model, optimizer)
        twin(torch.ones(1, 2)).square().sum().backward()
        for other in others:
            other.step()
            other.zero_grad()
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)
    assert set(optimizer.state) == {model.weight, model.bias}
    with evaluation_weights(model, optimizer):
        assert not torch.equal(model.weight, twin.weight)
        assert torch.equal(model.bias, twin.bias)
    assert torch.equal(model.weight, twin.weight)


def test_joined_optimizers_load_their_state_dict() -> None:
    model = nn.Linear(2, 3)
    optimizer = _joined(model)
    _step(model, optimizer)
    twin = copy.deepcopy(model)
    other = _joined(twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's shares its tensors
    for _ in range(2):
        _step(model, optimizer)
        _step(twin, other)
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)


def test_add_param_group_is_refused() -> None:
    with pytest.raises(TypeError, match="does not support add_param_group; add the group to one of its"):
        _joined(nn.Linear(2, 3)).add_param_group({"params": []})


def test_a_closure_is_called_once_with_gradients() -> None:
    model = nn.Linear(2, 3)
    calls = []

    def closure() -> float:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        calls.append(loss.item())
        return loss.item()

    assert [_joined(model).step(closure)] == calls
    assert LocalSGD([model.bias]).step(closure) == calls[1]
