from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import StageInfo, UserError
from d9d_dist.planned_device import each_block
from d9d_loop import FunctionProvider
from d9d_loop.model.stage_check import build_stages, check_chain, check_parts
from d9d_pipeline import Inputs


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


class _Net(nn.Module):
    """Layers and a head that may be tied to the first layer; `fault` selects an error of the stages."""

    def __init__(self, stage: StageInfo, fault: str = "") -> None:
        super().__init__()
        self.stage, self.fault = stage, fault
        indices = stage.layers(4)
        if fault == "missing" and stage.index == 1:
            indices = indices[1:]
        size = 5 if fault == "another size" and stage.index == 1 else 4
        self.layers = nn.ModuleDict({str(index): nn.Linear(4, size if index else 4, bias=False) for index in indices})
        if fault.startswith("tied") and stage.is_last:
            if "0" not in self.layers:
                self.layers["0"] = nn.Linear(4, 4, bias=False)
            self.head = nn.Linear(4, 4, bias=False)
            if fault in ("tied", "tied and frozen"):
                self.head.weight = self.layers["0"].get_parameter("weight")
        if fault == "renamed" and stage.count > 1:
            self.extra = nn.Parameter(torch.empty(2))
        if fault == "buffers":
            self.register_buffer("table", torch.zeros(3))
        if fault == "tied and frozen" and stage.is_first:
            self.layers["0"].requires_grad_(False)

    def forward(self, x: Any, *, shift: Tensor) -> Any:
        x = x.first if isinstance(x, _Pair) else x
        for layer in self.layers.values():
            x = layer(x) + shift
        if self.fault == "returns a named tuple" and not self.stage.is_last:
            return _Pair(x, x)
        if self.fault == "returns a pair" and not self.stage.is_last:
            return x, x
        if self.fault == "reads values" and not x.sum().item():
            return x
        return x


def _stages(fault: str) -> tuple[nn.Module, list[nn.Module]]:
    provider = FunctionProvider(lambda stage: _Net(stage, fault))
    return build_stages(provider, 1)[0], build_stages(provider, 2)


def _inputs() -> Inputs:
    return Inputs(torch.ones(3, 4), shift=torch.ones(4))


def test_correct_stages_are_accepted_without_shared_parameters() -> None:
    model, stages = _stages("")
    assert check_parts(model, stages) == {}
    check_chain(model, stages, _inputs(), (0, 1))


def test_tied_parameters_may_be_on_several_stages() -> None:
    assert check_parts(*_stages("tied")) == {"layers.0.weight": (0, 1)}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "layers.2.weight is not on any stage"),
        ("renamed", "extra is on a stage, but not in the whole model"),
        ("another size", r"layers.2.weight is \[5, 4\] on stage 1, and \[4, 4\] in the whole model"),
        ("buffers", "the persistent buffer table is on the stages 0, 1, but a checkpoint stores only one"),
        ("tied and frozen", "layers.0.weight is frozen on some of the stages 0, 1 and trained on others"),
        ("tied in name only", "layers.0.weight is on the stages 0, 1, although the model does not tie it"),
    ],
)
def test_stages_that_do_not_make_up_the_model_are_refused(fault: str, message: str) -> None:
    with pytest.raises(UserError, match=f"the 2 stages that the model provider builds do not (.|\n)*{message}"):
        check_parts(*_stages(fault))


def test_a_stage_that_does_not_accept_its_input_is_refused() -> None:
    model, stages = _stages("returns a pair")
    message = (
        r"stage 1 of 2 does not accept what stage 0 returns, \(float32\[3, 4\], float32\[3, 4\]\): TypeError: (.|\n)*"
        r"Each stage must return the only positional argument of the next"
    )
    with pytest.raises(UserError, match=message):
        check_chain(model, stages, _inputs(), (0, 1))


def test_outputs_that_cannot_be_sent_are_refused_between_ranks_only() -> None:
    model, stages = _stages("returns a named tuple")
    check_chain(model, stages, _inputs(), (0, 0))
    with pytest.raises(UserError, match=r"got a container in a stage's output that cannot be (.|\n)* Return tuples,"):
        check_chain(model, stages, _inputs(), (0, 1))


def test_each_stage_runs_once_with_one_of_its_equal_blocks() -> None:
    ran: list[slice] = []

    class Blocks(nn.Module):
        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            ran.extend(each_block(100, 10))
            return x + shift

    check_chain(Blocks(), [Blocks(), Blocks()], _inputs(), (0, 1))
    assert ran == [slice(0, 10)] * 2


def test_a_model_that_cannot_run_on_meta_is_not_checked() -> None:
    check_chain(*_stages("reads values"), _inputs(), (0, 1))


def test_inputs_that_the_whole_model_refuses_raise_no_stage_error() -> None:
    model, stages = _stages("")
    check_chain(model, stages, Inputs(torch.ones(3, 7), shift=torch.ones(4)), (0, 1))
