from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as pytree

from d9d_dist import UserError
from d9d_pipeline.channel import stage_output


@dataclass
class _Output:
    hidden: torch.Tensor


def test_outputs_that_can_be_sent_are_described() -> None:
    described = stage_output({"hidden": torch.zeros(2, 3), "loss": None})
    assert [leaf and (leaf.shape, leaf.dtype) for leaf in described.leaves] == [((2, 3), torch.float32), None]


def test_outputs_that_cannot_be_sent_are_errors() -> None:
    with pytest.raises(UserError, match=r"got int in a stage's output that is sent to another rank; expected tensors"):
        stage_output((torch.zeros(2), 3))
    pytree.register_pytree_node(_Output, lambda each: ([each.hidden], None), lambda leaves, _: _Output(*leaves))
    with pytest.raises(UserError, match="got a container in a stage's output that cannot be serialized for another"):
        stage_output(_Output(torch.zeros(2)))
