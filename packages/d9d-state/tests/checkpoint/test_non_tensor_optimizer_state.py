"""Every torch optimizer resumes bitwise, on one process and on a mesh."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig, UserError, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_state import CheckpointStore, model_tensors, optimizer_tensors, prepare_optimizer_for_load
from d9d_state.checkpoint.non_tensor_optimizer_state import (
    group_values,
    non_tensor_optimizer_state,
    set_non_tensor_optimizer_state,
)

Build = Callable[[Iterable[Tensor]], optim.Optimizer]

_SHARDED: dict[str, Build] = {
    "sgd-momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam-amsgrad": lambda parameters: optim.Adam(parameters, lr=0.1, amsgrad=True),
    "nadam": lambda parameters: optim.NAdam(parameters, lr=0.1),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda parameters: optim.RMSprop(parameters, lr=0.01, momentum=0.9, centered=True),
}
_OPTIMIZERS: dict[str, Build] = {
    **_SHARDED,
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.1, maximize=True),
    "adamw-fused": lambda parameters: optim.AdamW(parameters, lr=0.1, fused=True),
    "adamax": lambda parameters: optim.Adamax(parameters, lr=0.1),
    "radam": lambda parameters: optim.RAdam(parameters, lr=0.1),
    "adadelta": lambda parameters: optim.Adadelta(parameters, lr=0.1),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=0.1),
    "asgd": lambda parameters: optim.ASGD(parameters, lr=0.1),
    "rprop": lambda parameters: optim.Rprop(parameters, lr=0.1),
    "counting": lambda parameters: _Counting([{"params": parameters}]),
}


class _Counting(optim.Optimizer):
    """Optimizer with numbers in its state and an estimate in its parameter groups."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.1, "estimate": 1.0, "best": math.inf, "seen": (0, 0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["estimate"] *= 1.1
            group["seen"] = (group["seen"][0] + 1, 7)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["odd"] = state["count"] % 2 == 1
                parameter.sub_(group["lr"] * group["estimate"] / state["count"] * parameter.grad)


class _Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x))) * self.frozen).square().sum()


