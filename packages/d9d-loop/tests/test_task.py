from collections.abc import Mapping
from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_loop import Loss, Task
from d9d_loop.task import to_inputs
from d9d_pipeline import Inputs


class _Plain(Task):
    def inputs(self, batch: Any) -> Mapping[str, Any]:
        return {"x": batch}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(outputs.sum(), weight=1)


def test_a_task_needs_only_inputs_and_a_loss() -> None:
    task = _Plain()
    assert task.metrics() == {}
    assert task.weight_unit == "items"
    task.update_metrics({}, outputs=None, batch=None, loss=Loss(torch.zeros(()), 1))


def test_a_mapping_is_passed_as_keyword_arguments() -> None:
    inputs = to_inputs(_Plain().inputs(3))
    assert (inputs.first, inputs.shared) == ((), {"x": 3})


def test_inputs_objects_are_returned_unchanged() -> None:
    inputs = Inputs(1, y=2)
    assert to_inputs(inputs) is inputs


@pytest.mark.parametrize("weight", [True, torch.tensor(True)])
def test_a_truth_value_is_no_weight(weight: Any) -> None:
    with pytest.raises(UserError, match=r"got weight = (True|a bool tensor) of a Loss; expected the number of the sum"):
        Loss(torch.ones(()), weight)
