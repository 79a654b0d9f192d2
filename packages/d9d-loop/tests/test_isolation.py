import random
from typing import Any

import numpy as np
import torch
from torch import nn

from d9d_loop.isolation import evaluation_mode


class _Merged(nn.Linear):
    """A low-rank update that evaluation mode merges into the weight, as loralib does."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.update, self.is_merged = nn.Parameter(torch.ones(2, 2)), False

    def train(self, mode: bool = True) -> "_Merged":
        super().train(mode)
        if self.is_merged is mode:
            self.weight.data += -self.update.data if mode else self.update.data
            self.is_merged = not mode
        return self


def test_modules_that_override_train_leave_the_evaluation_by_it() -> None:
    dropout, merged = nn.Dropout(0.5), _Merged()
    model = nn.Sequential(_Merged(), nn.Sequential(dropout, merged))
    dropout.eval()
    before = merged.weight.clone()
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        torch.testing.assert_close(merged.weight, before + 1)
    assert [module for module in model.modules() if not module.training] == [dropout]
    torch.testing.assert_close(merged.weight, before)
    merged.eval()
    with evaluation_mode(model):
        pass
    assert merged.is_merged


def test_generators_of_modules_have_their_states_again() -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1))
    model[0].python = random.Random(0)  # noqa: S311 - no cryptography
    model[0].numpy, model[0].torch = np.random.default_rng(0), torch.Generator()

    def draw() -> list[float]:
        layer = model[0]
        return [layer.python.random(), layer.numpy.random(), float(torch.rand((), generator=layer.torch))]

    with evaluation_mode(model):
        drawn = draw()
    assert draw() == drawn
    assert draw() != drawn
