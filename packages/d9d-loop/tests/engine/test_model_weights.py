import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from d9d_loop.engine import model_weights
from d9d_loop.engine.model_weights import ModelWeights


def test_no_tensor_is_kept_while_the_next_group_is_gathered(ctx: Any) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def gathered(*args: Any) -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            assert not any(each() is not None for each in kept)
            tensor = torch.zeros(2)
            kept.append(weakref.ref(tensor))
            yield f"weight {number}", tensor
            del tensor

    weights = ModelWeights(nn.Linear(2, 2), None, ctx, version=lambda: 0)
    with mock.patch.object(model_weights, "gathered_weights", gathered):
        for _name, tensor in weights.gathered(base_only=False):
            del tensor
    assert len(kept) == 3
