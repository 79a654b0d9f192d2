import pytest
import torch
from torch import nn

from d9d_dist import ModuleOffloader, UserError
from d9d_loop import Events, StateOffloaded, StateOnloaded
from d9d_loop.job.offloading import offloaded


def _trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_all_state_is_offloaded_for_the_body_and_then_restored() -> None:
    model, optimizer = _trained()
    tensors = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    before, seen = [tensor.detach().clone() for tensor in tensors], []
    events = Events()
    for kind in (StateOffloaded, StateOnloaded):
        events.on(kind, lambda event: seen.append((event, [tensor.untyped_storage().nbytes() for tensor in tensors])))
    with offloaded(ModuleOffloader(model, optimizer), events, step=7):
        assert [event for event, _ in seen] == [StateOffloaded(7)]
    sizes = [tensor.nbytes for tensor in tensors]
    assert seen == [(StateOffloaded(7), [0] * 4), (StateOnloaded(7), sizes)]
    assert all(map(torch.equal, tensors, before))


def test_an_exception_onloads_the_state() -> None:
    model, optimizer = _trained()
    before, offloader = model.weight.detach().clone(), ModuleOffloader(model, optimizer)
    with pytest.raises(RuntimeError, match="no rollouts"), offloaded(offloader, Events(), step=1):
        raise RuntimeError("no rollouts")
    assert torch.equal(model.weight, before)


def test_state_cannot_be_offloaded_twice() -> None:
    model, optimizer = _trained()
    offloader, events = ModuleOffloader(model, optimizer), Events()
    twice = pytest.raises(UserError, match="already offloaded")
    with offloaded(offloader, events, step=1), twice, offloaded(offloader, events, step=1):
        pass
    assert model.weight.untyped_storage().nbytes() == 24
