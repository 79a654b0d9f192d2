import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from opened_engines import TASK
from torch import Tensor, nn

from d9d_loop import Engine
from d9d_loop.engine import engine as engine_module


def test_no_tensor_is_kept_while_the_next_group_is_gathered(ctx: Any) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def gathered(*args: Any) -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            assert not any(each() is not None for each in kept)
            tensor = torch.zeros(2)
            kept.append(weakref.ref(tensor))
            yield f"weight {number}", tensor
            del tensor

    model = nn.Linear(2, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters()), ctx=ctx, task=TASK)
    with mock.patch.object(engine_module, "gathered_weights", gathered):
        for _name, tensor in engine.weights():
            del tensor
    assert len(kept) == 3
