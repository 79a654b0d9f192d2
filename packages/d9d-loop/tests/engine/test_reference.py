from pathlib import Path

import pytest
import torch
from opened_engines import TASK, config_of, take_step
from torch import Tensor, nn

from d9d_loop import Engine


def _bits(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().view(torch.int32).clone() for tensor in model.parameters()]


@pytest.mark.parametrize("fails", [False, True])
def test_the_reference_has_the_initial_values_and_restores_the_trained_ones_bitwise(
    tmp_path: Path, *, fails: bool
) -> None:
    model = nn.Linear(3, 2)
    initial = _bits(model)
    with Engine.open(config_of(tmp_path), model=lambda stage: model, task=TASK, reference="initial") as engine:
        take_step(engine)
        with torch.no_grad():
            model.bias.copy_(torch.tensor([-0.0, torch.nan]))
        trained = _bits(model)
        try:
            with engine.reference():
                assert all(map(torch.equal, _bits(model), initial))
                if fails:
                    raise InterruptedError
        except InterruptedError:
            assert fails
        assert all(map(torch.equal, _bits(model), trained))
        assert not any(map(torch.equal, trained, initial))