def _steps(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()


def _tensors(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    return {**model_tensors(model), **optimizer_tensors(model, optimizer)}


def _save(store: CheckpointStore, model: nn.Module, optimizer: optim.Optimizer, ctx: Any = None) -> None:
    numbers = non_tensor_optimizer_state(model, optimizer)
    store.save(2, _tensors(model, optimizer), rank_state=numbers, ctx=ctx)


def _resume(store: CheckpointStore, model: nn.Module, optimizer: optim.Optimizer, ctx: Any = None) -> None:
    info = store.newest(ctx)
    assert info is not None
    prepare_optimizer_for_load(model, optimizer, info)
    store.load(info, _tensors(model, optimizer), ctx)
    set_non_tensor_optimizer_state(model, optimizer, info.rank_states)


def _everything(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    tensors = {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).tolist()
        for name, tensor in _tensors(model, optimizer).items()
    }
    return {**tensors, "numbers": non_tensor_optimizer_state(model, optimizer)}


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_new_optimizer_resumes_bitwise(tmp_path: Path, kind: str) -> None:
    model = _Model(0)
    optimizer = _OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
    store = CheckpointStore(tmp_path)
    _steps(model, optimizer, range(2))
    _save(store, model, optimizer)
    _steps(model, optimizer, range(2, 5))
    other = _Model(1)
    resumed = _OPTIMIZERS[kind](p for p in other.parameters() if p.requires_grad)
    _resume(store, other, resumed)
    _steps(other, resumed, range(2, 5))
    assert _everything(other, resumed) == _everything(model, optimizer)


def _goes_on_sharded(folder: str) -> list[str]:
    """Return the optimizers that did not resume bitwise."""
    wrong = []
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        for kind, build in _SHARDED.items():
            jobs = []
            for seed in (0, 1):
                model = _Model(seed)
                parallelize_hsdp(model, mesh, shard_axis="dp_cp_shard")
                jobs.append((model, build(p for p in model.parameters() if p.requires_grad)))
            store = CheckpointStore(f"{folder}/{kind}")
            _steps(*jobs[0], range(2))
            _save(store, *jobs[0], ctx)
            _steps(*jobs[0], range(2, 4))
            _resume(store, *jobs[1], ctx)
            _steps(*jobs[1], range(2, 4))
            if _everything(*jobs[0]) != _everything(*jobs[1]):
                wrong.append(kind)
    return wrong


def test_sharded_optimizers_resume_bitwise(tmp_path: Path) -> None:
    assert run_ranks(_goes_on_sharded, str(tmp_path)) == [[], []]


def test_unsupported_optimizer_state_is_refused() -> None:
    model = _Model(0)
    optimizer = optim.LBFGS([p for p in model.parameters() if p.requires_grad])
    loss = model(torch.ones(1, 3))
    loss.backward()
    optimizer.step(loss.item)
    with pytest.raises(ValueError, match=r"LBFGS has state \w+ of type \w+ for \w+, which a checkpoint cannot store"):
        optimizer_tensors(model, optimizer)


def test_only_changed_group_values_are_saved() -> None:
    model = _Model(0)
    optimizer = _Counting([{"params": model.up.parameters()}, {"params": model.down.parameters(), "lr": 0.5}])
    new = group_values(optimizer)
    assert non_tensor_optimizer_state(model, optimizer, since=new) == {"parameters": {}, "groups": []}
    optimizer.param_groups[1]["lr"] = 0.25
    optimizer.param_groups[1]["estimate"] = -math.inf
    saved: Any = non_tensor_optimizer_state(model, optimizer, since=new)
    assert saved["groups"] == [
        {"parameters": ["down.weight", "down.bias"], "values": {"lr": 0.25, "estimate": {"float": "-inf"}}}
    ]
    assert non_tensor_optimizer_state(model, optimizer, since=new, without=("lr", "estimate")) == {
        "parameters": {},
        "groups": [],
    }
    other = _Counting([{"params": model.down.parameters()}, {"params": model.up.parameters()}])
    set_non_tensor_optimizer_state(model, other, [saved])
    assert [(group["lr"], group["estimate"]) for group in other.param_groups] == [(0.25, -math.inf), (0.1, 1.0)]
    assert other.param_groups[0]["seen"] == (0, 0)


def test_a_tensor_in_a_group_stays_a_tensor() -> None:
    model = _Model(0)
    optimizer = optim.Adam(model.up.parameters(), lr=torch.tensor(0.5), capturable=False, foreach=False)
    saved = non_tensor_optimizer_state(model, optimizer)
    other = optim.Adam(model.up.parameters(), lr=torch.tensor(0.1), foreach=False)
    lr = other.param_groups[0]["lr"]
    set_non_tensor_optimizer_state(model, other, [saved])
    assert other.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5
    assert other.param_groups[0]["betas"] == (0.9, 0.999)


def test_state_of_pipeline_stages_is_merged() -> None:
    model = _Model(0)
    optimizer = _Counting([{"params": model.parameters()}])
    parts: list[Any] = [
        {"parameters": {"up.weight": {"count": 3}}, "groups": []},
        {"parameters": {"down.weight": {"count": 4}, "gone": {"count": 5}}, "groups": []},
    ]
    set_non_tensor_optimizer_state(model, optimizer, parts)
    assert (optimizer.state[model.up.weight]["count"], optimizer.state[model.down.weight]["count"]) == (3, 4)


@pytest.mark.parametrize("saved", [None, {}, {"parameters": [], "groups": []}, {"parameters": {}, "groups": [1]}])
def test_invalid_optimizer_numbers_are_refused(saved: Any) -> None:
    model = _Model(0)
    with pytest.raises(
        UserError, match=r"invalid non-tensor optimizer state .*; expected results of non_tensor_optimizer_state\(\)"
    ):
        set_non_tensor_optimizer_state(model, optim.SGD(model.parameters()), [saved])


def test_unsupported_group_values_are_refused() -> None:
    model = _Model(0)
    optimizer = optim.SGD(model.parameters())
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(ValueError, match=r"SGD\.param_groups\[0\]\['hook'\] is of type builtin_function_or_method"):
        group_values(optimizer)
