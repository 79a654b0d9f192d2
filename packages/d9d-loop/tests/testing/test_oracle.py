from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from d9d_dist import DistributedContext, StageInfo, parallelize_hsdp
from d9d_loop import Loss, ModelProvider, Task
from d9d_loop.testing import Experiment, assert_same_as_one_process, parse_layout, trace_layout

BATCH = [{"x": torch.linspace(i, 1, 4).sin(), "y": torch.tensor([i / 8])} for i in range(8)]


class _Regression(Task):
    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=outputs.numel())


class _Mlp(ModelProvider):
    def build(self, stage: StageInfo) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


class _Remembering(_Mlp):
    """Provider whose `build` sets an attribute that `parallelize` reads."""

    def build(self, stage: StageInfo) -> nn.Module:
        self.names = ("0", "2")
        return super().build(stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        for name in self.names:
            parallelize_hsdp(model.get_submodule(name), dense, shard_axis="dp_cp_shard")


def _average_gradients(module: nn.Module, _arguments: object) -> None:
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(2.0)
    module.set_force_sum_reduction_for_comms(True)


class _OnlyTheFirstLayer(_Mlp):
    """Bug: averages the gradients of its last layer instead of summing."""

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        last = model.get_submodule("2")
        parallelize_hsdp(last, dense, shard_axis="dp_cp_shard")
        if isinstance(last, FSDPModule):
            last.register_forward_pre_hook(_average_gradients)  # the check of the model sets the factor before
        parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")


def test_correct_layouts_pass() -> None:
    assert_same_as_one_process(_Mlp(), BATCH, task=_Regression(), layouts=["dp_shard=2,microbatch=2", "dp_replicate=4"])


def test_build_may_set_attributes_of_the_provider() -> None:
    assert_same_as_one_process(_Remembering(), BATCH, task=_Regression(), layouts=["dp_shard=2"])


def test_the_error_names_the_first_tensor_that_differs() -> None:
    with pytest.raises(
        AssertionError, match=r"First: step 1\.gradients\.2\.weight: relative error 0\.\d+; .* index \(0"
    ) as e:
        assert_same_as_one_process(_OnlyTheFirstLayer(), BATCH, task=_Regression(), layouts=["", "dp_shard=2"])
    assert e.value.__notes__ == ["in the layout 'dp_shard=2', compared with one process"]


def test_a_trace_has_every_step_in_float64() -> None:
    experiment = Experiment(model=_Mlp(), batch=BATCH, task=_Regression(), num_steps=2)
    trace = trace_layout(experiment, parse_layout("dp_shard=2"))
    assert list(trace) == ["step 1", "step 2", "parameters"]
    for step in ("step 1", "step 2"):
        assert list(trace[step]) == ["loss", "gradients", "grad_norm"]
        assert (
            list(trace[step]["gradients"]) == list(trace["parameters"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        )
        norm = torch.nn.utils.get_total_norm(trace[step]["gradients"].values())
        before = trace[step]["grad_norm"]
        # Gradients are clipped to 1; clipping adds 1e-6 to the norm, as torch does.
        assert norm.item() == pytest.approx(before * min(1.0, 1.0 / (before + 1e-6)), rel=1e-9)
    assert all(parameter.dtype == torch.float64 for parameter in trace["parameters"].values())


@contextmanager
def _own_weight() -> Generator[None]:
    with mock.patch("d9d_loop.engine.step_totals.StepTotals.start_reduction"):
        yield


def test_the_error_names_ranks_that_disagree() -> None:
    experiment = Experiment(model=_Mlp(), batch=BATCH, task=_Regression())
    with pytest.raises(AssertionError, match=r"step 1: rank 1 has \{'loss': .*\}, rank 0 has \{'loss'"):
        trace_layout(experiment, parse_layout("dp_shard=2"), around=_own_weight)
